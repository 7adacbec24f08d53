"""A sweep that is left and come back to, by the command line: `--detach`, `status`, `watch`, `cancel`, `--dry-run`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.experiment import loading
from harness.experiment.claims import Claim, tally
from harness.launch.slurm import Site
from harness.rank import jobs, slurm_queue
from harness.rank.job import ABSENT, SILENT, STOP, JobState
from harness.records.store import Store
from impl.errors import InputError
from impl.run import Run, to_dict
from tests.harness.calls import answer_every_name, call, document, made_up
from tests.harness.fake_site import CODE, FakeSite
from tests.harness.small_runs import small

REAL_CANCEL = jobs.cancel


@pytest.fixture
def runs(tokens: Path) -> list[Run]:
    return [small(tokens, dp=1 + seed % 2, seed=seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cli.sweeps.gpu_count", lambda: 0)
    monkeypatch.setattr("harness.launch.sweep.host_environment", lambda _: dict(CODE))
    monkeypatch.setattr("harness.launch.sweep.POLL_SECONDS", 0.02)
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 0.0)
    monkeypatch.setattr("harness.launch.follow.LOOK_SECONDS", 0.0)


@pytest.fixture
def cluster(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """A cluster whose jobs run until they are told otherwise, and an experiment, `made_up`, of four points."""
    site = FakeSite(looks=10**9, on="slurm")
    answer_every_name(monkeypatch, made_up(runs))
    monkeypatch.setattr("harness.cli.sweeps.site_of", lambda *_, **__: site)
    for name in ("states", "cancel", "forget"):
        monkeypatch.setattr(jobs, name, getattr(site, name))
    return site


def counts(*more: str) -> dict[str, int]:
    return document(call("status", "made_up", "--json", "--out", "out", *more).output)["counts"]


def test_a_sweep_that_is_submitted_and_left_is_finished_by_watching(cluster: FakeSite, runs: list[Run], tmp_path: Path):
    cluster.outcomes = {runs[1].id: "error", runs[2].id: "hang"}
    answer = call("run", "made_up", "--on", "slurm", "--detach", "--out", "out")
    assert answer.status == 0, answer.errors
    assert "lmscale watch made_up --tier smoke" in answer.output
    assert "0 of 4 points finished: 4 running" in answer.output
    assert counts() == {"running": 4}
    assert len(cluster.arrays) == 2
    assert call("run", "made_up", "--on", "slurm", "--detach", "--out", "out").status == 0
    assert len(cluster.submitted) == 4, "they run already"

    cluster.looks = 0
    answer = call("watch", "made_up", "--out", "out")
    assert answer.status == 1, "two failed"
    assert "2 of 4 points finished: 2 ok, 1 failed, 1 timeout" in answer.output
    assert "[4/4]" in answer.errors
    assert (tmp_path / "out" / "made_up" / "smoke" / "tables").is_dir()
    assert counts() == {"ok": 2, "failed": 1, "timeout": 1}
    assert len(cluster.submitted) == 4, "watching starts nothing"

    cluster.outcomes = {}
    answer = call("run", "made_up", "--on", "slurm", "--out", "out", "--json")
    assert cluster.submitted[4:] == [runs[2].id]
    assert answer.status == 1
    assert len(document(answer.output)["records"]) == 4
    assert "1 point is left alone" in answer.errors
    assert call("run", "made_up", "--on", "slurm", "--out", "out", "--retry", "all").status == 0
    assert counts() == {"ok": 4}


def test_jobs_are_cancelled_by_point(cluster: FakeSite, runs: list[Run]):
    call("run", "made_up", "--on", "slurm", "--detach", "--out", "out")
    for path in Path("out/made_up/smoke/attempts").glob(f"{runs[3].id}-*/rank-*"):
        path.unlink()
    for attempt in Path("out/made_up/smoke/attempts").resolve().glob(f"{runs[3].id}-*"):
        (attempt / STOP).touch()
    answer = call("cancel", "made_up", "--only", "seed=3", "--out", "out")
    assert answer.status == 0, answer.errors
    assert "1 point cancelled" in answer.output
    assert [attempt.name[:12] for attempt in cluster.cancelled] == [runs[3].id]
    assert counts() == {"running": 3, "failed": 1}
    assert call("cancel", "made_up", "--only", "seed=3", "--out", "out").output.endswith(": 0 points cancelled\n")
    assert document(call("cancel", "made_up", "--only", "seed=3", "--out", "out", "--json").output)["points"] == []


@pytest.mark.parametrize("state", [SILENT, ABSENT])
def test_cancel_gives_up_a_job_whose_scheduler_is_silent_and_says_so(
    cluster: FakeSite, runs: list[Run], monkeypatch: pytest.MonkeyPatch, state: JobState
):
    cluster.outcomes = {run.id: "vanished" for run in runs}
    call("run", "made_up", "--on", "slurm", "--detach", "--out", "out")
    monkeypatch.setattr(jobs, "cancel", REAL_CANCEL)
    monkeypatch.setattr(jobs, "states", lambda attempts: dict.fromkeys(attempts, state))
    monkeypatch.setattr(slurm_queue, "_ask", lambda *_, **__: None)
    answer = call("cancel", "made_up", "--only", "seed=3", "--out", "out")
    assert answer.status == 0, answer.errors
    assert f"{state.reason}; job 1 is given up: if it starts, it ends" in answer.errors
    assert "1 point cancelled" in answer.output
    assert counts() == {"unknown": 3, "failed": 1}


def test_another_users_tries_are_named_and_end_no_verb(
    cluster: FakeSite, runs: list[Run], monkeypatch: pytest.MonkeyPatch
):
    call("run", "made_up", "--on", "slurm", "--detach", "--out", "out")
    [closed] = Path("out/made_up/smoke/attempts").resolve().glob(f"{runs[3].id}-*")
    exists = Path.exists

    def refused(path: Path) -> bool:
        if path.parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    monkeypatch.setattr(FakeSite, "script", lambda *_: "", raising=False)
    for verb in ("status", "cancel"):
        answer = call(verb, "made_up", "--only", "seed=3", "--out", "out")
        assert answer.status == 0
        assert f"ignored: {closed}: another user's try, which cannot be read (Permission denied)" in answer.errors
    assert call("run", "made_up", "--on", "slurm", "--out", "out", "--dry-run").status == 0
    assert counts() == {"running": 3, "missing": 1}


def test_leaving_a_sweep_says_that_its_jobs_go_on(cluster: FakeSite, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.launch.sweep.time.sleep", interrupt)
    answer = call("run", "made_up", "--on", "slurm", "--out", "out")
    assert answer.status == 130
    [*_, last] = answer.errors.splitlines()
    assert last == "interrupted; 4 points go on without this command: `watch` shows them, `cancel` ends them"
    answer = call("watch", "made_up", "--out", "out")
    assert answer.status == 130
    assert counts() == {"running": 4}
    answer = call("train", "--on", "slurm", "--out", "out")
    assert "1 point goes on without this command: the same command shows them, `scancel` ends them" in answer.errors
    assert cluster.cancelled == []


def test_a_dry_run_says_what_would_be_submitted_and_writes_nothing(cluster: FakeSite, runs: list[Run], tmp_path: Path):
    real = Site("slurm")
    cluster.script = real.script  # type: ignore[attr-defined]
    answer = call("run", "made_up", "--on", "slurm", "--dry-run", "--out", "out")
    assert answer.status == 0, answer.errors
    assert "4 of 4 points would be run" in answer.output
    assert answer.output.count("#!/bin/bash") == 2, "one for each shape"
    found = document(call("run", "made_up", "--on", "slurm", "--dry-run", "--json", "--out", "out").output)
    assert [point["id"] for point in found["points"]] == [run.id for run in runs]
    assert len(found["scripts"]) == 2
    assert cluster.submitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_ends_as_the_run_would(cluster: FakeSite, runs: list[Run], monkeypatch: pytest.MonkeyPatch):
    cluster.on = "local"
    monkeypatch.setattr("harness.launch.dry_run.why_refused", lambda *_, **__: "no such plan")
    for options in ([], ["--dry-run"], ["--dry-run", "--json"]):
        answer = call("run", "made_up", "--out", "out", *options)
        assert answer.status == 1
        assert "no such plan" in answer.output


def test_a_claim_that_fails_costs_no_other_and_other_points_are_named(
    cluster: FakeSite, runs: list[Run], monkeypatch: pytest.MonkeyPatch
):
    def fault(_: object) -> None:
        raise InputError("experiments/made_up.py, line 7: ZeroDivisionError: division by zero")

    holds = lambda rows: tally([bool(rows)], "", "as it is")
    claims = [Claim(text=name, source="none", check=check) for name, check in (("bad", fault), ("good", holds))]
    one = replace(loading.load("made_up"), claims=tuple(claims))
    answer_every_name(monkeypatch, one)
    monkeypatch.setattr("harness.cli.claims.chosen", lambda _: [one])
    for run in (runs[0], replace(runs[0], seed=99)):
        put(Store(Path("out"), "made_up", "smoke"), run)
    for verb in ("table", "claims"):
        answer = call(verb, "made_up", "--out", "out")
        assert answer.status == 0, answer.errors
        assert "claim 'bad' cannot be checked: experiments/made_up.py, line 7" in answer.errors
        assert "reproduced" in answer.output
        assert "1 record is of a point that the experiment does not have" in answer.output + answer.errors
    assert "1 of 1 points finished: 1 ok" in call("table", "made_up", "--out", "out").output
    judged = json.loads(call("claims", "made_up", "--out", "out", "--json").output)["experiments"][0]["claims"]
    bad, _ = (one["verdicts"][0] for one in judged)
    assert bad["verdict"] == "cannot tell here"
    assert bad["numbers"] == "its check failed: experiments/made_up.py, line 7: ZeroDivisionError: division by zero"


def test_a_dry_run_here_names_the_points(cluster: FakeSite, runs: list[Run], tmp_path: Path):
    cluster.on = "local"
    answer = call("run", "made_up", "--dry-run", "--out", "out", "--only", "seed=1")
    assert f"{runs[1].id}  seed=1" in answer.output.replace(" dp=2", "").replace("dp=2 ", "")
    assert "1 of 1 points would be run" in answer.output
    assert list(tmp_path.iterdir()) == []


def test_status_says_why_a_job_is_pending(cluster: FakeSite, runs: list[Run], monkeypatch: pytest.MonkeyPatch):
    call("run", "made_up", "--on", "slurm", "--detach", "--out", "out")
    pending = JobState("pending", "PENDING", 0, "Priority")
    monkeypatch.setattr(jobs, "states", lambda attempts: dict.fromkeys(attempts, pending))
    found = document(call("status", "made_up", "--json", "--out", "out").output)
    assert {(point["status"], point["reason"]) for point in found["points"]} == {("pending", "Priority")}
    monkeypatch.setattr(jobs, "states", lambda attempts: dict.fromkeys(attempts, JobState("unknown")))
    assert counts() == {"unknown": 4}


def put(store: Store, run: Run, **fields: Any) -> None:
    head = {"schema": 1, "id": run.id, "experiment": "made_up", "tier": "smoke", "config": to_dict(run)}
    store.write(head | {"status": "ok", "reason": None} | fields)


def test_a_reason_is_shown_as_it_is(cluster: FakeSite, runs: list[Run]):
    put(Store(Path("out"), "made_up", "smoke"), runs[0], status="failed", reason="rank 0: [/b] [red] list[int]")
    assert "[/b] [red] list[int]" in call("status", "made_up", "--out", "out").output


@pytest.mark.usefixtures("cluster")
def test_a_long_list_of_points_is_plain(runs: list[Run], monkeypatch: pytest.MonkeyPatch):
    put(Store(Path("out"), "made_up", "smoke"), runs[0])
    monkeypatch.setattr("harness.cli.status.TABLE_ROWS", 3)
    lines = call("status", "made_up", "--out", "out").output.splitlines()
    assert [line.split()[0] for line in lines[:4]] == [run.id for run in runs]
    assert lines[-1] == "made_up, tier smoke, out: 1 of 4 points finished: 1 ok, 3 missing"


@pytest.mark.usefixtures("cluster")
def test_files_that_are_no_records_are_named_and_run_again(runs: list[Run]):
    store = Store(Path("out"), "made_up", "smoke")
    put(store, runs[0])
    store.path(runs[0].id).write_text("{")
    answer = call("status", "made_up", "--out", "out")
    assert answer.errors.splitlines() == [f"ignored: {store.path(runs[0].id)}: not a whole JSON document of a record"]
    assert counts() == {"missing": 4}


def test_watching_nothing_says_so(tmp_path: Path):
    answer = call("watch", "quickstart", "--out", "out")
    assert answer.status == 0, answer.errors
    assert "missing" in answer.output
    assert json.loads(call("watch", "quickstart", "--out", "out", "--json").output)["counts"]["missing"] > 0
    assert call("cancel", "quickstart", "--out", "out").output == "quickstart, tier smoke: 0 points cancelled\n"
