"""A place where no process runs: every try at a point ends as it is told to."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.launch.site_file import Cluster
from harness.rank.failure import STATUSES
from harness.rank.job import JobState, job_of, keep

CODE = {"git": {"commit": "c0ffee", "dirty": False, "diff_sha256": None}}
"""The environment of every sweep: the code is the same, whatever happens to the files of this project meanwhile."""


class FakeSite:
    """Ends every run as told, by what a worker would have written, when it is looked at for the `looks`-th time.

    Outcomes are by the run's id: a status that a rank ends with by itself, or a cause; the n-th try has the n-th of
    several.
    """

    device, allow_oom, agents = "cpu", False, None
    impatient = False
    """Whether the user presses Ctrl-C again when jobs are being cancelled."""

    def __init__(
        self, outcomes: Mapping[str, str | Sequence[str]] | None = None, looks: int = 0, *, on: str = "local"
    ) -> None:
        self.outcomes: Mapping[str, str | Sequence[str]] = outcomes or {}
        self.looks, self.on = looks, on
        self.cluster = Cluster()
        self.submitted: list[str] = []
        self.arrays: list[list[str]] = []
        self.cancelled: list[Path] = []
        self.looked: dict[Path, int] = {}
        self.most = 0

    def why_invalid(self, ranks: int) -> str | None:
        return None

    def submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int = 0) -> list[str]:
        ids = [json.loads((attempt / "spec.json").read_text())["id"] for attempt in attempts]
        for attempt, run_id in zip(attempts, ids, strict=True):
            told = self.outcomes.get(run_id, "ok")
            outcome = told if isinstance(told, str) else told[self.submitted.count(run_id)]
            for rank in range(ranks):
                end_rank(attempt, rank, outcome)
            keep(attempt, "local" if self.on == "local" else "slurm", "1")
            self.submitted.append(run_id)
            self.looked[attempt] = 0
        self.arrays.append(ids)
        self.most = max(self.most, len(self.looked))
        return ["1"] * len(attempts)

    def states(self, attempts: Sequence[Path]) -> dict[Path, JobState]:
        return {attempt: self._state(attempt) for attempt in attempts if job_of(attempt) is not None}

    def _state(self, attempt: Path) -> JobState:
        if attempt in self.looked:
            self.looked[attempt] += 1
            if self.looked[attempt] <= self.looks and attempt not in self.cancelled:
                return JobState("running")
            del self.looked[attempt]
        return JobState("ended")

    def cancel(self, attempts: Sequence[Path]) -> None:
        self.cancelled += attempts
        if self.impatient and attempts:
            os.kill(os.getpid(), signal.SIGINT)

    def forget(self, attempt: Path) -> None:
        self.looked.pop(attempt, None)


def end_rank(attempt: Path, rank: int, outcome: str) -> None:
    """What a rank leaves that ends by itself with this status, or for this cause."""
    if outcome == "vanished":  # it had begun, though
        (attempt / f"rank-{rank}.log").touch()
        return
    if outcome not in ("ok", "nan"):
        failure = {"status": STATUSES.get(outcome, "failed"), "cause": outcome, "reason": f"rank {rank}: {outcome}"}
        failure |= {"rank": rank, "time": time.time() + rank, "log": ["end"]}
        (attempt / f"rank-{rank}.failure.json").write_text(json.dumps(failure))
        return
    step = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 0.1}
    steps = json.loads((attempt / "spec.json").read_text())["run"]["train"]["steps"]
    log = "".join(json.dumps({"step": i} | step) + "\n" for i in range(steps))
    (attempt / f"rank-{rank}.steps.jsonl").write_text(log)
    result = {"status": outcome, "reason": None, "seconds": {}, "evaluations": [], "rank": {"rank": rank}}
    (attempt / f"rank-{rank}.json").write_text(json.dumps(result | {"device": {}, "resolved": {}}))
