"""Reports of pytest-benchmark, as far as they are read."""

from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, Field, FiniteFloat, JsonValue

from harness.records.environment import CODE

FOLDER = CODE / "tests" / "bench"
BASELINE = "baseline.json"
MS: dict[str, Any] = {"unit": "ms", "scale": 1e-3, "si": "s"}


class Stats(BaseModel):
    """Median and interquartile range of the seconds of one benchmark's rounds, and their number."""

    median: Annotated[FiniteFloat, Field(gt=0)]
    iqr: Annotated[FiniteFloat, Field(ge=0)]
    rounds: int


class Benchmark(BaseModel):
    """One benchmark of a report."""

    fullname: str
    commit: str | None = None
    stats: Stats


def _at(*path: str) -> Any:
    """Return a field whose value is at this place of a report's environment; None where not known."""
    return Field(default=None, validation_alias=AliasPath("machine_info", "environment", *path))


class Report(BaseModel):
    """Parts that are read of a report by pytest-benchmark."""

    environment: dict[str, JsonValue] | None = _at()
    commit: str | None = _at("git", "commit")
    processor: JsonValue = _at("processor")
    cores: JsonValue = _at("cores")
    torch: JsonValue = _at("packages", "torch")
    benchmarks: list[Benchmark]

    @property
    def machine(self) -> dict[str, JsonValue]:
        """Return the properties of a machine that times depend on."""
        return {"processor": self.processor, "cores": self.cores, "torch": self.torch}

    @property
    def timings(self) -> dict[str, Stats]:
        """Benchmarks of more than one round, by name."""
        return {name_of(one.fullname): one.stats for one in self.benchmarks if one.stats.rounds > 1}


def name_of(node: str) -> str:
    """Return a benchmark's name: its file in the folder of benchmarks, its function, its parameters."""
    file, _, function = node.partition("::")
    return f"{file.rpartition(f'{FOLDER.name}/')[2]}::{function}"
