"""What trackers are given of runs as they train: each step once, through resumption; and nothing stops training."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.experiment.experiment import Point
from harness.launch import trackers
from harness.launch.trackers import KINDS, Opening, Trackers, Values
from harness.rank.results import EVALUATIONS, RESUMED
from impl.run import Run
from tests.documents import ROOT
from tests.harness.calls import Answer, call, refused
from tests.harness.made_up_records import changed, record

POINT = Point(Run(), "hidden=64 / one")
EVALUATION = {"name": "valid", "kind": "causal", "nats": 20.0, "tokens": 10, "key": {}}


class Kept:
    """A tracker that remembers."""

    all: ClassVar[list["Kept"]] = []

    def __init__(self, opening: Opening) -> None:
        self.opening, self.id, self.rows, self.status = opening, opening.known or f"new {len(self.all)}", [], None
        self.all.append(self)

    def log(self, rows: Sequence[tuple[int, Values]]) -> None:
        self.rows += rows

    def close(self, status: str) -> None:
        self.status = status

    @property
    def steps(self) -> list[int]:
        return [step for step, values in self.rows if "train/loss" in values]


class Broken(Kept):
    def log(self, rows: Sequence[tuple[int, Values]]) -> None:
        raise OSError("the disk\nis full")


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "kept", Kept)
    monkeypatch.setitem(KINDS, "broken", Broken)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "kept" or find_spec(name))
    monkeypatch.setattr(Kept, "all", [])


def attempt(folder: Path, name: str, steps: range, resumed: int | None = None) -> Path:
    path = folder / "quickstart" / "small" / "attempts" / name
    path.mkdir(parents=True, exist_ok=True)
    if resumed is not None:
        (path / RESUMED).write_text(json.dumps({"resumed": [resumed] * bool(resumed), "warnings": []}))
    with (path / "rank-0.steps.jsonl").open("a") as log:
        log.writelines(json.dumps(line(i)) + "\n" for i in steps)
    return path


def line(step: int, **fields: Any) -> dict[str, Any]:
    seconds = {"seconds": 0.5, "peak_memory_bytes": 7}
    return {"step": step, "loss": 3.0 - step, "grad_norm": 1.0, "lr": 1e-3, **seconds, **fields}


def test_each_step_is_passed_on_once_with_its_values(tmp_path: Path) -> None:
    followed = Trackers(["kept"], tmp_path)
    path = attempt(tmp_path, "a-1", range(2))
    followed.follow(POINT, path)
    followed.follow(POINT, path)
    with (path / "rank-0.steps.jsonl").open("a") as log:
        log.write(json.dumps(line(2, loss=float("nan"))) + "\n" + json.dumps(line(3))[:10])
    followed.follow(POINT, path)
    [found] = Kept.all
    assert found.steps == [0, 1, 2]
    tokens = Run().tokens_per_step
    assert found.rows[1] == (
        1,
        {
            "train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 1e-3, "train/step_seconds": 0.5,
            "train/tokens_per_second": 2 * tokens, "train/peak_memory_bytes": 7,
        },
    )  # fmt: skip
    assert found.rows[2][1]["train/loss"] != found.rows[2][1]["train/loss"], "not finite is NaN"
    assert (found.opening.group, found.opening.name) == ("quickstart-small", "hidden=64---one-a-1")


def test_a_resumed_attempt_repeats_no_step_in_another_command_either(tmp_path: Path) -> None:
    first = Trackers(["kept"], tmp_path)
    first.follow(POINT, attempt(tmp_path, "a-1", range(5)))
    first.close()
    second = Trackers(["kept"], tmp_path)
    second.follow(POINT, attempt(tmp_path, "a-2", range(8), resumed=3))
    second.finished(POINT, changed(record(), status="ok"))
    assert [one.steps for one in Kept.all] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert {one.id for one in Kept.all} == {"new 0"}
    assert len({one.opening.name for one in Kept.all}) == 1
    assert [one.status for one in Kept.all] == ["", "ok"]


def test_an_attempt_that_begins_again_is_a_run_of_its_own(tmp_path: Path) -> None:
    followed = Trackers(["kept"], tmp_path)
    followed.follow(POINT, attempt(tmp_path, "a-1", range(5)))
    followed.follow(POINT, attempt(tmp_path, "a-2", range(3), resumed=0))
    assert [(one.steps, one.id) for one in Kept.all] == [([0, 1, 2, 3, 4], "new 0"), ([0, 1, 2], "new 1")]
    assert Kept.all[0].status == ""


def test_a_log_that_is_written_again_by_a_requeued_job_repeats_nothing(tmp_path: Path) -> None:
    followed = Trackers(["kept"], tmp_path)
    path = attempt(tmp_path, "a-1", range(5))
    followed.follow(POINT, path)
    (path / "rank-0.steps.jsonl").unlink()
    followed.follow(POINT, attempt(tmp_path, "a-1", range(3)))
    followed.follow(POINT, attempt(tmp_path, "a-1", range(3, 7)))
    assert Kept.all[0].steps == list(range(7))


def test_evaluations_are_passed_on_as_they_are_made_and_at_the_end(tmp_path: Path) -> None:
    followed = Trackers(["kept"], tmp_path)
    path = attempt(tmp_path, "a-1", range(3))
    (path / EVALUATIONS).write_text(json.dumps({"step": 2, **EVALUATION}) + "\n")
    followed.follow(POINT, path)
    ends = [{"step": 2, **EVALUATION}, {"step": 3, **EVALUATION, "nats": 10.0}]
    followed.finished(POINT, changed(record(), evaluations=ends))
    of_text = [(step, values) for step, values in Kept.all[0].rows if "train/loss" not in values]
    assert of_text == [(2, {"validation/valid/nats_per_token": 2.0}), (3, {"validation/valid/nats_per_token": 1.0})]


def test_a_tracker_that_fails_is_left_out_with_one_line(tmp_path: Path) -> None:
    messages: list[str] = []
    followed = Trackers(["broken", "kept"], tmp_path, messages.append)
    path = attempt(tmp_path, "a-1", range(2))
    followed.follow(POINT, path)
    followed.follow(POINT, attempt(tmp_path, "a-1", range(2, 4)))
    assert messages == ["--track broken: the disk is full; training goes on without it"]
    assert [one.steps for one in Kept.all if type(one) is Kept] == [[0, 1, 2, 3]]


def test_of_two_commands_that_follow_a_run_one_does(tmp_path: Path) -> None:
    path = attempt(tmp_path, "a-1", range(3))
    beside = (
        "import sys; from pathlib import Path; from tests.launch.test_trackers import *\n"
        "KINDS['kept'] = Kept; follower = Trackers(['kept'], Path(sys.argv[1]))\n"
        "follower.follow(POINT, Path(sys.argv[2])); print([one.steps for one in Kept.all], flush=True)\n"
        "input(); follower.follow(POINT, Path(sys.argv[2])); print([one.steps for one in Kept.all])"
    )
    followed = Trackers(["kept"], tmp_path)
    followed.follow(POINT, path)
    command = [sys.executable, "-c", beside, tmp_path, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "[]\n"
        followed.close()
        attempt(tmp_path, "a-1", range(3, 5))
        other.stdin.write("\n")
        other.stdin.close()
        assert other.stdout.readline() == "[[3, 4]]\n"
    assert Kept.all[0].steps == [0, 1, 2]


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    Trackers((), tmp_path).follow(POINT, attempt(tmp_path, "a-1", range(2)))
    assert not (tmp_path / trackers.FOLDER).exists()


def test_a_tracker_that_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "valid: tensorboard, wandb, mlflow" in refused("run", "quickstart", "--track", "tensorbord")
    monkeypatch.setitem(KINDS, "no_such_package", Kept)
    assert "pip install no_such_package" in refused("run", "quickstart", "--track", "kept,no_such_package")
    assert "needs --out" in refused("train", "--track", "kept")


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_is_tracked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train = "train --model gpt-0.5m --train.steps 6 --train.global-batch 2 --train.microbatch 2 --model.num-layers 1"
    options = "--evaluation.every 3 --evaluation.sequences 8 --track kept --out mine"
    answer: Answer = call(*train.split(), *options.split())
    assert answer.status == 0, answer.errors
    [found] = Kept.all
    assert (found.steps, found.status) == (list(range(6)), "ok")
    assert [step for step, values in found.rows if "validation/valid/nats_per_token" in values] == [3, 6]
    assert all(values["train/peak_memory_bytes"] > 2**20 for _, values in found.rows if "train/loss" in values)
    [document] = (tmp_path / "mine/train/small/records").glob("*.json")
    assert "peak_memory_bytes" not in json.loads(document.read_text())["steps"][0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_the_packages_keep_each_step_once(name: str, tmp_path: Path) -> None:
    """Where they are installed: `pip install 'lmscale[trackers]'`."""
    pytest.importorskip(name)
    messages: list[str] = []
    for resumed, steps in ((None, range(5)), (3, range(8))):
        followed = Trackers([name], tmp_path, messages.append)
        followed.follow(POINT, attempt(tmp_path, f"a-{resumed}", steps, resumed))
        if resumed:
            ends = [{"step": 8, **EVALUATION}]
            followed.finished(POINT, changed(record(), status="ok", evaluations=ends))
        followed.close()
    assert not messages
    losses, nats = READ[name](tmp_path / "tracked")
    assert losses == [(step, 3.0 - step) for step in range(8)]
    assert nats == [(8, 2.0)]


def of_tensorboard(folder: Path) -> tuple[Any, ...]:
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    [run] = (folder / "tensorboard" / "quickstart-small").iterdir()
    found = events.EventAccumulator(str(run))
    found.Reload()
    return tuple([(one.step, one.value) for one in found.Scalars(tag)] for tag in TAGS)


def of_mlflow(folder: Path) -> tuple[Any, ...]:
    client = import_module("mlflow.tracking").MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("quickstart-small").experiment_id])
    assert run.info.status == "FINISHED"
    history = lambda tag: client.get_metric_history(run.info.run_id, tag)
    return tuple(sorted((one.step, one.value) for one in history(tag)) for tag in TAGS)


def of_wandb(folder: Path) -> tuple[Any, ...]:
    records = import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in parts(file.read_bytes()):
            found = records.Record()
            found.ParseFromString(data)
            items = found.history.item
            keys = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            rows += [keys] if keys else []
    return tuple([(row["step"], row[tag]) for row in rows if tag in row] for tag in TAGS)


def parts(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's format of logs, after a head of 7 bytes."""
    at, whole, block, last = 7, b"", 2**15, (1, 4)
    while at + 7 <= len(log):
        if (rest := block - at % block) < 7:
            at += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in last:
            yield whole
            whole = b""


TAGS = ("train/loss", "validation/valid/nats_per_token")
READ = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
