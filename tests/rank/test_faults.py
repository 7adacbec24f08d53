"""Faults for real: processes are killed, interrupted and broken, and what is left of them is looked at."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.experiment.experiment import Point
from harness.launch.slurm import Site
from harness.rank.devices import gpu_count
from harness.records.store import Store
from impl.model.config import ModelConfig
from tests.harness.made_up_records import document, record
from tests.harness.small_runs import ENDLESS, Told, kept, kill_all, processes, small, sweep, trains, wait_until, worker

ROOT = Path(__file__).resolve().parents[2]
REACTION_SECONDS = 10.0
HANG_SECONDS = 6.0


def dead(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# Ranks and their supervisors ----------------------------------------------------------------------------------------


def test_a_killed_rank_or_supervisor_fails_its_point_and_the_sweep_goes_on(tokens: Path, store: Store):
    """And so does a rank that is stopped: it stands still until its supervisor ends it."""
    hit, orphaned = small(tokens, steps=ENDLESS), small(tokens, seed=1, steps=ENDLESS)
    other, still = small(tokens, seed=2), small(tokens, seed=3, dp=2, steps=ENDLESS)
    killed: dict[str, float] = {}
    ranks: list[psutil.Process] = []

    def kill(point: Point) -> None:
        """SIGKILL to the last rank of one point, and to what watches over the only rank of another."""
        [attempt] = (store.folder / "attempts").glob(f"{point.run.id}-*")
        size = point.run.plan.world_size
        if point.run == other or point.run.id in killed or not trains(attempt, size):
            return
        killed[point.run.id] = time.monotonic()
        ranks.extend(processes(attempt, "harness.rank.worker"))
        victim = worker(attempt, rank=size - 1)
        if point.run == still:
            victim.suspend()
        else:
            (victim if point.run == hit else psutil.Process(victim.ppid())).kill()

    told = Told(on_look=kill)
    sweep(store, [hit, orphaned, other, still], told=told, jobs=2, retries=0, hang_seconds=HANG_SECONDS)
    found = kept(store, hit)
    assert (found.status, found.reason) == ("failed", "rank 0 was killed by SIGKILL")
    assert found.cause == "killed"
    assert found.steps
    found = kept(store, orphaned)
    assert (found.status, found.cause) == ("failed", "vanished")
    assert "rank 0 vanished" in str(found.reason)
    assert kept(store, other).status == "ok"
    found = kept(store, still)
    assert (found.status, found.cause) == ("timeout", "hang")
    place = r"in step \d+( (at|after) \S+( \(\S+( \S+)?\))?)?"  # at nothing yet, if its step has just begun
    assert re.fullmatch(rf"no progress for 6 s: rank 0 {place}, rank 1 {place}, stopped by a signal", str(found.reason))
    assert max(told.end_times[run_id] - at for run_id, at in killed.items()) < REACTION_SECONDS + HANG_SECONDS
    assert len(ranks) == 4
    assert all(map(dead, ranks))
    assert processes(store.folder) == []

    again = sweep(store, [orphaned, other], time_limit=1.0, retries=0)
    assert again.starts == [orphaned.id]
    found = kept(store, orphaned)
    assert (found.status, found.reason) == ("timeout", "time limit of 1 s reached")
    assert found.cause == "time_limit"
    assert processes(store.folder) == []


def test_a_rank_that_raises_or_needs_too_much_memory_says_so(tokens: Path, store: Store, tmp_path: Path):
    lost = tmp_path / "lost"
    shutil.copytree(tokens, lost)
    raises = small(lost)
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=1, seq_len=512, vocab_size=1_000_000)
    too_much = replace(small(tokens, seed=1, global_batch=64, microbatch=64), model=model)
    told = Told(on_start=lambda _: shutil.rmtree(lost, ignore_errors=True))  # after it was found valid
    most, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**36, hard))  # so that nothing but this run is refused memory
    try:
        sweep(store, [raises, too_much], site=Site(allow_oom=True), told=told)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    found = kept(store, raises)
    assert (found.status, found.cause) == ("failed", "error")
    assert str(found.reason).startswith("rank 0: InputError: no token folder")
    assert "\n" not in str(found.reason)
    assert found.log[0].startswith(("Traceback", "  File"))
    assert "no token folder" in found.log[-1]
    found = kept(store, too_much)
    assert (found.status, found.cause) == ("oom", "oom"), found.log
    assert "\n" not in str(found.reason)


# The driver ---------------------------------------------------------------------------------------------------------

WAYS = {"SIGINT to the group": 2, "SIGTERM": 1, "SIGKILL": 1}
"""How a driver is ended, and the ranks that it has."""


def start(tokens: Path, out: Path, ranks: int) -> "subprocess.Popen[str]":
    """`train` of a run that never ends, in a session of its own as in a terminal of its own."""
    shape = "--model.num-layers 1 --model.hidden-size 16 --model.num-heads 1 --model.seq-len 16"
    length = f"--train.global-batch 2 --train.microbatch 1 --train.steps {ENDLESS} --plan.dp {ranks}"
    command = f"-m harness train {shape} {length} --data.dataset".split()
    return subprocess.Popen(
        [sys.executable, *command, tokens, "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, "LMSCALE_TURNS": str(out)},  # else each would wait for the one before
    )


@pytest.fixture(scope="module")
def drivers(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """A driver for each way to end one; started together, since importing PyTorch takes its time.

    Their ranks are stopped as soon as they train, and go on in their test: meanwhile they would use all processors.
    """
    if 0 < gpu_count() < max(WAYS.values()):
        pytest.skip("ranks take a GPU each where there are any")
    folder = tmp_path_factory.mktemp("drivers")
    for way in WAYS:
        Store(folder / way, "train", "small").write(document(record(tier="small")))
    found = {way: start(tokens, folder / way, ranks) for way, ranks in WAYS.items()}
    starting = set(WAYS)

    def have_started() -> bool:
        for way in list(starting):
            if trains(folder / way, WAYS[way]) or found[way].poll() is not None:
                starting.remove(way)
                for rank in processes(folder / way, "harness.rank.worker"):
                    rank.suspend()
        return not starting

    try:
        wait_until(have_started, 180)
        yield found
    finally:
        kill_all(folder)
        for driver in found.values():
            driver.kill()
            driver.communicate()


def going_on(out: Path, ranks: int) -> None:
    """Let the ranks of a driver train."""
    stopped = processes(out, "harness.rank.worker")
    assert len(stopped) == ranks
    for rank in stopped:
        rank.resume()


def folder_of(driver: "subprocess.Popen[str]") -> Path:
    assert isinstance(driver.args, list)
    return Path(str(driver.args[driver.args.index("--out") + 1]))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "SIGKILL"])
def test_an_interrupted_driver_stops_all_ranks_and_keeps_what_is_finished(
    drivers: dict[str, "subprocess.Popen[str]"], way: str
):
    driver, out = drivers[way], folder_of(drivers[way])
    records = out / "train" / "small" / "records"
    [finished] = records.iterdir()
    before = finished.read_bytes()
    going_on(out, WAYS[way])
    number = signal.Signals[way.split()[0]]
    (os.killpg if way.endswith("group") else os.kill)(driver.pid, number)
    output, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("interrupted")
    wait_until(lambda: not processes(out), REACTION_SECONDS)
    assert list(records.iterdir()) == [finished]
    assert finished.read_bytes() == before
    assert list((out / "train" / "small" / "attempts").iterdir()) == []


def test_no_rank_outlives_a_driver_that_was_killed(drivers: dict[str, "subprocess.Popen[str]"]):
    driver, out = drivers["SIGKILL"], folder_of(drivers["SIGKILL"])
    going_on(out, WAYS["SIGKILL"])
    driver.kill()  # not waited for yet: a dead driver that nobody has buried is dead too
    wait_until(lambda: not processes(out, "harness.rank.worker"), REACTION_SECONDS)
    wait_until(lambda: not processes(out), REACTION_SECONDS)
    assert len(list((out / "train" / "small" / "records").iterdir())) == 1
