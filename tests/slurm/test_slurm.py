"""Sweeps on a real Slurm of two nodes: points that fail, are preempted, or outlive their harness.

All of it runs on this machine (start.sh), where that can be: as root, with Debian's packages.
"""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launch.flags import Saving
from harness.launch.site_file import Cluster
from harness.launch.slurm import Site
from harness.rank import jobs
from harness.rank.job import SILENT, job_of
from harness.records.record import Record
from harness.records.store import Store
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Run
from tests.harness.calls import call, document
from tests.harness.small_runs import Told, kept, processes, small, sweep, trains, wait_until, write_tokens
from tests.slurm.two_nodes import TwoNodes, two_nodes

pytestmark = pytest.mark.slurm

STEPS = 2000
"""Some seconds of training: long enough for something to happen meanwhile."""
JOB_SECONDS, TOLD_SECONDS = 60, 10
"""Of a job in the partition short, and how long before its end it is told, by a clock that ticks twice a minute."""
HANG_SECONDS = 30.0
"""Longer than ranks take to start while others do."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[TwoNodes]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 1.0)
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 0)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "made_up", "smoke")


def on_slurm(**settings: Any) -> Site:
    return Site("slurm", cluster=Cluster(**{"memory_per_rank": "1G", **settings}))


def attempt_of(store: Store, run: Run) -> Path:
    [attempt] = (store.folder.resolve() / "attempts").glob(f"{run.id}-*")
    return attempt


def in_training(store: Store, run: Run) -> Path:
    """Wait until all ranks of a run train, and return its attempt."""
    found = lambda: list((store.folder / "attempts").glob(f"{run.id}-*"))
    wait_until(lambda: len(found()) == 1 and trains(found()[0], run.plan.world_size), 180)
    return attempt_of(store, run)


def ranks_of(attempt: Path) -> list[psutil.Process]:
    """Return the processes that train."""
    found = processes(attempt.parent, "harness.rank.worker")
    return [process for process in found if str(attempt) in process.info["cmdline"]]


def send(signal_number: int, ranks: Sequence[psutil.Process]) -> None:
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal_number)


@contextmanager
def held(ranks: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes meanwhile."""
    send(signal.SIGSTOP, ranks)
    try:
        yield
    finally:
        send(signal.SIGCONT, ranks)


def number(attempt: Path) -> str:
    job = job_of(attempt)
    assert job is not None
    return job.job


def losses(record: Record) -> list[float]:
    assert record.status == "ok", record.reason
    return list(record.losses)


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do something during a sweep, and check that it was done."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(action)
        yield
        done.result()


# What takes a minute by itself begins first -------------------------------------------------------------------------


class Limited:
    """A point that takes longer than its job may: its rank is stopped until just before the end is announced."""

    def __init__(self, folder: Path, tokens: Path) -> None:
        self.store, self.run = Store(folder, "made_up", "smoke"), small(tokens, steps=STEPS, seed=100)
        self.options: dict[str, Any] = {
            "site": on_slurm(partition="short", signal_seconds=TOLD_SECONDS, extra={"nodelist": "node1"}),
            "saving": Saving(checkpoint_every=10 * STEPS),
        }

    def hold(self) -> None:
        attempt = in_training(self.store, self.run)
        job = job_of(attempt)
        assert job is not None
        with held(ranks_of(attempt)):  # none if it has ended already
            time.sleep(max(0.0, job.submitted + JOB_SECONDS - TOLD_SECONDS - time.time()))


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: TwoNodes, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    point = Limited(tmp_path_factory.mktemp("limited"), tokens)
    sweep(point.store, [point.run], detach=True, **point.options)
    with meanwhile(point.hold):
        yield point


@pytest.fixture(scope="module")
def preempted(tokens: Path) -> Run:
    return small(tokens, dp=2, steps=STEPS // 2, seed=101)


@pytest.fixture(scope="module")
def undisturbed(limited: Limited, preempted: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of runs that nothing happens to, as processes of this machine."""
    store = Store(tmp_path_factory.mktemp("undisturbed"), "made_up", "smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.launch.slurm.gpu_count", lambda: 0)
        sweep(store, [limited.run, preempted], jobs=2)
    return {run.id: losses(kept(store, run)) for run in (limited.run, preempted)}


# Points that fail ---------------------------------------------------------------------------------------------------


def test_points_that_fail_say_why_and_the_others_finish(tokens: Path, store: Store, tmp_path: Path, slurm: TwoNodes):
    lost = tmp_path / "lost"
    shutil.copytree(tokens, lost)
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=1, seq_len=64, vocab_size=1_000_000)
    raises = small(lost)
    hungry = replace(small(tokens, global_batch=8, microbatch=8, steps=50), model=model)
    cancelled, hangs = small(tokens, steps=STEPS, seed=1), small(tokens, steps=STEPS, seed=2)
    others = [small(tokens, seed=seed) for seed in range(3, 7)]
    model = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=16)
    over_nodes = replace(small(tokens, seed=7), model=model, plan=Plan(tp=2, pp=2))
    runs = [raises, hungry, cancelled, hangs, *others, over_nodes]

    def hit() -> None:
        stop = lambda run: send(signal.SIGSTOP, ranks_of(in_training(store, run)))
        with ThreadPoolExecutor(2) as pool:  # each as soon as it trains
            assert list(pool.map(stop, (hangs, cancelled))) == [None, None]
        slurm.ask("scancel", number(attempt_of(store, cancelled)))

    told = Told(on_start=lambda run_id: shutil.rmtree(lost, ignore_errors=True) if run_id == raises.id else None)
    site = on_slurm(ranks_per_node=2)
    with meanwhile(hit):
        sweep(store, runs, site=site, told=told, hang_seconds=HANG_SECONDS)
    found = {run.id: kept(store, run) for run in runs}
    ends = {run.id: (found[run.id].status, found[run.id].cause) for run in runs}
    assert ends == {
        raises.id: ("failed", "error"),
        hungry.id: ("oom", "oom"),
        cancelled.id: ("failed", "cancelled"),
        hangs.id: ("timeout", "hang"),
        **{run.id: ("ok", "") for run in (*others, over_nodes)},
    }, [record.reason for record in found.values()]
    assert "no token folder" in str(found[raises.id].reason)
    assert "no token folder" in found[raises.id].log[-1]
    assert "memory" in str(found[hungry.id].reason)
    assert "rank 0 in step" in str(found[hangs.id].reason)
    assert all("\n" not in record.reason for record in found.values() if record.reason)
    assert "2" in slurm.ask("sacct", "--noheader", "--allocations", "--format=NNodes").split()

    again = sweep(store, runs, site=site)
    assert sorted(again.starts) == sorted([cancelled.id, hangs.id])
    assert [kept(store, run).status for run in (cancelled, hangs)] == ["ok", "ok"]


# Who asked for it is not needed -------------------------------------------------------------------------------------


def test_a_preempted_run_is_requeued_and_ends_as_if_nothing_had_been(
    slurm: TwoNodes, preempted: Run, store: Store, undisturbed: dict[str, list[float]]
):
    def preempt() -> None:
        attempt = in_training(store, preempted)
        with held(ranks_of(attempt)):  # it does not end before it is preempted
            urgent = ["--partition=urgent", "--nodelist=node2", "--exclusive", "--output=/dev/null"]
            slurm.ask("sbatch", *urgent, "--wrap=sleep 1")
            wait_until(lambda: "PreemptTime=2" in slurm.ask("scontrol", "show", "job", number(attempt)))

    site = on_slurm(ranks_per_node=1)
    with meanwhile(preempt):
        told = sweep(store, [preempted], site=site, saving=Saving(checkpoint_every=10 * STEPS))
    found = kept(store, preempted)
    assert losses(found) == undisturbed[preempted.id]
    [step] = found.times.resumed_at
    assert 0 < step < STEPS
    assert told.starts == [preempted.id]


def test_a_controller_that_dies_loses_no_point(slurm: TwoNodes, tokens: Path, store: Store):
    run = small(tokens, steps=STEPS // 2, seed=102)
    site = on_slurm(extra={"nodelist": "node2"})
    sweep(store, [run], site=site, detach=True)
    attempt = in_training(store, run)
    with held(ranks_of(attempt)):
        slurm.save(number(attempt))
        slurm.kill("slurmctld")
    assert jobs.states([attempt])[attempt] == SILENT
    with meanwhile(lambda: slurm.start("slurmctld")):
        told = sweep(store, [run], site=site)
    assert told.ends == [(run.id, "ok")]
    assert kept(store, run).attempt == attempt.name
    assert len(losses(kept(store, run))) == STEPS // 2


def test_a_job_accepted_without_an_answer_ends_as_soon_as_it_starts(
    slurm: TwoNodes, tokens: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    real = shutil.which("sbatch")
    once = f"if mkdir once; then {real} --begin=now+5 \"$@\" > first; echo 'Socket timed out' >&2; exit 1; fi"
    sbatch.write_text(f'#!/bin/sh\ncd {tmp_path}\n{once}\n{real} "$@"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    monkeypatch.setattr("harness.launch.slurm.PAUSE_SECONDS", 0.0)
    run = small(tokens, seed=104)
    assert sweep(store, [run], site=on_slurm()).ends == [(run.id, "ok")]
    first = (tmp_path / "first").read_text().split()[-1]
    state = lambda: slurm.ask("sacct", "--noheader", "--allocations", "--format=state", f"--jobs={first}")
    wait_until(lambda: state() == "FAILED")


def test_a_node_that_fails_costs_a_restart_and_no_point(slurm: TwoNodes, tokens: Path, store: Store):
    run = small(tokens, steps=STEPS // 2, seed=103)
    failed: list[str] = []

    def fail() -> None:
        attempt = in_training(store, run)
        node = slurm.ask("squeue", "--noheader", f"--jobs={number(attempt)}", "--format=%N")
        failed.append(f"nodename={node}")
        with held(ranks_of(attempt)):
            slurm.ask("scontrol", "update", *failed, "state=down", "reason=tests")
            wait_until(lambda: jobs.states([attempt])[attempt].restarts)

    with meanwhile(fail):
        told = sweep(store, [run], site=on_slurm())
    slurm.ask("scontrol", "update", *failed, "state=resume")  # not before: the job would start where it still is
    states = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%t"]
    wait_until(lambda: slurm.ask(*states).split() == ["idle", "idle"])
    assert len(losses(kept(store, run))) == STEPS // 2
    assert told.starts == [run.id]
    assert not kept(store, run).tries


def test_a_sweep_is_submitted_left_looked_at_and_cancelled(slurm: TwoNodes, tokens: Path, tmp_path: Path):
    """By the command line; the jobs are not to start before it is over."""
    site = tmp_path / "site.toml"
    site.write_text('extra = { begin = "now+1hour" }\nranks_per_node = 2\n')
    out = ["--data", tokens, "--out", tmp_path / "out"]
    listed = ["squeue", "--noheader", "--states=PENDING", "--partition=main", "--format=%i"]
    of_others = set(slurm.ask(*listed).split())  # a job that was requeued as its last rank ended
    left = call("run", "quickstart", *out, "--on", "slurm", "--site", site, "--detach")
    assert left.status == 0, left.errors
    answer = call("status", "quickstart", *out, "--json")
    counts = document(answer.output)["counts"]
    assert set(counts) == {"pending"}, answer
    assert call("cancel", "quickstart", *out).status == 0
    assert set(slurm.ask(*listed).split()) <= of_others
    after = document(call("status", "quickstart", *out, "--json").output)["counts"]
    assert "pending" not in after
    assert sum(after.values()) == sum(counts.values())


def test_the_doctor_finds_nothing_wrong_with_a_cluster_that_works(slurm: TwoNodes, tmp_path: Path):
    place = ["--on", "slurm", "--ranks", "2", "--ranks-per-node", "1", "--device", "cpu", "--out", tmp_path / "out"]
    answer = call("doctor", *place, "--json")
    checks = {check["what"]: check for check in document(answer.output)["checks"]}
    assert answer.status == 0, checks
    assert "node1 (1), node2 (1)" in checks["ranks"]["found"]
    for what in ("meeting", "all-reduce dp", "clocks", "scheduler", "accounting", "partition"):
        assert checks[what]["grade"] == "ok", checks[what]
    assert "p2p hosts" in checks
    answer = call("doctor", *place, "--partition", "nowhere", "--json")
    checks = {check["what"]: check for check in document(answer.output)["checks"]}
    assert (answer.status, checks["partition"]["grade"]) == (1, "failed")
    assert "main" in checks["partition"]["mend"]
    assert list(tmp_path.rglob("*.json")) == []


# Last, since it has begun first -------------------------------------------------------------------------------------


def test_a_job_that_reaches_its_time_limit_is_requeued_and_ends_as_if_nothing_had_been(
    limited: Limited, undisturbed: dict[str, list[float]]
):
    sweep(limited.store, [limited.run], **limited.options)
    found = kept(limited.store, limited.run)
    assert losses(found) == undisturbed[limited.run.id]
    assert 0 < found.times.resumed_at[0] < STEPS
    assert not found.tries
