"""Files that ranks leave in an attempt's folder: results at the end, and a log of steps on the way."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.rank.json_files import read_as
from harness.rank.orders import Orders, UnreadableError
from harness.records.store import Document, loads
from impl.files import naming

FLUSH_SECONDS = 0.5
HASHES = "hashes"
"""Key of a step's hashes in what is measured, and saved along with a checkpoint."""
RESUMED = "resumed.json"
MEMORY = "peak_memory_bytes"
"""Key of the rank's peak so far in the log of its steps; records have the last one alone."""
EVALUATIONS = "rank-0.evaluations.jsonl"
"""Log of evaluations, a line each, of the attempt alone."""


@dataclass(frozen=True)
class Result:
    """Result of a rank that came to its end; JSON objects are copied into the record."""

    status: str
    seconds: dict[str, float]
    """Durations of the run's parts."""
    evaluations: list[Document]
    rank: Document
    """Rank's own measurements."""
    reason: str | None = None
    engine: Document = field(default_factory=dict)
    device: Document = field(default_factory=dict)
    resolved: Document = field(default_factory=dict)
    certificate: list[Document] = field(default_factory=list)
    """Hashes of each step; empty without certificate."""


@dataclass(frozen=True)
class Resumption:
    """File that rank 0 leaves if there are checkpoints of earlier attempts, which may be damaged; before it trains."""

    warnings: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    """Steps at which training was resumed, this attempt's the last; empty if it begins at step 0."""
    git: Document = field(default_factory=dict)


def result_of(attempt: Path, rank: int) -> Result | None:
    """Return the result of a rank; None if there is none, or it is damaged."""
    return read_as(Result, attempt / f"rank-{rank}.json")


def has_results(attempt: Path) -> bool:
    """Return True if every rank has left its result."""
    orders = Orders.found(attempt)
    return orders is not None and all(result_of(attempt, rank) is not None for rank in range(orders.ranks))


class StepLog:
    """Log of a rank's steps, a line each, written at the first step that ends FLUSH_SECONDS after the last writing.

    Raises:
        OSError: it cannot be written; with its name.
    """

    def __init__(self, attempt: Path, rank: int, steps: Sequence[Document]) -> None:
        self.path, self.flushed = steps_path(attempt, rank), 0.0
        with naming(self.path):
            self.file = open(self.path, "w")  # noqa: SIM115  (until `close`)
        for line in steps:
            self.add(line)

    def add(self, line: Document) -> None:
        """Add a step, without its hashes."""
        with naming(self.path):
            self.file.write(json.dumps({name: line[name] for name in line if name != HASHES}) + "\n")
            if time.perf_counter() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.perf_counter()

    def close(self) -> None:
        """Write what is left."""
        with naming(self.path):
            self.file.close()


def note_evaluations(attempt: Path, found: Sequence[Document]) -> None:
    """Add evaluations to their log, for those that follow the run; records have them from the ranks' results."""
    with naming(attempt / EVALUATIONS), (attempt / EVALUATIONS).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in found)


def steps_path(attempt: Path, rank: int) -> Path:
    """Return the path of a rank's log of steps."""
    return attempt / f"rank-{rank}.steps.jsonl"


def steps_so_far(attempt: Path, rank: int = 0) -> list[Document]:
    """Return the steps in a rank's log, without a torn last line; a loss that is not finite is None.

    Raises:
        UnreadableError: a line is not the step that follows the one before it.
    """
    path = steps_path(attempt, rank)
    try:
        lines = path.read_bytes().decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError:
        return []
    found = []
    for i, line in enumerate(lines):
        if (step := step_of(line)) is None or step["step"] != i:
            raise UnreadableError(f"{path}: line {i + 1} is not step {i}")
        found.append(step)
    return found


def step_of(line: str) -> Document | None:
    """Return the step in a line of a log; None if there is none."""
    try:
        step = loads(line)
        numbers = [step["step"], step["seconds"]]
        measured = [step["loss"], step.get("grad_norm"), step.get("lr")]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    numbers += [found for found in measured if found is not None]  # None: not finite
    return step if all(type(number) in (int, float) for number in numbers) else None
