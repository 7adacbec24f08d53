"""Start and end of every action of a schedule, given the cost of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from impl.pipeline.schedule import Action, Op, Schedule, peak_in_flight

Number = float | Fraction
"""Seconds; with fractions every result is exact."""
Cost = Callable[[Action], Number]
Transfer = Number | Callable[[int, int], Number]
"""Seconds from one rank to another: a constant, or a function of (sender, receiver)."""


class Span(NamedTuple):
    """Action with its time on a rank, in seconds."""

    rank: int
    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """Spans of one step's computation on every pipeline rank, simulated or measured."""

    spans: tuple[Span, ...]

    @cached_property
    def rows(self) -> dict[int, list[Span]]:
        """Spans of each rank, by start."""
        rows: dict[int, list[Span]] = {rank: [] for rank in sorted({span.rank for span in self.spans})}
        for span in self.spans:
            rows[span.rank].append(span)
        return {rank: sorted(row, key=lambda span: span.start) for rank, row in rows.items()}

    @cached_property
    def start(self) -> Number:
        return min(span.start for span in self.spans)

    @cached_property
    def step_time(self) -> Number:
        """Time from the first start to the last end on any rank."""
        return max(span.end for span in self.spans) - self.start

    def busy(self, rank: int) -> Number:
        """Return the seconds that a rank computes: its ideal time."""
        return sum(span.end - span.start for span in self.rows[rank])

    def bubble_of(self, rank: int) -> Number:
        """Return a rank's idle time over its ideal time."""
        return self.step_time / self.busy(rank) - 1

    @property
    def bubble(self) -> Number:
        """Bubble fraction: idle time over ideal time, all ranks together.

        Source: PTD-P (2104.04473), section 2.2.1. The zero-bubble paper divides by the step time: b / (1 + b) of this.
        """
        return len(self.rows) * self.step_time / sum(map(self.busy, self.rows)) - 1

    def peak_in_flight(self, rank: int) -> int:
        """Return the most activations, of one microbatch in one stage each, that a rank holds at once."""
        return peak_in_flight(span.action for span in self.rows[rank])

    def microbatches_in_flight(self, rank: int) -> Fraction:
        """Return `peak_in_flight` in microbatches through all the rank's chunks, the unit of activation memory."""
        return Fraction(self.peak_in_flight(rank), len({span.action.stage for span in self.rows[rank]}))

    def as_rows(self) -> list[list[list[Any]]]:
        """Return [action, start, end] of each rank's spans, as stored in a record; seconds from the first start."""
        return [
            [[str(span.action), float(span.start - self.start), float(span.end - self.start)] for span in row]
            for row in self.rows.values()
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Sequence[Any]]]) -> "Timeline":
        """Return the timeline that `as_rows` was made from.

        Raises:
            InputError: a text is not an action.
        """
        spans = (Span(r, Action.parse(text), start, end) for r, row in enumerate(rows) for text, start, end in row)
        return cls(tuple(spans))


def uniform(forward: Number = 1, input_gradient: Number = 1, weight_gradient: Number = 1, *, chunks: int = 1) -> Cost:
    """Return costs where every rank's share of the model costs the same, and each of its chunks an equal part of it.

    By default a backward pass takes twice a forward pass, as in the papers' figures, in exact fractions.
    """
    backward = input_gradient + weight_gradient
    whole = {Op.F: forward, Op.B: backward, Op.I: input_gradient, Op.W: weight_gradient}
    seconds: Mapping[Op, Number] = {op: Fraction(1, chunks) * time for op, time in whole.items()}
    return lambda action: seconds[action.op]


def simulate(schedule: Schedule, cost: Cost, transfer: Transfer = 0) -> Timeline:
    """Return the earliest times: an action starts when its rank is free and what it needs has arrived.

    A link carries one transfer at a time in each direction, in the order in which they are sent; sending and
    receiving take no time of the ranks. Transfers between stages of one rank take no time.

    Raises:
        InputError: the schedule cannot run.
    """
    links = {link for _, link in schedule.flow if link is not None}
    delay = {link: transfer(*link) if callable(transfer) else transfer for link in links}
    free: dict[tuple[int, int], Number] = dict.fromkeys(links, 0)
    clock: list[Number] = [0] * len(schedule.rows)
    arrival: list[Number] = []
    spans: list[Span] = []
    for (rank, action), (awaited, link) in zip(schedule.order, schedule.flow, strict=True):
        start = clock[rank]
        if awaited is not None and arrival[awaited] > start:
            start = arrival[awaited]
        end = clock[rank] = start + cost(action)
        spans.append(Span(rank, action, start, end))
        if link is not None:
            end = free[link] = max(end, free[link]) + delay[link]
        arrival.append(end)
    return Timeline(tuple(spans))
