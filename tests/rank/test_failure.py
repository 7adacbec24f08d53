"""What became of a try, decided from facts alone."""

import errno
import os
import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rank.failure import (
    AGAIN,
    RETRIED,
    Cause,
    Failure,
    Outcome,
    cause_of,
    decide,
    last_lines,
    of_exit,
    one_line,
)
from harness.rank.failure import STATUSES as BY_CAUSE

CAUSES: tuple[Cause, ...] = get_args(Cause)
STATUSES = {"ok", "nan", "oom", "failed", "timeout"}
NEIGHBOUR = "rank {}: RuntimeError: [enforce fail at pair.cc] Connection closed by peer [10.0.0.1]:4711"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
QUOTA = "OSError: [Errno 122] Disk quota exceeded"
ALL_WELL = {0: ("ok", None), 1: ("ok", None)}


def failure(rank: int, cause: Cause, reason: str | None = None, time: float = 0.0) -> Failure:
    return Failure(rank, cause, reason or f"rank {rank}: {cause}", time)


def decided(*failures: Failure, **more: Any) -> Outcome:
    return decide(**{"ranks": 2, "results": {}, "failures": failures} | more)


# Ranks' own words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["", "COMPLETED", "FAILED", "CANCELLED by 0", "TIMEOUT", "OUT_OF_MEMORY"])
def test_what_all_ranks_have_finished_ended_as_the_first_says_however_the_job_ended(word: str) -> None:
    assert decided(results=ALL_WELL, scheduler=word, is_cancelled=True)[:3] == ("ok", None, "")
    diverged = {0: ("nan", "loss is nan at step 3"), 1: ("nan", "")}
    assert decided(results=diverged, scheduler=word)[:3] == ("nan", "loss is nan at step 3", "")


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause not in ("", "killed")])
@pytest.mark.parametrize("word", ["", "FAILED", "CANCELLED by 0", "NODE_FAIL"])
def test_a_rank_that_knows_why_is_believed(cause: Cause, word: str) -> None:
    found = decided(failure(1, cause), scheduler=word)
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
    assert decided(*found, ranks=4)[1:3] == (f"rank {killed} was killed by SIGKILL", "killed")


@given(order=st.permutations(range(4)), cause=st.sampled_from(["error", "oom", "hang"]))
def test_else_the_earliest_failure_is_the_cause(order: list[int], cause: Cause) -> None:
    found = [
        failure(rank, cause if time == 0 else "error", NEIGHBOUR.format(rank), time) for time, rank in enumerate(order)
    ]
    assert decided(*found, ranks=4)[1:3] == (NEIGHBOUR.format(order[0]), cause)


def test_an_error_is_the_cause_of_what_its_neighbours_say_by_another_hosts_clock() -> None:
    raised = failure(1, "error", "rank 1: ValueError: no", time=100.0)
    assert decided(failure(0, "error", NEIGHBOUR.format(0), time=1.0), raised).failure == raised


def test_a_rank_whose_neighbour_is_gone_without_a_word_does_not_speak_for_it() -> None:
    says = failure(0, "error", NEIGHBOUR.format(0))
    found = decided(says)
    assert (found.status, found.cause) == ("failed", "vanished")
    assert str(found.reason).startswith("rank 1 vanished")
    assert decided(says, stopped=[1])[1:3] == (says.reason, "error")


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
def test_the_scheduler_knows_why_ranks_are_gone(word: str) -> None:
    status, cause = ENDS[word]
    for said in ([], [failure(0, "error", NEIGHBOUR.format(0))]):
        found = decided(*said, scheduler=word)
        assert (found.status, found.cause) == (status, cause)
    killed = decided(failure(1, "killed", "rank 1 was killed by SIGTERM"), scheduler=word)
    assert killed.cause == ("killed" if cause == "vanished" else cause)


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Job 7 exceeded memory limit (4096 > 2048), being killed",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
    ],
)
def test_slurm_says_in_the_jobs_log_what_its_state_does_not(line: str) -> None:
    for said in ([], [failure(0, "killed", "rank 0 was killed by SIGKILL")]):
        found = decided(*said, scheduler="FAILED", slurm_log=["slurmstepd: hello", line])
        assert (found.status, found.cause) == ("oom", "oom")
        assert line in str(found.reason)


def test_what_was_to_be_stopped_is_cancelled_and_what_never_ran_is_told_so() -> None:
    for said, cause in (((), "cancelled"), ([failure(0, "killed")], "cancelled"), ([failure(0, "error")], "error")):
        assert decided(*said, is_cancelled=True).cause == cause
    never = decided(has_begun=False, slurm_log=["slurmstepd: error: execve(): python: No such file or directory"])
    assert (never.status, never.cause) == ("failed", "launch")
    assert "execve" in str(never.reason)
    assert decided(stopped=[0, 1]).cause == "vanished"


# A rank's end -------------------------------------------------------------------------------------------------------

WATCHDOG = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(...) ran for 600000 milliseconds"
BROKEN = "  what():  [PG ID 0 Rank 3] watchdog thread terminated with exception: CUDA error: uncorrectable ECC error"
FULL = "  what():  [PG ID 0 Rank 3] watchdog thread terminated with exception: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("code", "more", "cause", "reason"),
    [
        (1, {}, "error", "exited with status 1"),
        (1, {"has_begun": False}, "launch", "exited with status 1"),
        (1, {"log": [QUOTA, ""]}, "disk", f"exited with status 1: {QUOTA}"),
        (-signal.SIGHUP, {}, "killed", "was killed by SIGHUP"),
        (-63, {}, "killed", "was killed by signal 63"),
        (-signal.SIGTERM, {"memory_kills": 1}, "killed", "was killed by SIGTERM"),
        (-signal.SIGKILL, {"memory_kills": 1}, "oom", "was killed by SIGKILL: out of memory"),
        (-signal.SIGSEGV, {}, "error", "was killed by SIGSEGV"),
        (-signal.SIGABRT, {"log": ["one"]}, "error", "was killed by SIGABRT"),
        (-signal.SIGABRT, {"log": ["one", WATCHDOG]}, "hang", f"was killed by SIGABRT: {WATCHDOG}"),
        (-signal.SIGABRT, {"log": [BROKEN, ""]}, "node_failure", f"was killed by SIGABRT: {BROKEN.strip()}"),
        (-signal.SIGABRT, {"log": [FULL, ""]}, "oom", f"was killed by SIGABRT: {FULL.strip()}"),
    ],
)
def test_exits_are_told_apart(code: int, more: dict[str, Any], cause: str, reason: str) -> None:
    assert of_exit(3, code, **{"log": [], "has_begun": True} | more) == (cause, f"rank 3 {reason}")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("RuntimeError: [alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory", "oom"),
        ("MemoryError: ", "oom"),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk"),
        ("RuntimeError: no checkpoint was written to x: rank 0: OSError: [Errno 28] No space left on device", "disk"),
        *((f"OSError: [Errno {number}] {os.strerror(number)}", "disk") for number in DISK_ERRORS),
        ("OSError: [Errno 30] Read-only file system: 'x'", "disk"),
        ("RuntimeError: [/pytorch/gloo/unbound_buffer.cc:83] Timed out waiting 1000ms for recv operation", "hang"),
        ("DistStoreError: Timeout waiting for key: default_pg/0/0 after 30000 ms", "hang"),
        ("DistStoreError: wait timeout after 30000ms, keys: /default_pg/0/1", "hang"),
        ("RuntimeError: Gloo connectFullMesh failed with [tcp/pair.cc] Connect timeout [10.0.0.1]", "hang"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "node_failure"),
        ("AcceleratorError: HIP error: uncorrectable ECC error encountered", "node_failure"),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "node_failure"),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", "error"),
        ("InputError: no token folder at x", "error"),
        ("ValueError: ", "error"),
    ],
)
def test_an_exception_tells_its_cause(error: str, cause: str) -> None:
    assert cause_of(error) == cause


@pytest.mark.parametrize(
    ("kind", "last", "cause"),
    [
        ("unhandled cuda error", "Failed to CUDA calloc async 6291456 bytes", "oom"),
        ("unhandled cuda error", "Cuda failure 2 'out of memory'", "oom"),
        ("unhandled cuda error", "Cuda failure 214 'uncorrectable ECC error encountered'", "node_failure"),
        ("invalid usage", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "error"),
    ],
)
def test_what_nccl_says_last_is_in_the_line_of_its_error(kind: str, last: str, cause: str) -> None:
    where = f"NCCL error in: NCCLUtils.cpp:93, {kind} (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9"
    line = one_line(
        RuntimeError(f"{where}\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{last}\n")
    )
    assert line == f"RuntimeError: {where}: {last}"
    assert cause_of(line) == cause


@pytest.mark.parametrize(("text", "line"), [("one\ntwo", "ValueError: one"), ("", "ValueError: ")])
def test_of_other_errors_the_first_line_is_told(text: str, line: str) -> None:
    assert one_line(ValueError(text)) == line


def test_the_line_by_which_a_watchdog_ends_a_rank_is_found_above_its_frames(tmp_path: Path) -> None:
    advice = [
        "CUDA kernel errors might be reported at some other API call", "For debugging consider", "Compile with", "",
    ]  # fmt: skip
    frames = [f"frame #{i}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x782" for i in range(10)]
    raised = ["Exception raised from c10_cuda_check_implementation (most recent call first):", *frames, ""]
    again = ["Exception raised from ncclCommWatchdog (most recent call first):", *frames[:6], ""]
    (tmp_path / "rank-3.log").write_text("\n".join([BROKEN, *advice, *raised, *again]))
    found = of_exit(3, -signal.SIGABRT, last_lines(tmp_path, 3), has_begun=True)
    assert found == ("node_failure", f"rank 3 was killed by SIGABRT: {BROKEN.strip()}")


# Whatever the facts are ---------------------------------------------------------------------------------------------

failures = st.builds(
    failure,
    rank=st.integers(0, 1),
    cause=st.sampled_from(CAUSES[1:]),
    reason=st.sampled_from([None, NEIGHBOUR.format(0), "rank 0 was killed by SIGKILL"]),
    time=st.floats(0, 10),
)
facts = st.fixed_dictionaries(
    {
        "results": st.dictionaries(st.integers(0, 1), st.just(("ok", None))),
        "failures": st.lists(failures, max_size=3),
        "stopped": st.sets(st.integers(0, 1)),
        "has_begun": st.booleans(),
        "scheduler": st.sampled_from(sorted(ENDS)),
        "slurm_log": st.lists(st.sampled_from(["srun: error: node1: task 0: Killed", "oom-kill event"])),
        "is_cancelled": st.booleans(),
    }
)


@given(found=facts)
def test_every_end_has_a_status_and_a_reason_in_one_line(found: dict[str, Any]) -> None:
    outcome = decide(ranks=2, **found)
    assert outcome.status in STATUSES
    assert outcome.cause in CAUSES
    assert (outcome.status == "ok") == (outcome.cause == "") == (outcome.reason is None)
    assert (outcome.status == "ok") == (not found["failures"] and len(found["results"]) == 2)
    assert outcome.status == BY_CAUSE.get(outcome.cause, "failed")
    assert outcome.reason is None or "\n" not in outcome.reason


def test_what_is_tried_again_is_no_fault_of_the_run() -> None:
    assert RETRIED < AGAIN
    assert not {"", "error", "oom"} & AGAIN
    assert {"hang", "cancelled", "time_limit", "disk"} <= AGAIN - RETRIED
