"""The clock of timelines: actions in the order in which they were done, on one scale for all ranks."""

import socket
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.rank import roofline
from harness.rank.instruments import Stopwatch
from impl.pipeline.schedule import Action, Op
from impl.pipeline.simulate import Timeline
from tests.fake_cuda import Driver
from tests.ranks import run_ranks

CPU = torch.device("cpu")
AWAY = 1e6
"""Seconds by which another machine's clock is off."""


@pytest.mark.usefixtures("one_rank")
def test_actions_are_kept_in_order_with_their_times_until_reset() -> None:
    noted: list[str] = []
    watch = Stopwatch(CPU, lambda a: noted.append(f"begin {a}"), lambda a: noted.append(f"end {a}"))
    actions = [Action(Op.F, 0, 0), Action(Op.I, 0, 0), Action(Op.W, 0, 0)]
    for action in actions:
        with watch(action):
            time.sleep(0.01)
    row = watch.row()
    assert [text for text, _, _ in row] == ["0F0", "0I0", "0W0"]
    assert noted == [f"{what} {action}" for action in actions for what in ("begin", "end")]
    times = [time for _, *both in row for time in both]
    assert times == sorted(times)
    assert times[0] >= 0, "before the clock was set"
    assert all(0.01 <= end - start < 5 for _, start, end in row)
    assert [span.action for span in Timeline.from_rows([row]).spans] == actions
    watch.reset()
    with pytest.raises(ZeroDivisionError), watch(Action(Op.F, 0, 0)):
        _ = 1 / 0
    assert watch.row() == [], "an action that fails has no time"


def one_after_another(hosts: list[str]) -> list[list[Any]]:
    """Each rank's rows of three rounds in which every rank acts when the one before it is done."""
    mine = hosts[dist.get_rank()]
    clock, off = time.perf_counter, AWAY * sorted(set(hosts)).index(mine)
    socket.gethostname = lambda: mine
    time.perf_counter = lambda: clock() + off
    try:
        watch = Stopwatch(CPU)
        for i in range(3):
            for rank in range(len(hosts)):
                dist.barrier()
                if rank == dist.get_rank():
                    with watch(Action(Op.F, rank, i)):
                        time.sleep(0.001)
        return watch.row()
    finally:
        time.perf_counter = clock


def test_ranks_of_a_machine_share_its_clock() -> None:
    rows = run_ranks(3, one_after_another, ["here"] * 3)
    by_time = sorted((span for row in rows for span in row), key=lambda span: span[1])
    assert [text for text, _, _ in by_time] == [f"{rank}F{i}" for i in range(3) for rank in range(3)]
    for (_, _, end), (_, start, _) in pairwise(by_time):
        assert end <= start


def test_other_machines_clocks_are_set_by_a_barrier() -> None:
    """Only the ranks of one machine can be compared exactly; clocks that are days apart begin together all the same."""
    rows = run_ranks(3, one_after_another, ["here", "there", "there"])
    assert all(0 <= start <= end < 60 for row in rows for _, start, end in row)
    there = sorted((span for row in rows[1:] for span in row), key=lambda span: span[1])
    assert [text for text, _, _ in there] == [f"{rank}F{i}" for i in range(3) for rank in (1, 2)]


# A GPU's clock --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_actions_on_a_gpu_are_timed_by_its_events_and_nothing_waits_meanwhile(cuda: Driver) -> None:
    watch = Stopwatch(CPU)
    assert cuda.calls[:2] == ["record", "wait for event"], "the clocks are compared when the first event has passed"
    cuda.calls.clear()
    actions = [Action(Op.F, 0, 0), Action(Op.B, 0, 0)]
    for action in actions:
        with watch(action):
            cuda.calls.append(str(action))
    assert cuda.calls == ["record", "0F0", "record", "record", "0B0", "record"]
    (_, *first), (_, *second) = watch.row()
    assert [end - first[0] for end in (first[1], *second)] == pytest.approx([1e-3, 2e-3, 3e-3])


@pytest.mark.usefixtures("one_rank")
def test_a_step_after_hours_on_a_gpu_is_timed_as_finely_as_the_first(cuda: Driver) -> None:
    watch, begun = Stopwatch(CPU), time.perf_counter()
    cuda.events += 10 * 3_600_000  # milliseconds, of which fp32 has every fourth only
    watch.reset()
    for action in (Action(Op.F, 0, 0), Action(Op.B, 0, 0)):
        with watch(action):
            pass
    (_, *first), (_, *second) = watch.row()
    assert [end - first[0] for end in (first[1], *second)] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert first[0] < time.perf_counter() - begun + 60, "the host's clock says how long ago it began"


def test_an_operation_on_a_gpu_is_timed_by_its_events(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.LAUNCHES, "cpu", 4)
    assert roofline.seconds(lambda: cuda.calls.append("launch"), CPU) == pytest.approx(1e-3 / 4)
    assert cuda.calls == ["record", *["launch"] * 4, "record", "wait for event"]
