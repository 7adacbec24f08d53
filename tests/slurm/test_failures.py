"""Sweeps on a real Slurm of two nodes: points that fail, sweeps that are left, and the doctor."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.store import Store
from impl.model.config import ModelConfig
from impl.plan import Plan
from tests.harness.calls import call, document
from tests.harness.small_runs import Told, kept, small, sweep
from tests.slurm.points import STEPS, attempt_of, in_training, meanwhile, number, on_slurm, ranks_of, send
from tests.slurm.two_nodes import TwoNodes

pytestmark = pytest.mark.slurm

HANG_SECONDS = 30.0
"""Longer than ranks take to start while others do."""


def test_points_that_fail_say_why_and_the_others_finish(tokens: Path, store: Store, tmp_path: Path, slurm: TwoNodes):
    lost = tmp_path / "lost"
    shutil.copytree(tokens, lost)
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=1, seq_len=64, vocab_size=1_000_000)
    raises = small(lost)
    hungry = replace(small(tokens, global_batch=8, microbatch=8, steps=50), model=model)
    # beside so many others it takes longer until ranks are found
    cancelled, hangs = (small(tokens, steps=3 * STEPS, seed=seed) for seed in (1, 2))
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
