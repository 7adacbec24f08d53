"""Sweeps on a real Slurm of two nodes: points that are preempted, or outlive their harness.

All of it runs on this machine (start.sh), where that can be: as root, with Debian's packages.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.launch.flags import Saving
from harness.rank import jobs
from harness.rank.job import SILENT, job_of
from harness.records.store import Store
from impl.run import Run
from tests.harness.small_runs import kept, small, sweep, wait_until
from tests.slurm.points import STEPS, held, in_training, losses, meanwhile, number, on_slurm, ranks_of
from tests.slurm.two_nodes import TwoNodes

pytestmark = pytest.mark.slurm

JOB_SECONDS, TOLD_SECONDS = 60, 10
"""Of a job in the partition short, and how long before its end it is told, by a clock that ticks twice a minute."""


# What takes a minute by itself begins first -------------------------------------------------------------------------


class Limited:
    """A point that takes longer than its job may: its rank is stopped until just before the end is announced."""

    def __init__(self, folder: Path, tokens: Path) -> None:
        self.store, self.run = Store(folder, "made_up", "smoke"), small(tokens, steps=STEPS // 2, seed=100)
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
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")  # as some sites' modules set it
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


# Last, since it has begun first -------------------------------------------------------------------------------------


def test_a_job_that_reaches_its_time_limit_is_requeued_and_ends_as_if_nothing_had_been(
    limited: Limited, undisturbed: dict[str, list[float]]
):
    sweep(limited.store, [limited.run], **limited.options)
    found = kept(limited.store, limited.run)
    assert losses(found) == undisturbed[limited.run.id]
    assert 0 < found.times.resumed_at[0] < STEPS // 2
    assert not found.tries
