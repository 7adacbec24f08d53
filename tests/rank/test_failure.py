"""What became of a try, decided from facts alone."""

import signal
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rank.failure import (
    AGAIN,
    RETRIED,
    Cause,
    Facts,
    Failure,
    cause_of,
    decide,
    first_failure,
    of_exit,
)
from harness.rank.failure import (
    STATUSES as BY_CAUSE,
)

CAUSES: tuple[Cause, ...] = get_args(Cause)
STATUSES = {"ok", "nan", "oom", "failed", "timeout"}
NEIGHBOUR = "rank {}: RuntimeError: [enforce fail at pair.cc] Connection closed by peer [10.0.0.1]:4711"
ALL_WELL = {0: ("ok", None), 1: ("ok", None)}


def failure(rank: int, cause: Cause, reason: str | None = None, time: float = 0.0) -> Failure:
    return Failure(rank, cause, reason or f"rank {rank}: {cause}", time)


def facts(*failures: Failure, **more: Any) -> Facts:
    return Facts(ranks=2, results=more.pop("results", {}), failures=failures, **more)


# Ranks' own words ---------------------------------------------------------------------------------------------------


def test_a_run_whose_ranks_all_left_a_result_ended_as_the_first_says() -> None:
    assert decide(facts(results=ALL_WELL))[:3] == ("ok", None, "")
    assert decide(facts(results={0: ("nan", "loss is nan at step 3"), 1: ("nan", "")}))[:3] == (
        *("nan", "loss is nan at step 3"),
        "",
    )


@pytest.mark.parametrize("word", ["", "COMPLETED", "FAILED", "CANCELLED by 0", "TIMEOUT", "OUT_OF_MEMORY"])
def test_what_all_ranks_have_finished_is_finished_however_the_job_ended(word: str) -> None:
    assert decide(facts(results=ALL_WELL, scheduler=word, is_cancelled=True)).status == "ok"


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause not in ("", "killed")])
@pytest.mark.parametrize("word", ["", "FAILED", "CANCELLED by 0", "NODE_FAIL"])
def test_a_rank_that_knows_why_is_believed(cause: Cause, word: str) -> None:
    found = decide(facts(failure(1, cause), scheduler=word))
    assert found[:3] == (BY_CAUSE.get(cause, "failed"), f"rank 1: {cause}", cause)
    assert found.failure is not None


REASONS = (
    NEIGHBOUR,
    "rank {}: DistBackendError: remote process exited or there was a network error",
    "rank {} exited with status 1",
)


@given(
    order=st.permutations(range(4)),
    killed=st.integers(0, 3),
    reasons=st.lists(st.sampled_from(REASONS), min_size=4, max_size=4),
    wrote=st.sets(st.integers(0, 3)),
)
def test_a_killed_rank_is_the_cause_whichever_wrote_first(
    order: list[int], killed: int, reasons: list[str], wrote: set[int]
) -> None:
    found = [
        failure(rank, "killed", f"rank {rank} was killed by SIGKILL", time)
        if rank == killed
        else failure(rank, "error", reasons[rank].format(rank), time)
        for time, rank in enumerate(order)
        if rank == killed or rank in wrote
    ]
    outcome = decide(Facts(ranks=4, results={}, failures=found))
    assert (outcome.cause, outcome.reason) == ("killed", f"rank {killed} was killed by SIGKILL")


@given(order=st.permutations(range(4)), cause=st.sampled_from(["error", "oom", "hang"]))
def test_else_the_earliest_failure_is_the_cause(order: list[int], cause: Cause) -> None:
    found = [
        failure(rank, cause if time == 0 else "error", NEIGHBOUR.format(rank), time) for time, rank in enumerate(order)
    ]
    outcome = decide(Facts(ranks=4, results={}, failures=found))
    assert (outcome.cause, outcome.reason) == (cause, NEIGHBOUR.format(order[0]))


def test_an_error_is_the_cause_of_what_its_neighbours_say_by_another_hosts_clock() -> None:
    raised = failure(1, "error", "rank 1: ValueError: no", time=100.0)
    assert first_failure([failure(0, "error", NEIGHBOUR.format(0), time=1.0), raised]) == raised


def test_a_rank_whose_neighbour_is_gone_without_a_word_does_not_speak_for_it() -> None:
    says = failure(0, "error", NEIGHBOUR.format(0))
    found = decide(facts(says))
    assert (found.status, found.cause) == ("failed", "vanished")
    assert found.reason is not None
    assert found.reason.startswith("rank 1 vanished")
    ended_in_order = decide(facts(says, stopped=[1]))
    assert (ended_in_order.cause, ended_in_order.reason) == ("error", says.reason)


# The scheduler's ----------------------------------------------------------------------------------------------------

ENDS = {
    "PREEMPTED": ("failed", "preempted"),
    "TIMEOUT": ("timeout", "time_limit"),
    "DEADLINE": ("timeout", "time_limit"),
    "NODE_FAIL": ("failed", "node_failure"),
    "BOOT_FAIL": ("failed", "node_failure"),
    "OUT_OF_MEMORY": ("oom", "oom"),
    "CANCELLED by 1000": ("failed", "cancelled"),
    "CANCELLED+": ("failed", "cancelled"),
    "FAILED": ("failed", "vanished"),
    "COMPLETED": ("failed", "vanished"),
    "": ("failed", "vanished"),
    "A_NEW_WORD": ("failed", "vanished"),
}


@pytest.mark.parametrize("word", ENDS)
@pytest.mark.parametrize("said", [[], [failure(0, "error", NEIGHBOUR.format(0))]])
def test_the_scheduler_knows_why_ranks_are_gone(word: str, said: list[Failure]) -> None:
    found = decide(facts(*said, scheduler=word))
    assert (found.status, found.cause) == ENDS[word]
    assert found.reason is not None
    assert "\n" not in found.reason


@pytest.mark.parametrize(("word", "cause"), [("CANCELLED by 0", "cancelled"), ("PREEMPTED", "preempted")])
def test_a_rank_that_the_scheduler_has_killed_was_not_killed_by_a_stranger(word: str, cause: str) -> None:
    killed = failure(1, "killed", "rank 1 was killed by SIGTERM")
    assert decide(facts(killed, scheduler=word)).cause == cause
    assert decide(facts(killed, scheduler="FAILED")).cause == "killed"


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Job 7 exceeded memory limit (4096 > 2048), being killed",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
    ],
)
def test_slurm_says_in_the_jobs_log_what_its_state_does_not(line: str) -> None:
    killed = failure(0, "killed", "rank 0 was killed by SIGKILL")
    for said in ([], [killed]):
        found = decide(facts(*said, scheduler="FAILED", slurm_log=["slurmstepd: hello", line]))
        assert (found.status, found.cause) == ("oom", "oom")
        assert found.reason is not None
        assert line in found.reason


def test_what_was_to_be_stopped_is_cancelled_and_what_never_ran_is_told_so() -> None:
    assert decide(facts(is_cancelled=True)).cause == "cancelled"
    assert decide(facts(failure(0, "killed"), is_cancelled=True)).cause == "cancelled"
    assert decide(facts(failure(0, "error"), is_cancelled=True)).cause == "error"
    never = decide(facts(has_begun=False, slurm_log=["slurmstepd: error: execve(): python: No such file or directory"]))
    assert (never.status, never.cause) == ("failed", "launch")
    assert never.reason is not None
    assert "execve" in never.reason
    assert decide(facts(stopped=[0, 1])).cause == "vanished"


# A rank's end -------------------------------------------------------------------------------------------------------


def test_exits_are_told_apart() -> None:
    assert of_exit(3, -signal.SIGHUP, [], has_begun=True) == ("killed", "rank 3 was killed by SIGHUP")
    assert of_exit(0, 1, [], has_begun=True)[0] == "error"
    assert of_exit(0, 1, [], has_begun=False) == ("launch", "rank 0 exited with status 1")
    assert of_exit(0, -signal.SIGSEGV, [], has_begun=True) == ("error", "rank 0 was killed by SIGSEGV")
    assert of_exit(0, -signal.SIGKILL, [], has_begun=True, memory_kills=1)[0] == "oom"
    assert of_exit(0, -signal.SIGTERM, [], has_begun=True, memory_kills=1)[0] == "killed"
    assert of_exit(0, -63, [], has_begun=True) == ("killed", "rank 0 was killed by signal 63")
    watchdog = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(...) ran for 600000 milliseconds"
    assert of_exit(0, -signal.SIGABRT, ["one", watchdog], has_begun=True)[0] == "hang"
    assert of_exit(0, -signal.SIGABRT, ["one"], has_begun=True)[0] == "error"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
            "oom",
        ),
        ("MemoryError: ", "oom"),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk"),
        ("RuntimeError: no checkpoint was written to x: rank 0: OSError: [Errno 28] No space left on device", "disk"),
        ("OSError: [Errno 30] Read-only file system: 'x'", "disk"),
        ("RuntimeError: [/pytorch/gloo/unbound_buffer.cc:83] Timed out waiting 1000ms for recv operation", "hang"),
        ("DistStoreError: Timeout waiting for key: default_pg/0/0 after 30000 ms", "hang"),
        ("DistStoreError: wait timeout after 30000ms, keys: /default_pg/0/1", "hang"),
        (
            "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc] Connect timeout [10.0.0.1]",
            "hang",
        ),
        ("InputError: no token folder at x", "error"),
        ("ValueError: ", "error"),
    ],
)
def test_an_exception_tells_its_cause(error: str, cause: str) -> None:
    assert cause_of(error) == cause


# Whatever the facts are ---------------------------------------------------------------------------------------------

words = st.sampled_from(sorted(ENDS))
failures = st.builds(
    failure,
    rank=st.integers(0, 1),
    cause=st.sampled_from(CAUSES[1:]),
    reason=st.sampled_from([None, NEIGHBOUR.format(0), "rank 0 was killed by SIGKILL"]),
    time=st.floats(0, 10),
)


@given(
    found=st.builds(
        Facts,
        ranks=st.just(2),
        results=st.dictionaries(st.integers(0, 1), st.just(("ok", None))),
        failures=st.lists(failures, max_size=3),
        stopped=st.sets(st.integers(0, 1)),
        has_begun=st.booleans(),
        scheduler=words,
        slurm_log=st.lists(st.sampled_from(["srun: error: node1: task 0: Killed", "oom-kill event"])),
        is_cancelled=st.booleans(),
    )
)
def test_every_end_has_a_status_and_a_reason_in_one_line(found: Facts) -> None:
    outcome = decide(found)
    assert outcome.status in STATUSES
    assert outcome.cause in CAUSES
    assert (outcome.status == "ok") == (outcome.cause == "") == (outcome.reason is None)
    assert (outcome.status == "ok") == (not found.failures and len(found.results) == 2)
    assert outcome.status == BY_CAUSE.get(outcome.cause, "failed")
    assert outcome.reason is None or "\n" not in outcome.reason


def test_what_is_tried_again_is_no_fault_of_the_run() -> None:
    assert RETRIED < AGAIN
    assert not {"", "error", "oom"} & AGAIN
    assert {"hang", "cancelled", "time_limit", "disk"} <= AGAIN - RETRIED
