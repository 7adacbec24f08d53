"""Which points a sweep runs, which it leaves alone, and under which name a record is kept."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.experiment.experiment import points
from harness.launch.decide import LIFE_SECONDS
from harness.launch.preflight import Datasets
from harness.launch.sweep import Options, Sweep
from harness.rank.failure import AGAIN, RETRIED, STATUSES
from harness.rank.heartbeat import Alive, write_alive
from harness.rank.job import ABSENT, BEHIND, JOB, SILENT, JobState, keep
from harness.records.attempts import Attempts
from harness.records.store import FINISHED, SCHEMA, Store, with_digest
from impl.data.config import DataConfig
from impl.data.synthetic import SyntheticConfig
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, from_dict, non_defaults, to_dict
from tests.harness.fake_site import CODE, FakeSite
from tests.harness.small_runs import Told, files_of_at_most, kept, point, small, sweep


@pytest.fixture(autouse=True)
def no_waiting_and_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 0)
    monkeypatch.setattr("harness.launch.sweep.host_environment", lambda _: dict(CODE))
    monkeypatch.setattr("harness.launch.sweep.POLL_SECONDS", 0.001)
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 0.0)
    monkeypatch.setattr("harness.launch.follow.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("os.fsync", lambda _: None)


def made_up(store: Store, runs: list[Run], outcomes: Any = None, **options: Any) -> tuple[FakeSite, Told]:
    """A sweep whose attempts end like this, and what it showed."""
    site = FakeSite(outcomes)
    return site, sweep(store, runs, site=site, **options)


def folders(store: Store, name: str = "attempts") -> list[Path]:
    return list((store.folder / name).iterdir())


# Names of records ---------------------------------------------------------------------------------------------------


def test_a_new_field_with_a_default_changes_no_id():
    before = Run(train=Recipe(steps=7), seed=3)
    fields = [(f.name, f.type, dataclasses.field(default=f.default)) for f in dataclasses.fields(Run)]
    wider = dataclasses.make_dataclass("Wider", [("novelty", int, 5), *fields], frozen=True, kw_only=True)
    values = {field.name: getattr(before, field.name) for field in dataclasses.fields(before)}
    assert non_defaults(wider(**values)) == non_defaults(before) == {"train": {"steps": 7}, "seed": 3}
    assert non_defaults(wider(**values, novelty=6)) == {"novelty": 6, "train": {"steps": 7}, "seed": 3}


runs = st.builds(
    Run,
    model=st.builds(ModelConfig, num_layers=st.integers(1, 3), norm_placement=st.sampled_from(["pre", "post"])),
    plan=st.builds(Plan, dp=st.integers(1, 2), overlap_grad_reduce=st.booleans()),
    train=st.builds(Recipe, lr=st.sampled_from([1e-3, 1e-4]), steps=st.integers(100, 101)),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 1),
    repeat=st.integers(0, 1),
)


@given(one=runs, other=runs)
def test_runs_have_the_same_id_if_and_only_if_they_are_the_same(one: Run, other: Run):
    assert (one.id == other.id) == (one == other)
    assert from_dict(json.loads(json.dumps(to_dict(one)))) == one


# What runs and what does not ----------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    rounds=st.lists(
        st.lists(st.sampled_from(["ok", "nan", "error", "oom", "killed", "hang"]), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    ),
    jobs=st.integers(1, 3),
    looks=st.integers(0, 2),
)
def test_every_call_runs_what_another_try_may_end_otherwise_in_order_and_nothing_else(
    tokens: Path, tmp_path_factory: pytest.TempPathFactory, rounds: list[list[str]], jobs: int, looks: int
):
    store = Store(tmp_path_factory.mktemp("rounds"), "made_up", "smoke")
    four = [small(tokens, dp=1 + seed % 2, seed=seed) for seed in range(4)]
    became = {run.id: "missing" for run in four}
    for outcomes in rounds:
        expected = [run.id for run in four if became[run.id] == "missing" or became[run.id] in AGAIN]
        site = FakeSite(dict(zip(became, outcomes, strict=True)), looks)
        told = sweep(store, four, site=site, jobs=jobs, retries=0)
        assert site.submitted == told.starts == expected
        assert site.most <= jobs
        became |= {run_id: outcomes[list(became).index(run_id)] for run_id in expected}
        status = {run_id: word if word in FINISHED else STATUSES.get(word, "failed") for run_id, word in became.items()}
        assert sorted(told.ends) == sorted((run_id, status[run_id]) for run_id in expected)
        assert {r.id: r.status for r in store.records()} == status
        assert sorted(told.skips) == sorted(set(became) - set(expected))


@pytest.mark.parametrize("cause", sorted(RETRIED))
def test_a_fault_of_the_infrastructure_is_tried_again_a_bounded_number_of_times(tokens: Path, store: Store, cause: str):
    run, other = small(tokens), small(tokens, seed=1)
    site, told = made_up(store, [run, other], {run.id: [cause, cause, "ok"]})
    assert site.submitted == [run.id] * 3 + [other.id]
    assert told.ends == [(run.id, "ok"), (other.id, "ok")]
    record = kept(store, run)
    assert [(one.status, one.cause) for one in record.tries] == [("failed", cause)] * 2
    assert all(one.ended for one in record.tries)
    assert len({record.attempt, *(one.attempt for one in record.tries)}) == 3
    assert [message.rpartition("; ")[2] for message in told.messages] == ["try 2 of 3 follows", "try 3 of 3 follows"]

    run = small(tokens, seed=2)
    site, told = made_up(store, [run], {run.id: cause}, retries=1)
    assert (len(site.submitted), told.ends, len(kept(store, run).tries)) == (2, [(run.id, "failed")], 1)
    site, _ = made_up(store, [run])
    assert (site.submitted, kept(store, run).tries) == ([run.id], []), "a new command counts anew"


@pytest.mark.parametrize("cause", ["error", "oom"])
def test_what_the_code_itself_did_is_left_alone_until_the_code_changes(
    tokens: Path, store: Store, cause: str, monkeypatch: pytest.MonkeyPatch
):
    run = small(tokens)
    made_up(store, [run], {run.id: cause})
    site, told = made_up(store, [run])
    assert (site.submitted, told.ends, told.skips) == ([], [], [run.id])
    assert told.messages == ["1 point is left alone, since the same code failed: seed=0; --retry all runs them again"]
    again, _ = made_up(store, [run], {run.id: cause}, retry="all")
    assert again.submitted == [run.id], "once, though it failed again"
    for git in ({"commit": "c0ffee", "diff_sha256": "ab"}, {"commit": "decaf"}, None):
        monkeypatch.setattr("harness.launch.sweep.host_environment", lambda _, git=git: {"git": git})
        other, _ = made_up(store, [run], {run.id: cause})
        assert other.submitted == [run.id], git


# A scheduler --------------------------------------------------------------------------------------------------------


def test_all_that_is_missing_is_submitted_at_once_an_array_for_each_shape(tokens: Path, store: Store):
    four = [small(tokens, dp=1 + seed % 2, seed=seed) for seed in range(4)]
    site = FakeSite(looks=3, on="slurm")
    told = sweep(store, four, site=site)
    assert site.arrays == [[four[0].id, four[2].id], [four[1].id, four[3].id]]
    assert sorted(told.ends) == sorted((run.id, "ok") for run in four)
    assert sorted(told.starts) == sorted(run.id for run in four)
    assert (0, 4) in told.queues
    assert folders(store, "claims") == []


def test_a_sweep_that_left_its_jobs_comes_back_to_them(tokens: Path, store: Store):
    runs = [small(tokens, seed=seed) for seed in range(3)]
    site = FakeSite({runs[1].id: ["hang", "ok"]}, looks=10**9, on="slurm")
    told = sweep(store, runs, site=site, detach=True)
    assert (len(site.submitted), told.ends, store.records()) == (3, [], [])
    site.looks = 5
    told = sweep(store, runs, site=site)
    assert len(site.submitted) == 3, "they ran all the time"
    assert sorted(status for _, status in told.ends) == ["ok", "ok", "timeout"]
    told = sweep(store, runs, site=site)
    assert site.submitted[3:] == [runs[1].id]
    assert told.ends == [(runs[1].id, "ok")]


def test_a_cluster_that_refuses_leaves_nothing(tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise InputError("--on slurm: no such partition")

    site = FakeSite(on="slurm")
    monkeypatch.setattr(site, "submit", refuse)
    with pytest.raises(InputError, match="no such partition"):
        sweep(store, [small(tokens)], site=site)
    assert folders(store) == []
    assert folders(store, "claims") == []


# What an earlier harness left -----------------------------------------------------------------------------------------


def left_behind(store: Store, run: Run, outcome: str, on: str = "local") -> Path:
    """A try whose harness was killed; its ranks ended so."""
    site = FakeSite({run.id: outcome}, on=on)
    told = Told()
    one = Sweep(store, Datasets(store.folder / "cache"), Options(site=site), told, site)  # type: ignore[arg-type]
    one.begin([point(run)])
    one._start()
    for name in list(one.claims.held):  # a killed process' claims are there for the taking
        one.claims.release(name)
    [attempt] = Attempts(store).open_of(run.id)
    return attempt


@pytest.mark.parametrize(("outcome", "is_run"), [("ok", False), ("vanished", True)])
def test_a_result_that_was_not_read_is_not_lost_and_ranks_that_ended_with_their_harness_leave_no_record(
    tokens: Path, store: Store, outcome: str, is_run: bool
):
    run = small(tokens)
    left_behind(store, run, outcome)
    site, told = made_up(store, [run])
    assert (site.submitted, told.ends) == ([run.id] * is_run, [(run.id, "ok")])
    assert kept(store, run).tries == []
    assert folders(store) == []


def test_a_start_that_was_never_submitted_is_removed(tokens: Path, store: Store):
    run = small(tokens)
    dead = Attempts(store).new(run.id)
    made_up(store, [run], {run.id: "error"})
    assert not dead.exists()


def test_a_record_that_was_written_before_its_harness_was_killed_is_tidied_up(tokens: Path, store: Store):
    run = small(tokens)
    made_up(store, [run])
    before = store.path(run.id).read_bytes()
    attempt = Attempts(store).new(run.id)
    (attempt / "spec.json").write_text(json.dumps({"id": run.id}))
    keep(attempt, "local", "1")
    site, told = made_up(store, [run])
    assert (site.submitted, told.skips) == ([], [run.id])
    assert store.path(run.id).read_bytes() == before
    assert folders(store) == []


def test_a_record_of_a_later_version_is_neither_run_nor_written_over(tokens: Path, store: Store):
    run, other = small(tokens), small(tokens, seed=1)
    made_up(store, [run])
    later = with_digest(json.dumps(store.document(run.id) | {"schema": SCHEMA + 1}, indent=1) + "\n")
    store.path(run.id).write_text(later)
    site, refused = FakeSite(), rf"{run.id}.json was written by a later version \(schema {SCHEMA + 1}, .* --out"
    with pytest.raises(InputError, match=refused):
        sweep(store, [other, run], site=site)
    with pytest.raises(InputError, match="later version"):
        store.write({"id": run.id})
    assert (site.submitted, store.path(run.id).read_text()) == ([], later)


@pytest.mark.parametrize("name", ["spec.json", "rank-0.json", "rank-0.steps.jsonl"])
def test_a_try_that_cannot_be_read_is_named_and_its_point_and_all_others_run(tokens: Path, store: Store, name: str):
    runs = [small(tokens, seed=seed) for seed in range(3)]
    attempts = [left_behind(store, run, "ok") for run in runs[:2]]
    (attempts[0] / name).write_bytes(b"\xff")
    watched = Told()
    Sweep(store, Datasets(store.folder / "cache"), Options(site=FakeSite()), watched, FakeSite()).watch(  # type: ignore[arg-type]
        [point(run) for run in runs]
    )
    assert [text for text in watched.messages if text.endswith("left out") and str(attempts[0]) in text]
    assert attempts[0].exists()
    store = Store(store.out, store.experiment, store.tier)
    site, told = made_up(store, runs)
    assert site.submitted == [runs[0].id, runs[2].id]
    [text] = told.messages
    assert str(attempts[0]) in text
    assert text.endswith("given up")
    assert "\n" not in text
    assert all(kept(store, run).status == "ok" for run in runs)
    assert folders(store) == []


def test_another_try_decides_where_one_cannot_be_read(tokens: Path, store: Store):
    run = small(tokens)
    damaged = left_behind(store, run, "ok")
    good = Attempts(store).new(run.id)
    shutil.copytree(damaged, good, dirs_exist_ok=True)
    (damaged / "rank-0.json").write_text("[]")
    site, told = made_up(store, [run])
    assert (site.submitted, told.ends) == ([], [(run.id, "ok")])
    assert kept(store, run).attempt == good.name


@pytest.mark.parametrize("content", ["", "{", '{"on": "moon", "job": "7", "host": "here", "submitted": 0}'])
def test_a_job_that_cannot_be_read_is_waited_for_as_long_as_a_submission_takes(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch, content: str
):
    run = small(tokens)
    attempt = left_behind(store, run, "vanished", on="slurm")
    (attempt / JOB).write_text(content)
    site, told, looks = FakeSite(), Told(), []

    def a_minute_passes(_: int, __: int, why: str) -> None:
        looks.append(why)
        if len(looks) == 5:
            assert site.submitted == []
            os.utime(attempt / JOB, (0, 0))

    monkeypatch.setattr(told, "waiting", a_minute_passes)
    sweep(store, [run], site=site, told=told)
    assert looks == [f"job.json describes no job: {attempt}"] * 5
    assert site.submitted == [run.id]
    assert f"job.json describes no job: {attempt}; this try is given up" in told.messages[0]


class Silent(FakeSite):
    """A place whose scheduler says this of every job that was not submitted here."""

    says = ABSENT

    def _state(self, attempt: Path) -> JobState:
        return super()._state(attempt) if attempt in self.looked else self.says


def test_a_slurm_job_is_given_up_where_there_is_no_slurm_and_no_sign_of_life(tokens: Path, store: Store):
    runs = [small(tokens, seed=seed) for seed in range(2)]
    attempt = left_behind(store, runs[0], "vanished", on="slurm")
    told = sweep(store, runs, site=Silent())
    assert f"this machine has no Slurm: job 1 in {attempt}; this try is given up" in told.messages[0]
    assert [status for _, status in told.ends] == ["ok", "ok"]


@pytest.mark.parametrize(
    "state", [ABSENT, JobState("pending", "PENDING", reason="JobHeldAdmin"), SILENT, BEHIND, JobState("unknown")]
)
def test_a_slurm_job_that_shows_life_is_waited_for_by_name_with_the_reason(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch, state: JobState
):
    run = small(tokens)
    attempt = left_behind(store, run, "vanished", on="slurm")
    write_alive(attempt, 0, Alive())
    site, told = Silent(), Told()
    site.says = state

    def ends(_: float) -> None:
        if told.reasons:
            assert site.submitted == []
            write_alive(attempt, 0, Alive(ended="stopped"))
            site.says = state if state == ABSENT else JobState("ended")

    monkeypatch.setattr("harness.launch.sweep.time.sleep", ends)
    sweep(store, [run], site=site, told=told)
    assert told.reasons[0] == f"{state.reason or state.name}: job 1 in {attempt}"
    assert (site.submitted, told.ends[-1]) == ([run.id], (run.id, "ok"))


@pytest.mark.parametrize(("name", "numbers"), [("running", "12"), ("pending", "12"), ("running", "11")])
def test_a_job_that_slurm_forgot_is_over_and_leaves_the_queue_unless_its_number_is_anothers(
    tokens: Path, store: Store, name: Any, numbers: str
):
    runs, site = [small(tokens, seed=seed) for seed in range(2)], Silent()
    site.says, long_ago = JobState(name), time.time() - LIFE_SECONDS - 1
    attempts = [left_behind(store, run, "ok", on="slurm") for run in runs]
    for attempt, number in zip(attempts, numbers, strict=True):
        keep(attempt, "slurm", number)
        os.utime(attempt / "rank-0.json", (long_ago, long_ago))
    told = sweep(store, runs, site=site)
    assert (told.ends, site.submitted) == ([(run.id, "ok") for run in runs], [])
    assert site.cancelled == (attempts if numbers == "12" else attempts[1:])


@pytest.mark.parametrize("when", ["new", "write"])
@pytest.mark.parametrize("on", ["local", "slurm"])
def test_who_loses_its_claim_neither_starts_nor_writes_and_waits_like_others(
    when: str, on: str, tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """A harness that sleeps for longer than a lease, at the worst moment; the other one then dies."""
    run, site, stolen = small(tokens), FakeSite(on=on), list[Path]()
    monkeypatch.setattr("harness.launch.claim_lock.LEASE_SECONDS", 0.05)
    of = Attempts if when == "new" else Store
    original = getattr(of, when)

    def steal_first(self: Any, *given: Any) -> Any:
        if not stolen:
            [token] = (store.folder / "claims" / run.id).iterdir()
            stolen.append(token.rename(token.with_name("ff")))
            assert site.submitted == ([] if when == "new" else [run.id])
        return original(self, *given)

    monkeypatch.setattr(of, when, steal_first)
    told = sweep(store, [run], site=site)
    assert told.ends == [(run.id, "ok")]
    assert site.submitted == [run.id], "by who had the claim"
    assert folders(store) == []


ONE_OF_SEVERAL = """
import sys, time
from pathlib import Path
from harness.launch import sweep as harness_sweep
from harness.records.store import Store
from tests.harness.fake_site import CODE, FakeSite
from tests.harness.small_runs import small, sweep
harness_sweep.POLL_SECONDS = 0.01
harness_sweep.host_environment = lambda _: dict(CODE)
site, tokens = FakeSite(looks=2), Path(sys.argv[2])
print("ready", flush=True)
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
sweep(Store(Path(sys.argv[1]), "made_up", "smoke"), [small(tokens, seed=seed) for seed in range(12)], site=site)
print(*site.submitted)
"""


def test_processes_that_run_one_sweep_share_its_points(tokens: Path, store: Store, tmp_path: Path):
    command, root = [sys.executable, "-c", ONE_OF_SEVERAL, tmp_path, tokens], Path(__file__).parents[2]
    with contextlib.ExitStack() as stack:
        start = lambda: subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=root)
        several = [stack.enter_context(start()) for _ in range(3)]
        for one in several:
            stack.callback(one.kill)
        assert [one.stdout.readline() for one in several if one.stdout] == ["ready\n"] * 3
        (tmp_path / "go").touch()
        answers = [one.communicate(timeout=120) for one in several]
    assert [one.returncode for one in several] == [0] * 3, answers
    submitted = [run_id for output, _ in answers for run_id in output.split()]
    assert sorted(submitted) == sorted(small(tokens, seed=seed).id for seed in range(12)), "each of them once"
    assert len(store.records()) == 12
    assert folders(store, "claims") == []


def test_watching_starts_nothing(tokens: Path, store: Store):
    run, missing, failed = (small(tokens, seed=seed) for seed in range(3))
    made_up(store, [failed], {failed.id: "killed"}, retries=0)
    left_behind(store, run, "ok", on="slurm")
    site, told = FakeSite(), Told()
    one = Sweep(store, Datasets(store.folder / "cache"), Options(site=site), told, site)  # type: ignore[arg-type]
    assert [p.run.id for p in one.missing([point(run), point(missing), point(failed)])] == [missing.id, failed.id]
    one.watch([point(run), point(missing), point(failed)])
    assert (site.submitted, told.ends) == ([], [(run.id, "ok")])
    assert sorted(told.skips) == sorted([missing.id, failed.id])


def test_the_files_of_a_failed_attempt_are_kept_and_those_of_a_good_one_not(tokens: Path, store: Store):
    good, bad = small(tokens), small(tokens, seed=1)
    made_up(store, [good, bad], {bad.id: "error"})
    [kept] = (store.folder / "attempts").iterdir()
    assert kept.name.startswith(bad.id)


def test_a_point_that_cannot_run_is_a_record_with_its_reason_and_the_others_run(tokens: Path, store: Store):
    odd = small(tokens, dp=1, global_batch=3, microbatch=2)
    lost = small(tokens.parent / "nowhere", seed=1)
    huge = small(tokens, dp=100_000, global_batch=100_000, microbatch=1)
    site, told = made_up(store, [odd, lost, huge, small(tokens)])
    assert site.submitted == [small(tokens).id]
    assert [status for _, status in told.ends] == ["invalid", "invalid", "invalid", "ok"]
    for run, words in ((odd, "not divisible"), (lost, "no token folder"), (huge, "memory of 100,000 ranks")):
        assert words in str(kept(store, run).reason)
        assert "\n" not in str(kept(store, run).reason)


def test_a_full_disk_is_the_machines_fault_and_the_point_runs_by_the_next_command(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    short = SyntheticConfig(train_tokens=50_000, valid_tokens=5_000)
    monkeypatch.setattr("harness.launch.preflight.SyntheticConfig", lambda: short)
    run, other = dataclasses.replace(small(tokens), data=DataConfig()), small(tokens, seed=1)
    with files_of_at_most(40_000):
        _, told = made_up(store, [run, other])
    assert told.ends == [(run.id, "failed"), (other.id, "ok")]
    record, folder = kept(store, run), store.folder / "cache" / "seed-0"
    assert (record.cause, list(folder.parent.iterdir())) == ("disk", [])
    assert re.search("File too large: '.*/seed-0'", str(record.reason))
    assert made_up(store, [run, other])[1].ends == [(run.id, "ok")]


def test_more_ranks_than_cores_are_warned_about_and_run(tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.preflight.os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("harness.launch.preflight.os.cpu_count", lambda: 2)
    _, told = made_up(store, [small(tokens, dp=4, global_batch=4)])
    assert "4 ranks x 1 thread share 2 cores" in told.messages[0]
    assert [status for _, status in told.ends] == ["ok"]


def test_records_of_another_tier_or_experiment_are_never_taken_for_done(tokens: Path, tmp_path: Path):
    run = small(tokens)
    for experiment, tier in (("made_up", "small"), ("other", "smoke"), ("made_up", "paper")):
        sweep(Store(tmp_path, experiment, tier), [run], site=FakeSite())
    foreign = Store(tmp_path, "made_up", "small").path(run.id).read_text()
    store = Store(tmp_path, "made_up", "smoke")
    store.path(run.id).parent.mkdir(parents=True)
    store.path(run.id).write_text(foreign)  # even where someone copied it
    site, _ = made_up(store, [run])
    assert site.submitted == [run.id]
    record = kept(store, run)
    assert (record.tier, record.experiment) == ("smoke", "made_up")


def test_a_broken_record_is_missing_and_its_point_runs_again(tokens: Path, store: Store):
    run = small(tokens)
    made_up(store, [run])
    whole = store.path(run.id).read_text()
    store.path(run.id).write_text(whole.rstrip()[:-1])
    site, _ = made_up(store, [run])
    assert (site.submitted, kept(store, run).status) == ([run.id], "ok")


# Interruption, without processes ------------------------------------------------------------------------------------


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("impatient", [False, True])
def test_an_interrupt_cancels_what_runs_and_leaves_no_record_of_it(tokens: Path, store: Store, impatient: bool):
    first, second, third = (small(tokens, seed=seed) for seed in range(3))
    made_up(store, [first])
    kept = store.path(first.id).read_bytes()
    site = FakeSite(looks=10**9)
    site.impatient = impatient
    with pytest.raises(KeyboardInterrupt):
        sweep(store, [first, second, third], site=site, told=Told(on_look=interrupt), jobs=2)
    assert site.submitted == [second.id, third.id]
    assert sorted(attempt.name[:12] for attempt in site.cancelled) == sorted([second.id, third.id])
    assert [r.id for r in store.records()] == [first.id]
    assert store.path(first.id).read_bytes() == kept
    assert folders(store) == []


def test_a_folder_that_is_removed_under_a_sweep_is_named_and_not_made_again(tokens: Path, store: Store):
    site = FakeSite(looks=10**9)
    with pytest.raises(FileNotFoundError, match=f"removed or renamed.*{store.folder}"):
        sweep(store, [small(tokens)], site=site, told=Told(on_look=lambda _: shutil.rmtree(store.folder)))
    assert len(site.cancelled) == 1
    assert not store.folder.exists()


def test_an_interrupt_while_starting_leaves_no_attempt(tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.attempt.summary", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made_up(store, [small(tokens)])
    assert store.records() == []
    assert folders(store) == []


def test_an_interrupt_before_the_record_is_written_leaves_the_result_to_the_next_command(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    run, site = small(tokens), FakeSite()
    with monkeypatch.context() as patch:
        patch.setattr("harness.launch.sweep.document_of_attempt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweep(store, [run], site=site)
    assert store.records() == []
    sweep(store, [run], site=site)
    assert site.submitted == [run.id], "once"
    assert kept(store, run).status == "ok"


def test_a_disk_that_is_full_keeps_the_records_that_are_there(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    done, new = small(tokens), small(tokens, seed=1)
    made_up(store, [done], {done.id: "error"})
    kept = store.path(done.id).read_bytes()

    def full(self: Store, record: dict[str, Any], put: object = None) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(OSError, match="No space"):
        made_up(store, [done, new])
    assert store.path(done.id).read_bytes() == kept
    assert [path.name for path in (store.folder / "records").iterdir()] == [f"{done.id}.json"]


# Names of points and experiments ------------------------------------------------------------------------------------


def test_only_takes_a_part_of_a_label_a_pattern_or_the_beginning_of_an_id(tokens: Path):
    three = [small(tokens, seed=seed) for seed in range(3)]
    assert [p.run.seed for p in points(three)] == [0, 1, 2]
    assert [p.run.seed for p in points(three, "seed=1")] == [1]
    assert [p.run.seed for p in points(three, "*=2")] == [2]
    assert [p.run.seed for p in points(three, three[0].id[:8])] == [0]
    with pytest.raises(InputError, match=r"matches no point; points: .*seed=0.*seed=1.*seed=2"):
        points(three, "seed=7")


def test_two_points_that_are_the_same_run_are_refused(tokens: Path):
    with pytest.raises(InputError, match="same run"):
        points([small(tokens), small(tokens)])
