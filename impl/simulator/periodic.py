"""Simulation of a pipeline's step that executes a schedule until it becomes periodic, and skips the repetitions.

Microbatches are admitted lap by lap. When all ranks have gone as far as they can, the future depends on which actions
are next, when ranks and links are free, and when transfers under way arrive. Where all of that equals the state some
laps before, shifted in time, the laps since then repeat. Where ranks drift apart at constant rates, the last lap
repeats until a rank starts or stops waiting for something. So the result is that of the whole table, exactly. Seconds
are counted in whole units of 2**-60 s: adding them up rounds nothing.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

from impl.pipeline.schedule import Op, Rows
from impl.pipeline.schedules import build, generator, ranks_of
from impl.pipeline.simulate import simulate

UNITS = 2**60
"""Units of time in a second."""
PERIODIC = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
"""Schedules whose steps repeat themselves in a way that is skipped here; all others are simulated action by action."""
LAPS = 4
"""Laps after the pipeline is full for which rows are generated at first."""
KEPT_PASSES = 2**13
"""Most passes of a table whose rows are kept for the next simulation."""

Seconds = Mapping[Op, Sequence[float]]
"""Seconds of each operation, by stage."""
Transfer = float | Callable[[int, int], float]
"""Seconds from one rank to another: a constant, or a function of (sender, receiver)."""
RowsOf = Callable[[int], Rows]
"""Function from a number of microbatches to the rows."""


class Last(NamedTuple):
    """Backward pass of the last microbatch through a stage; a split one's later part."""

    start: float
    end: float


class Ran(NamedTuple):
    """Executed step on every pipeline rank, in seconds from its start."""

    ends: list[float]
    """End of each rank's last action."""
    busy: list[float]
    """Seconds that each rank computes."""
    last: dict[int, Last]
    """Last backward pass of each stage."""
    executed: int
    """Actions that were not skipped."""


class _StageOp(NamedTuple):
    """Common properties of all actions of one operation on one stage."""

    cost: int
    inbox: deque[int] | None
    """Arrival times of the inputs, in the order of the microbatches."""
    outbox: deque[int] | None
    link: int
    delay: int
    reader: int
    """Rank that reads from the outbox."""


class _Lap(NamedTuple):
    """State of the ranks and of transfers under way after a lap."""

    within: int
    """Microbatches admitted."""
    at: list[int]
    """Index of each rank's next action in its row."""
    held: list[int]
    """Number of transfers under way to each inbox."""
    times: list[int]
    gaps: list[int]


class _Pipeline:
    """State of ranks, links and transfers at the current point of the step."""

    def __init__(self, rank_of: Sequence[int], seconds: Seconds, transfer: Transfer) -> None:
        self.rank_of, p = rank_of, max(rank_of) + 1
        self.clock: list[int] = [0] * p
        self.at = [0] * p
        self.free: list[int] = []
        """Time at which each link is free."""
        self.boxes: list[deque[int]] = []
        self.last: dict[tuple[Op, int], tuple[int, int]] = {}
        self.executed = 0
        self._links: dict[tuple[int, int], tuple[int, int]] = {}
        self.kinds: dict[Op, list[_StageOp]] = {
            op: [_StageOp(round(cost * UNITS), None, None, -1, 0, -1) for cost in of_stages]
            for op, of_stages in seconds.items()
        }
        for op in self.kinds.keys() & {Op.F, Op.B, Op.I}:
            for stage in range(len(rank_of)):
                self._connect(op, stage, stage + 1 if op is Op.F else stage - 1, transfer)

    def _connect(self, op: Op, stage: int, to: int, transfer: Transfer) -> None:
        """Connect a stage's operation to the stage that reads its result, if that exists and is on another rank."""
        kinds, rank_of = self.kinds[op], self.rank_of
        if not 0 <= to < len(rank_of) or rank_of[stage] == rank_of[to]:
            return
        sender, reader = rank_of[stage], rank_of[to]
        if (sender, reader) not in self._links:
            seconds = transfer(sender, reader) if callable(transfer) else transfer
            self._links[sender, reader] = len(self.free), round(seconds * UNITS)
            self.free.append(0)
        link, delay = self._links[sender, reader]
        box: deque[int] = deque()
        self.boxes.append(box)
        kinds[stage] = kinds[stage]._replace(outbox=box, link=link, delay=delay, reader=reader)
        kinds[to] = kinds[to]._replace(inbox=box)

    def play(self, rows_of: RowsOf, m: int, step: int) -> None:
        """Execute all rows of m microbatches, where each further `step` microbatches extend the pattern."""
        seen: dict[tuple[int, ...], _Lap] = {}
        laps: list[_Lap] = []
        within, left, size = 0, m, min(m, len(self.clock) + LAPS * step)
        self.at = [0] * len(self.clock)
        rows = rows_of(size)
        while within + step < left:
            within += step
            if within >= size:
                size = min(left, 8 * size)
                rows = rows_of(size)
            gaps: list[int] = []
            self._go_on(rows, within, gaps)
            lap = _Lap(within, list(self.at), list(map(len, self.boxes)), self._times(), gaps)
            laps = [*laps[-2:], lap]
            apart = tuple(time - self.clock[0] for time in self.clock)
            if again := _again(rows, seen.get(apart), lap, left - within - 1):
                since = seen[apart]
                self._pass([again * (lap.times[0] - since.times[0])] * len(lap.times))
                left -= again * (within - since.within)
                break
            seen[apart] = lap
            if again := _unchanged(rows, laps, (left - within - 1) // step):
                self._pass([again * (now - then) for now, then in zip(lap.times, laps[-2].times, strict=True)])
                left -= again * step
                seen, laps = {}, []
        self._go_on(rows if size == left else rows_of(left), left, [], left - 1)

    def _times(self) -> list[int]:
        """Return the times when ranks and links are free, and when transfers under way arrive."""
        return [*self.clock, *self.free, *chain.from_iterable(self.boxes)]

    def _pass(self, times: Iterable[int]) -> None:
        """Advance each of `_times` by the given time."""
        left = iter(times)
        self.clock = [clock + next(left) for clock in self.clock]
        self.free = [free + next(left) for free in self.free]
        for box in self.boxes:
            later = [came + next(left) for came in box]
            box.clear()
            box.extend(later)

    def _go_on(self, rows: Rows, within: int, gaps: list[int], last: int = -1) -> None:
        """Execute all actions of the first `within` microbatches that can run; record times of microbatch `last`.

        Args:
            gaps: list to which the difference of the two times in every comparison is appended.
        """
        clock, free, kinds = self.clock, self.free, self.kinds
        ready = list(reversed(range(len(rows))))
        waits: list[deque[int] | None] = [None] * len(rows)
        while ready:
            rank = ready.pop()
            row, now, at = rows[rank], clock[rank], self.at[rank]
            begin, end = at, len(row)
            while at < end:
                op, stage, microbatch = row[at]
                if microbatch >= within:
                    break
                cost, inbox, outbox, link, delay, reader = kinds[op][stage]
                if inbox is not None:
                    if not inbox:
                        waits[rank] = inbox
                        break
                    gaps.append(gap := inbox.popleft() - now)
                    if gap > 0:
                        now += gap
                now += cost
                at += 1
                if microbatch == last:
                    self.last[op, stage] = now - cost, now
                if outbox is not None:
                    gaps.append(gap := free[link] - now)
                    free[link] = sent = (now + gap if gap > 0 else now) + delay
                    outbox.append(sent)
                    if waits[reader] is outbox:
                        waits[reader] = None
                        ready.append(reader)
            clock[rank], self.at[rank] = now, at
            self.executed += at - begin


def _again(rows: Rows, since: _Lap | None, now: _Lap, most: int) -> int:
    """Return how often the laps since an equal state can repeat within `most` microbatches; 0: states differ."""
    if since is None or not _are_alike(rows, since, now):
        return 0
    by = now.times[0] - since.times[0]
    is_equal = all(time - before == by for time, before in zip(now.times, since.times, strict=True))
    return most // (now.within - since.within) if is_equal else 0


def _unchanged(rows: Rows, laps: Sequence[_Lap], most: int) -> int:
    """Return how many more laps repeat the last one, if times have grown twice by the same amount."""
    if len(laps) < 3 or not _are_alike(rows, *laps):
        return 0
    if any(c - b != b - a for a, b, c in zip(*(lap.times for lap in laps), strict=True)):
        return 0
    for before, gap in zip(laps[1].gaps, laps[2].gaps, strict=True):
        growth = gap - before
        if (before > 0) != (gap > 0):
            return 0
        if gap > 0 > growth or gap <= 0 < growth:
            most = min(most, int(-gap // growth))
    return most


def _are_alike(rows: Rows, first: _Lap, *others: _Lap) -> bool:
    """Return True if after both laps the same actions are next, with equally many transfers under way."""
    return all(lap.held == first.held for lap in others) and all(
        _next(rows, lap) == _next(rows, first) for lap in others
    )


def _next(rows: Rows, lap: _Lap) -> list[object]:
    """Return the next action of each rank, with microbatches relative to the next one admitted."""
    following = [row[at] if at < len(row) else None for row, at in zip(rows, lap.at, strict=True)]
    return [action and (action.op, action.stage, action.microbatch - lap.within) for action in following]


def execute(name: str, p: int, m: int, v: int, seconds: Seconds, transfer: Transfer = 0) -> Ran:
    """Return the earliest times of a schedule's actions, as `impl.pipeline.simulate.simulate` computes them.

    Args:
        name: plan.schedule; tables of those in PERIODIC are not built and may be large.
        m: microbatches; what the schedule demands of their number is not checked for those in PERIODIC.
        seconds: of the operations that the schedule has.
        transfer: seconds from a rank to another, the same for all or by (sender, receiver).

    Raises:
        InputError: as `impl.pipeline.schedules.build`.
    """
    if name not in PERIODIC:
        return _whole(name, p, m, v, seconds, transfer)
    name = "one_f_one_b" if name == "interleaved" and v == 1 else name
    ops = (Op.F, Op.I, Op.W) if name == "zb_h1" else (Op.F, Op.B)
    rank_of = ranks_of(name, p, p, v)
    pipeline = _Pipeline(rank_of, {op: seconds[op] for op in ops}, transfer)
    with _uncollected():
        for rows_of in _phases(name, p, v):
            pipeline.play(rows_of, m, p if v > 1 else 1)
    work = [0] * p
    for stage, rank in enumerate(rank_of):
        work[rank] += sum(kinds[stage].cost for kinds in pipeline.kinds.values())
    return Ran(
        [end / UNITS for end in pipeline.clock],
        [m * one / UNITS for one in work],
        {i: Last(start / UNITS, end / UNITS) for (op, i), (start, end) in pipeline.last.items() if op is ops[-1]},
        pipeline.executed,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: rows are many small tuples without cycles, and it would scan them repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _phases(name: str, p: int, v: int) -> list[RowsOf]:
    """Return the parts of the rows that are periodic by themselves: all; for GPipe, forward and backward part."""
    if name == "gpipe":
        return [lambda m: [row[:m] for row in _rows(name, p, m)], lambda m: [row[m:] for row in _rows(name, p, m)]]
    return [lambda m: _rows(name, p, m, *[v] * (v > 1))]


def _rows(name: str, *sizes: int) -> Rows:
    return _kept_rows(name, *sizes) if prod(sizes) <= KEPT_PASSES else generator(name)(*sizes)


@lru_cache(maxsize=64)  # a fit simulates the same few pipelines with many constants
def _kept_rows(name: str, *sizes: int) -> Rows:
    return generator(name)(*sizes)


def _whole(name: str, p: int, m: int, v: int, seconds: Seconds, transfer: Transfer) -> Ran:
    """Simulate the whole table of a schedule that is not in PERIODIC."""
    timeline = simulate(build(name, p, m, v), lambda action: seconds[action.op][action.stage], transfer)
    last = {
        span.action.stage: Last(float(span.start), float(span.end))
        for span in timeline.spans
        if span.action.microbatch == m - 1 and span.action.op in (Op.B, Op.W)
    }
    ends = [float(row[-1].end) for row in timeline.rows.values()]
    return Ran(ends, [float(timeline.busy(rank)) for rank in timeline.rows], last, len(timeline.spans))
