"""Calls of the command line in this process, and what must hold of every answer."""

import contextlib
import dataclasses
import importlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.cli import sweeps
from harness.cli.main import main
from harness.experiment import loading
from harness.experiment.experiment import TIERS, Experiment
from harness.records.store import SCHEMA, with_digest
from impl.run import Run


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


class Started(BaseException):  # no verb may take it for an error
    """Training would have begun."""


def stop_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a command that would train raise `Started`, on a machine without GPUs."""

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(sweeps, "sweep", start)
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 0)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, so that no test writes into the project's own results; signals are handled as before."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def report_little(monkeypatch: pytest.MonkeyPatch, *, everywhere: bool = False, manual: bool = False) -> None:
    """Makes a report have a planner of few plans, of one model on one system unless `everywhere`, and no manual."""
    from harness.report import planner

    if not manual:
        monkeypatch.setattr("harness.cli.manual.CODE", Path("/nowhere"))
        monkeypatch.setattr("harness.cli.manual._verbs", str)  # all help takes longer than the rest
    little = {"tp": (1, 2), "pp": (1, 2), "dp": (1, 2), "microbatch": (1,), "chunks": (1, 2)}
    monkeypatch.setattr(planner, "GRID", planner.GRID | little)
    if not everywhere:
        monkeypatch.setattr(planner, "SYSTEMS", ("frontier",))
        monkeypatch.setattr(planner, "MODELS", ("llama-2-13b",))


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before_training(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("harness.cli.sweeps", "harness.launch.slurm"):
        monkeypatch.setattr(f"{name}.gpu_count", lambda: 0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def made_up(runs: list[Run]) -> Experiment:
    """An experiment of these runs at every tier."""
    cost = dict.fromkeys(TIERS, "a moment")
    tiers = dict.fromkeys(TIERS, runs)
    return Experiment(id="made_up", question="Does it run?", source="none", expectation="", cost=cost, runs=tiers)


def answer_every_name(monkeypatch: pytest.MonkeyPatch, found: Experiment) -> None:
    """Makes `run`, `table`, `status` and their like find this experiment, whatever it is called."""
    rooms = {"cli": ("claims", "predict", "report", "show"), "report": ("archive", "inbox")}
    for name in (f"harness.{room}.{module}" for room, modules in rooms.items() for module in modules):
        importlib.import_module(name)  # they import `load` by name: not this one, for ever
    monkeypatch.setattr(loading, "load", lambda _: found)


def call(*arguments: str | Path) -> Answer:
    """The command line in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0
    return Answer(status, output.getvalue(), errors.getvalue())


def refused(*arguments: str | Path) -> str:
    """What is wrong with a command, after checking how it is said."""
    answer = call(*arguments)
    assert answer.status == 2, answer
    assert answer.output == ""
    return the_error(answer.errors)


def the_error(errors: str) -> str:
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: "), errors
    assert errors.endswith("\n")
    assert len(errors) > len("error: \n")
    assert "Traceback" not in errors
    return errors.strip()


def document(text: str) -> Any:
    """The one JSON document in a text; NaN and the like are not JSON."""

    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no_json)


def put_record(out: Path, experiment: str, run: Run, **fields: Any) -> Path:
    record = {"schema": SCHEMA, "id": run.id, "experiment": experiment, "tier": "smoke", "source": "measured"}
    record |= {"config": json.loads(json.dumps(dataclasses.asdict(run))), "status": "ok", "reason": None}
    path = out / experiment / "smoke" / "records" / f"{run.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(with_digest(json.dumps(record | fields)))
    return path
