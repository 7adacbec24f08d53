"""What becomes of the files that ranks leave, whole or torn, of runs that ended well or not."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.launch.decide import LIFE_SECONDS, QUIET_SECONDS, attempt_state
from harness.rank.collect import document_of
from harness.rank.heartbeat import Alive, write_alive
from harness.rank.job import BEHIND, STOP, JobState, keep
from harness.rank.json_files import write_as
from harness.rank.orders import UnreadableError
from harness.rank.results import RESUMED, Resumption, steps_so_far
from harness.records.store import Store
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, to_dict
from tests.harness.made_up_orders import made_up

RUN = Run(plan=Plan(dp=4), train=Recipe(steps=3))


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    return started(tmp_path / "attempt", ranks=2)


def started(folder: Path, ranks: int) -> Path:
    """An attempt's folder as the sweep makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    made_up(RUN, ranks=ranks).write(folder)
    return folder


def lines(steps: int, rank: int = 0) -> list[dict[str, Any]]:
    return [{"step": i, "loss": 5.0 - i, "grad_norm": 1.0, "lr": 1e-3, "seconds": 0.1 + rank} for i in range(steps)]


def log_steps(attempt: Path, rank: int, steps: list[dict[str, Any]]) -> None:
    (attempt / f"rank-{rank}.steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def finish(attempt: Path, rank: int, status: str = "ok", reason: str | None = None) -> None:
    result = {
        "status": status,
        "reason": reason,
        "seconds": {"startup": 1.0 + rank, "training": 3.0 - rank, "evaluation": 0.5},
        "evaluations": [{"step": 3, "name": "valid", "kind": "causal", "nats": 2.0, "tokens": 1}],
        "rank": {"rank": rank, "peak_memory_bytes": 100 + rank},
        "device": {"device": "cpu"},
        "resolved": {"vocab_size": 257, "parameters": 10},
    }
    (attempt / f"rank-{rank}.json").write_text(json.dumps(result))


def fail(attempt: Path, rank: int, reason: str, time: float, cause: str = "error", restart: int = 0) -> None:
    failure = {"cause": cause, "reason": reason, "rank": rank, "time": time, "log": [f"end of rank {rank}"]}
    failure["restart"] = restart
    (attempt / f"rank-{rank}.failure.json").write_text(json.dumps(failure))


@settings(max_examples=25)
@given(steps=st.integers(0, 5), cut=st.integers(0, 1000))
def test_a_torn_last_line_is_no_step(tmp_path_factory: pytest.TempPathFactory, steps: int, cut: int):
    attempt = started(tmp_path_factory.getbasetemp() / "torn", ranks=1)
    log_steps(attempt, 0, lines(steps))
    log = attempt / "rank-0.steps.jsonl"
    content = log.read_bytes()[:cut]
    log.write_bytes(content)
    assert steps_so_far(attempt) == lines(steps)[: content.count(b"\n")]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_none_so_that_the_record_is_json(tmp_path: Path, loss: float):
    attempt = started(tmp_path / "attempt", ranks=1)
    log_steps(attempt, 0, [*lines(2), lines(3)[2] | {"loss": loss, "grad_norm": float("nan")}])
    finish(attempt, 0, "nan", f"loss is {loss} at step 2")
    record = document_of(attempt)
    assert (record["status"], record["reason"]) == ("nan", f"loss is {loss} at step 2")
    assert [step["loss"] for step in record["steps"]] == [5.0, 4.0, None]
    json.dumps(record, allow_nan=False)
    store = Store(tmp_path, "made_up", "smoke")
    store.write(record)
    assert store.document(RUN.id) == record


def test_results_of_all_ranks_end_a_try_of_which_the_scheduler_knows_nothing(attempt: Path):
    keep(attempt, "slurm", "12")
    silent = {attempt: JobState("unknown")}
    assert attempt_state(attempt, silent) == "live"
    finish(attempt, 0)
    assert attempt_state(attempt, silent) == "live"
    finish(attempt, 1)
    assert attempt_state(attempt, silent) == "ended"
    assert attempt_state(attempt, {attempt: JobState("running")}) == "live", "who knows better is believed"


@pytest.mark.parametrize(("on", "name"), [("slurm", "running"), ("slurm", "pending"), ("local", "running")])
def test_a_job_whose_end_is_not_seen_ends_with_its_results(attempt: Path, on: Any, name: Any):
    keep(attempt, on, "12")
    running, long_ago = {attempt: JobState(name)}, time.time() - LIFE_SECONDS - 1
    for rank in range(2):
        assert attempt_state(attempt, running) == "live"
        finish(attempt, rank)
        write_alive(attempt, rank, Alive(ended="finished"))
        for path in attempt.glob(f"rank-{rank}.*json"):
            os.utime(path, (long_ago, long_ago))
    assert attempt_state(attempt, running) == "ended"
    write_alive(attempt, 1, Alive(ended="finished"))
    assert attempt_state(attempt, running) == "live", "the job may be about to end"


def test_a_job_that_failed_and_whose_end_its_scheduler_has_forgotten_ends_once_its_ranks_are_long_quiet(attempt: Path):
    keep(attempt, "slurm", "12")
    running = lambda restarts: {attempt: JobState("running", restarts=restarts)}
    assert attempt_state(attempt, running(1)) == "live", "no rank has started"
    for ended in ("failed", ""):
        write_alive(attempt, 1, Alive(ended=ended, restart=1))
        for age, state in ((LIFE_SECONDS + 1, "live"), (QUIET_SECONDS + 1, "ended")):
            os.utime(attempt / "rank-1.alive.json", (time.time() - age, time.time() - age))
            assert attempt_state(attempt, running(1)) == state
        assert attempt_state(attempt, running(2)) == "live", "its next start may not have written anything yet"
        assert attempt_state(attempt, running(None)) == "live", "nor is it known which start this is"
        assert attempt_state(attempt, {attempt: JobState("pending", restarts=1)}) == "live", "it will start again"


def test_a_job_in_no_queue_whose_end_the_accounting_missed_ends_once_its_ranks_are_quiet(attempt: Path):
    keep(attempt, "slurm", "12")
    behind, long_ago = {attempt: BEHIND}, time.time() - LIFE_SECONDS - 1
    assert attempt_state(attempt, behind) == "live", "no rank has started"
    for ended in ("", "failed"):
        write_alive(attempt, 0, Alive(ended=ended))
        assert attempt_state(attempt, behind) == "live", "the accounting may be about to say how it ended"
        os.utime(attempt / "rank-0.alive.json", (long_ago, long_ago))
        assert attempt_state(attempt, behind) == "ended"
    assert attempt_state(attempt, {attempt: JobState("unknown")}) == "live"


def test_a_run_that_ended_well_has_the_values_of_every_rank(attempt: Path):
    for rank in range(2):
        log_steps(attempt, rank, lines(3, rank))
        finish(attempt, rank)
    record = document_of(attempt)
    assert (record["status"], record["reason"], record["cause"], record["log"]) == ("ok", None, "", [])
    assert [step["loss"] for step in record["steps"]] == [5.0, 4.0, 3.0]
    assert [step["seconds"] for step in record["steps"]] == [[0.1, 1.1]] * 3
    assert record["ranks"] == [{"rank": 0, "peak_memory_bytes": 100}, {"rank": 1, "peak_memory_bytes": 101}]
    assert record["times"]["startup_seconds"] == 2.0
    assert record["times"]["training_seconds"] == 3.0
    assert record["environment"] == {"cores": 2, "device": "cpu"}
    assert record["resolved"] == {"vocab_size": 257, "parameters": 10, "data": {"name": "synthetic"}}
    assert record["config"] == json.loads(json.dumps(to_dict(RUN)))


@settings(max_examples=20)
@given(done=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_only_steps_that_every_rank_finished_count(tmp_path_factory: pytest.TempPathFactory, done: tuple[int, int]):
    attempt = started(tmp_path_factory.getbasetemp() / "uneven", ranks=2)
    for rank, steps in enumerate(done):
        log_steps(attempt, rank, lines(steps, rank))
    fail(attempt, 1, "rank 1: ValueError: no", 1.0)
    record = document_of(attempt)
    assert [step["step"] for step in record["steps"]] == list(range(min(done)))
    assert (record["status"], record["log"]) == ("failed", ["end of rank 1"])


def test_a_rank_that_left_nothing_is_named_with_the_end_of_its_log(attempt: Path):
    finish(attempt, 0)
    (attempt / "rank-1.log").write_bytes(b"one\ntwo\xff\n")
    record = document_of(attempt)
    assert record["status"] == "failed"
    assert "rank 1 vanished" in record["reason"]
    assert record["log"] == ["one", "two\N{REPLACEMENT CHARACTER}"]


def test_an_attempt_that_never_came_to_anything_is_a_failure_too(attempt: Path):
    record = document_of(attempt)
    assert record["status"] == "failed"
    assert (record["steps"], record["ranks"], record["evaluations"]) == ([], [], [])


def test_a_half_written_failure_does_not_count(attempt: Path):
    for rank in range(2):
        log_steps(attempt, rank, lines(3, rank))
        finish(attempt, rank)
    (attempt / "rank-0.failure.json").write_text('{"status": "fai')
    assert document_of(attempt)["status"] == "ok"


GOOD = json.dumps(lines(1)[0])
DAMAGES = {
    "spec.json": ("", "{", "[]", "{}", '{"id": 3}', '{"ranks": "two"}', '{"run": {}}', '{"submitted": null}'),
    "rank-1.json": (
        *("", "{", "[]", "null", '{"seconds": []}', '{"seconds": {"training": "3"}}', '{"resolved": 7}'),
        *('{"device": [1]}', '{"status": 3}', '{"engine": "native"}', '{"rank": {"rank": "one"}}'),
    ),
    "rank-1.steps.jsonl": (
        *(b"\xff", b'{"ste\n', bytes(64) + b"\n", b'{"step": 3}\n', b"[]\n", b"7\n", GOOD.encode() + b"\n"),
        *(GOOD.replace("5.0", junk).encode() + b"\n" for junk in ('"x"', "true", "[1]")),
        *(GOOD.replace(field, "").encode() + b"\n" for field in ('"loss": 5.0, ', ', "seconds": 0.1')),
    ),
}
"""What a crash, a disk or a person leaves in the place of a file; bytes come behind its first two steps, and a document
changes the fields that it has."""


@pytest.mark.parametrize(("name", "damage"), [(name, damage) for name, all in DAMAGES.items() for damage in all])
def test_what_cannot_be_read_is_named_and_makes_no_record(attempt: Path, name: str, damage: str | bytes):
    for rank in range(2):
        log_steps(attempt, rank, lines(3, rank))
        finish(attempt, rank)
    path = attempt / name
    if isinstance(damage, bytes):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + damage)
    elif damage.startswith('{"'):
        path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(damage)))
    else:
        path.write_text(damage)
    with pytest.raises(UnreadableError, match=str(attempt)) as told:
        document_of(attempt, run_id=RUN.id)
    assert "\n" not in str(told.value)


def test_a_run_that_ended_well_has_all_its_steps(attempt: Path):
    for rank in range(2):
        log_steps(attempt, rank, lines(3 - rank, rank))
        finish(attempt, rank)
    with pytest.raises(UnreadableError, match="2 of 3 steps"):
        document_of(attempt)


@pytest.mark.parametrize("time", [1e300, -1e300, 10**400])
def test_no_clock_is_too_wrong_for_a_record(attempt: Path, time: float):
    fail(attempt, 1, "rank 1: ValueError: no", time)
    assert document_of(attempt)["status"] == "failed"


def test_what_was_to_be_stopped_is_cancelled_unless_slurm_ended_it(attempt: Path):
    (attempt / "rank-0.log").write_text("the last line\n")
    (attempt / STOP).touch()
    assert document_of(attempt)["cause"] == "cancelled"
    record = document_of(attempt, scheduler="PREEMPTED", slurm_log=["slurmstepd: error: preempted"])
    assert (record["status"], record["cause"]) == ("failed", "preempted")
    assert record["log"] == ["slurmstepd: error: preempted", "the last line"]


def test_a_run_that_failed_after_it_was_resumed_has_the_steps_and_the_code_as_one_that_ended_well(attempt: Path):
    code = {"commit": "b" * 40, "dirty": False, "step": 2, "before": [{"commit": "a" * 40, "dirty": False, "step": 0}]}
    write_as(attempt / RESUMED, Resumption([], [1, 2], code))
    for rank in range(2):
        log_steps(attempt, rank, lines(3, rank))
    fail(attempt, 1, "rank 1: ValueError: no", 1.0)
    failed = document_of(attempt)
    assert (failed["status"], failed["times"]["resumed_at"], failed["environment"]["git"]) == ("failed", [1, 2], code)
    (attempt / "rank-1.failure.json").unlink()
    for rank in range(2):
        finish(attempt, rank)
    ended = document_of(attempt)
    assert (ended["status"], ended["times"]["resumed_at"], ended["environment"]["git"]) == ("ok", [1, 2], code)


def test_failures_of_an_earlier_start_of_the_job_do_not_count(attempt: Path):
    fail(attempt, 0, "rank 0: ValueError: before", 1.0)
    for rank in range(2):
        write_alive(attempt, rank, Alive(restart=1, ended="finished"))
        log_steps(attempt, rank, lines(3, rank))
        finish(attempt, rank)
    assert document_of(attempt)["status"] == "ok"
    fail(attempt, 1, "rank 1: ValueError: now", 0.5, restart=1)
    assert document_of(attempt)["reason"] == "rank 1: ValueError: now"
