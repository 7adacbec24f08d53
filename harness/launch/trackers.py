"""Trackers: what ranks write as they train, passed on to TensorBoard, Weights & Biases or MLflow.

The process that supervises a sweep reads the logs of rank 0, so that no rank is slower for it. A file for each run
keeps how far it was passed on: an attempt that resumes from a checkpoint repeats no step, and one that begins again is
a run of its own there. Of several commands that would follow a run, one does. All of it stays on this machine, unless
the packages' own variables name a server.
"""

import fcntl
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from harness.experiment.experiment import Point
from harness.rank.json_files import read_as, write_as
from harness.rank.results import EVALUATIONS, MEMORY, RESUMED, Resumption, step_of, steps_path
from harness.records.labels import fields
from harness.records.record import Record
from harness.records.store import Document, loads
from impl.errors import InputError, in_one_line
from impl.run import Run, to_dict

PROJECT = "lmscale"
FOLDER = "tracked"
"""Folder of what trackers write, in that of the records."""
KEEP_SECONDS = 5.0
"""Time between two writes of how far a run was passed on; what is lost in a crash is passed on twice at most."""
Values = Mapping[str, float]


def tracker_names(names: str) -> tuple[str, ...]:
    """Return the trackers in a list with commas.

    Raises:
        InputError: there is no such tracker, or its package is not installed.
    """
    found = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    for name in found:
        if name not in KINDS:
            raise InputError(f"--track {name}: no such tracker; valid: {', '.join(KINDS)}, several with commas")
        if find_spec(name) is None:
            raise InputError(
                f"--track {name}: the package {name} is not installed; `pip install {name}`, or all of them with "
                f"`pip install 'lmscale[trackers]'`; valid here: {', '.join(filter(find_spec, KINDS)) or 'none'}"
            )
    return found


@dataclass
class Kept:
    """State of a run's trackers, kept in a file: how much of the run they have."""

    name: str = ""
    """Name of the run there: its label, its id, and the first attempt of those that continue each other."""
    attempt: str = ""
    steps: int = 0
    evaluations: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    """Identifiers that trackers gave it."""


class Opening(NamedTuple):
    """Run as a tracker opens it."""

    folder: Path
    group: str
    name: str
    run: Run
    known: str
    """Identifier that the tracker gave it before; "" for a new run."""


class Tracker(Protocol):
    """Run in a tracker; `id` is how it is opened again."""

    id: str

    def log(self, rows: Sequence[tuple[int, Values]]) -> None: ...
    def close(self, status: str) -> None: ...


class TensorBoard:
    """Event files: `tensorboard --logdir FOLDER/tensorboard`."""

    id = ""

    def __init__(self, opening: Opening) -> None:
        writers = import_module("tensorboard.summary.writer.event_file_writer")
        self.writer = writers.EventFileWriter(str(opening.folder / "tensorboard" / opening.group / opening.name))

    def log(self, rows: Sequence[tuple[int, Values]]) -> None:
        """Add values of steps."""
        proto = "tensorboard.compat.proto"
        events, summaries = import_module(f"{proto}.event_pb2"), import_module(f"{proto}.summary_pb2")
        for step, values in rows:
            of_step = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            summary = summaries.Summary(value=of_step)
            self.writer.add_event(events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self, status: str) -> None:
        """Write what is left."""
        self.writer.close()


class WandB:
    """Run of Weights & Biases, offline unless WANDB_MODE has another word: `wandb sync FOLDER/wandb/*`."""

    def __init__(self, opening: Opening) -> None:
        wandb = import_module("wandb")
        self.id = opening.known or secrets.token_hex(4)
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        self.run: Any = wandb.init(
            project=PROJECT, dir=str(opening.folder), id=self.id, name=opening.name, group=opening.group,
            config=to_dict(opening.run), mode=os.environ.get("WANDB_MODE") or "offline", resume="allow",
            reinit="create_new", settings=quiet,
        )  # fmt: skip
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # an evaluation may come after later steps

    def log(self, rows: Sequence[tuple[int, Values]]) -> None:
        """Add values of steps."""
        for step, values in rows:
            self.run.log({"step": step, **values})

    def close(self, status: str) -> None:
        """End the run."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status not in ("", "ok")))


class MLflow:
    """Run of MLflow: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`; or where MLFLOW_TRACKING_URI says."""

    def __init__(self, opening: Opening) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{opening.folder / 'mlflow.db'}"
        self.client = import_module("mlflow.tracking").MlflowClient(place)
        self.id = opening.known or self._new(opening)

    def _new(self, opening: Opening) -> str:
        found = self.client.get_experiment_by_name(opening.group)
        artifacts = (opening.folder / "mlflow").as_uri()
        of = found.experiment_id if found else self.client.create_experiment(opening.group, artifact_location=artifacts)
        run = self.client.create_run(of, run_name=opening.name).info.run_id
        for name, value in fields(opening.run).items():
            self.client.log_param(run, name, value)
        return run

    def log(self, rows: Sequence[tuple[int, Values]]) -> None:
        """Add values of steps."""
        metric = import_module("mlflow.entities").Metric
        now = int(1000 * time.time())
        metrics = [metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        for i in range(0, len(metrics), 1000):  # more are refused
            self.client.log_batch(self.id, metrics[i : i + 1000])

    def close(self, status: str) -> None:
        """End the run."""
        if status:
            self.client.set_terminated(self.id, "FINISHED" if status == "ok" else "FAILED")


KINDS: dict[str, Callable[[Opening], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Trackers by the name of the package that each needs."""


class Followed:
    """Run that is passed on: its open trackers, and the places in the logs of its attempt."""

    def __init__(self, path: Path, lock: IO[str], kept: Kept, trackers: dict[str, Tracker]) -> None:
        self.path, self.lock, self.kept, self.trackers = path, lock, kept, trackers
        self.written = 0.0
        self.read: dict[Path, int] = {}

    def lines(self, log: Path) -> list[str]:
        """Return whole lines that a log has gained since the last call, all of them if it has begun again."""
        try:
            with log.open("rb") as file:
                at, size = self.read.get(log, 0), os.fstat(file.fileno()).st_size
                file.seek(at if size >= at else 0)
                begin = file.tell()
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        self.read[log] = begin + len(whole) + bool(whole)
        return whole.decode(errors="replace").split("\n") if whole else []


class Trackers:
    """Trackers of a sweep; one that fails is left, with a message, and training goes on."""

    def __init__(
        self, names: Sequence[str] = (), folder: Path = Path(), message: Callable[[str], None] = lambda _: None
    ) -> None:
        self.names, self.folder, self.message = list(names), folder.resolve() / FOLDER, message
        self.followed: dict[str, Followed] = {}

    def follow(self, point: Point, attempt: Path) -> None:
        """Pass on what an attempt at a point has written since the last call."""
        if not self.names or not (attempt / "rank-0.steps.jsonl").exists():
            return
        found = self.followed.get(point.id)
        if found is None or found.kept.attempt != attempt.name:
            if (found := self._open(point, attempt)) is None:
                return
            self.followed[point.id] = found
        rows = []
        for line in found.lines(steps_path(attempt, 0)):
            if (step := step_of(line)) is not None and step["step"] >= found.kept.steps:
                rows.append((step["step"], _of_step(step, point.run.tokens_per_step)))
                found.kept.steps = step["step"] + 1
        for line in found.lines(attempt / EVALUATIONS):
            with suppress(ValueError):
                rows += self._new_evaluation(found.kept, loads(line))
        self._log(found, rows)

    def finished(self, point: Point, record: Record) -> None:
        """Pass on what only a record has, the evaluations at the end, and end the point's run."""
        if (found := self.followed.pop(point.id, None)) is None:
            return
        rows = [row for one in record.evaluations for row in self._new_evaluation(found.kept, asdict(one))]
        self._log(found, rows)
        self._close(found, record.status)

    def close(self) -> None:
        """End all of them; the same command continues their runs."""
        while self.followed:
            self._close(self.followed.popitem()[1])

    def _open(self, point: Point, attempt: Path) -> Followed | None:
        """Open a run in its trackers, unless another command follows it, as `watch` beside `run` would."""
        group = f"{attempt.parents[2].name}-{attempt.parents[1].name}"
        path, resumption = self.folder / group / f"{point.id}.json", read_as(Resumption, attempt / RESUMED)
        if before := self.followed.pop(point.id, None):
            self._close(before)
        if (lock := _locked(path.with_suffix(".lock"))) is None:
            return None
        kept = read_as(Kept, path) or Kept()
        if kept.attempt != attempt.name and not (resumption and resumption.resumed and kept.name):
            label = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in point.label)
            kept = Kept(f"{label}-{attempt.name}"[-120:])
        kept.attempt = attempt.name
        trackers = dict[str, Tracker]()
        for name in list(self.names):
            opening = Opening(self.folder, group, kept.name, point.run, kept.ids.get(name, ""))
            with self._kept_going(name):
                trackers[name] = KINDS[name](opening)
                kept.ids[name] = trackers[name].id
        return Followed(path, lock, kept, trackers)

    def _log(self, found: Followed, rows: Sequence[tuple[int, Values]]) -> None:
        if not rows:
            return
        for name, tracker in list(found.trackers.items()):
            if name in self.names:
                with self._kept_going(name):
                    tracker.log(rows)
        if time.monotonic() - found.written > KEEP_SECONDS:
            self._keep(found)

    def _keep(self, found: Followed) -> None:
        found.written = time.monotonic()
        with suppress(OSError):
            write_as(found.path, found.kept)

    def _close(self, found: Followed, status: str = "") -> None:
        for name, tracker in found.trackers.items():
            with self._kept_going(name):
                tracker.close(status)
        self._keep(found)
        found.lock.close()

    @contextmanager
    def _kept_going(self, name: str) -> Iterator[None]:
        """Leave a tracker that fails out from then on, after one line on why."""
        try:
            with redirect_stdout(io.StringIO()):  # where a verb may print JSON
                yield
        except Exception as error:
            if name in self.names:
                self.names.remove(name)
                self.message(f"--track {name}: {in_one_line(error)}; training goes on without it")

    def _new_evaluation(self, kept: Kept, found: Document) -> list[tuple[int, Values]]:
        """Return the values of an evaluation that was not passed on yet."""
        key = f"{found.get('step')} {found.get('name')} {found.get('kind')}"
        if key in kept.evaluations:
            return []
        kept.evaluations.append(key)
        about, values = f"validation/{found['name']}", dict[str, float]()
        if found.get("tokens"):
            values[f"{about}/nats_per_token"] = (found["nats"] or float("nan")) / found["tokens"]
        if found.get("total"):
            values[f"{about}/accuracy"] = (found["correct"] or 0) / found["total"]
        return [(found["step"], values)] if values else []


def _locked(path: Path) -> IO[str] | None:
    """Return a file that this process alone has locked; None if another one has, or none can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            file.close()
    return None


def _of_step(step: Document, tokens: int) -> dict[str, float]:
    """Return the values of a step by their names in a tracker; loss and norm are NaN where they are not finite."""
    nan = lambda name: float("nan") if step.get(name) is None else step[name]
    values = {"train/loss": nan("loss"), "train/grad_norm": nan("grad_norm"), "train/lr": nan("lr")}
    values |= {"train/step_seconds": step["seconds"], "train/tokens_per_second": tokens / max(step["seconds"], 1e-9)}
    return values | ({"train/peak_memory_bytes": step[MEMORY]} if step.get(MEMORY) is not None else {})
