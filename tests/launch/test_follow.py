"""What a display is told of a point that runs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.experiment.experiment import Point
from harness.launch.follow import LATEST, Display, Follower, latest_steps
from harness.rank.results import RESUMED
from impl.run import Run
from tests.harness.made_up_records import changed, record
from tests.harness.small_runs import Told


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.steps.jsonl"


def step(number: int, **fields: Any) -> str:
    return json.dumps({"step": number, "loss": 1.0, "seconds": 0.5, **fields}) + "\n"


def test_the_last_steps_of_a_growing_log_are_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = lambda: [one["step"] for one in latest_steps(path)]
    assert numbers() == []
    text = "".join(map(step, range(25)))
    path.write_text(text[:-10])
    assert numbers() == list(range(24 - LATEST, 24)), "the last line is not whole yet"
    path.write_text(text)
    assert numbers() == list(range(25 - LATEST, 25))
    path.write_text(step(3) + step(4, loss=float("nan")))
    assert [(one["step"], one["loss"]) for one in latest_steps(path)] == [(3, 1.0), (4, None)]
    path.write_text(text)
    monkeypatch.setattr("harness.launch.follow.TAIL_BYTES", 300)
    assert 0 < len(numbers()) < LATEST
    assert numbers()[-1] == 24


@pytest.mark.parametrize("junk", ["{\n", "[]\n", "null\n", "\xff\xfe\n", '{"step": 1}\n', "[" * 5000 + "\n"])
def test_what_is_no_step_is_left_out(path: Path, junk: str):
    path.write_bytes(step(0).encode() + junk.encode("latin-1") + step(1).encode())
    assert [one["step"] for one in latest_steps(path)] == [0, 1]


def test_a_point_starts_and_resumes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.follow.LOOK_SECONDS", 0.0)
    told = Told()
    follower = Follower(told, Point(Run(), "one"), tmp_path, is_shown=False)
    (tmp_path / RESUMED).write_text(json.dumps({"resumed": [40], "warnings": ["a checkpoint was damaged"]}))
    follower.look()
    follower.look()
    assert told.starts == [Run().id]
    assert told.messages == ["one: a checkpoint was damaged", "one: goes on from step 40 of 100"]
    (tmp_path / RESUMED).write_text(json.dumps({"resumed": [], "warnings": ["no checkpoint is whole"]}))
    Follower(told, Point(Run(), "two"), tmp_path, is_shown=True).look()
    assert told.messages[2:] == ["two: no checkpoint is whole", "two: begins again at step 0"]


def test_a_display_counts_every_point_and_tells_the_queue_when_it_changes():
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    some = [Point(Run(seed=seed), f"seed={seed}") for seed in range(3)]
    steps = [{"step": 41, "loss": 2.5, "seconds": 0.1}]
    ended = changed(record(train__steps=1), steps=[{"step": 0, "loss": 2.5}], times={"total_seconds": 3.0})
    with Display(3, console) as display:
        display.counted(some[0])
        display.waiting(2, 0)
        display.waiting(2, 0)
        for point in some[1:]:
            display.started(point)
            display.started(point)  # a second try
            display.advanced(point, steps)
        display.waiting(0, 2)
        display.finished(some[1], ended)
        display.finished(some[2], changed(ended, status="failed", reason="rank 0: [red] no luck"))
    assert shown.getvalue().splitlines() == [
        "  0 running, 2 pending",
        "  2 running, 0 pending",
        "[2/3] seed=1: ok, last loss 2.5000, 3 s",
        "[3/3] seed=2: failed: rank 0: [red] no luck",
    ]
