"""Shortest step that any pipeline schedule can have, whatever its order: what no table goes below."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from impl.errors import InputError
from impl.pipeline.schedule import Action, Op, Schedule, peak_in_flight
from impl.pipeline.simulate import Cost, Number


@dataclass(frozen=True)
class Problem:
    """Passes of a step, where they are computed, how long they take, and how many activations a rank may hold.

    A backward pass that is not split is the gradient of the input and then that of the weights, so what holds for all
    split schedules holds for the others too.
    """

    rank_of: tuple[int, ...]
    """Rank of each stage."""
    microbatches: int
    cost: Cost
    transfer: Number
    """Seconds from one rank to another."""
    most: int
    """Largest number of activations, each of one microbatch in one stage, that a rank holds at once."""

    def __post_init__(self) -> None:
        if self.most < (needed := max(len(self.stages_of(rank)) for rank in self.ranks)):
            raise InputError(
                f"a rank may hold {self.most} activations, and has {needed} stages; valid: {needed} or more"
            )

    @classmethod
    def of(cls, schedule: Schedule, cost: Cost, transfer: Number = 0) -> "Problem":
        """Return the problem that a schedule solves, with its fullest rank's number of activations."""
        rank_of = tuple(schedule.rank_of[stage] for stage in range(len(schedule.rank_of)))
        microbatches = 1 + max(action.microbatch for action in schedule.rows[0])
        return cls(rank_of, microbatches, cost, transfer, max(map(peak_in_flight, schedule.rows)))

    @property
    def ranks(self) -> range:
        return range(max(self.rank_of) + 1)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def seconds(self, op: Op) -> list[Number]:
        """Return the time of an operation on every stage."""
        return [self.cost(Action(op, stage, 0)) for stage in range(len(self.rank_of))]

    @cached_property
    def hops(self) -> list[Number]:
        """Seconds from each stage to the next one."""
        return [self.transfer if one != other else 0 for one, other in pairwise(self.rank_of)]


def lower_bound(problem: Problem) -> Number:
    """Return a time below which no step can be; the largest of what each rank needs at least.

    A rank cannot begin before the first microbatch arrives; then it has its passes to do, and after its last input
    gradient that has to go back to the first stage. Before its first input gradient it can only do forward passes, as
    many as it may hold (the zero-bubble paper's appendix B counts so for one chunk). And every activation is held
    until its microbatch has come back: no more than `most` at once.
    """
    f, i, w = (problem.seconds(op) for op in (Op.F, Op.I, Op.W))
    m, most, last = problem.microbatches, problem.most, len(f) - 1
    into = list(accumulate((f[stage] + hop for stage, hop in enumerate(problem.hops)), initial=0))
    returns = (i[last - n] + hop for n, hop in enumerate(problem.hops[::-1]))
    back = list(accumulate(returns, initial=into[last] + f[last]))[::-1]
    ends = [w[0]]  # from the end of a stage's input gradient to the end of the step
    for stage, hop in enumerate(problem.hops):
        ends.append(max(w[stage + 1], hop + i[stage] + ends[stage]))
    found = [back[0] + i[0] + ends[0]]
    for own in map(problem.stages_of, problem.ranks):
        passes = m * sum(f[stage] + i[stage] for stage in own)
        whole = passes + m * sum(w[stage] for stage in own)
        rest = max(whole, passes + min(ends[stage] for stage in own))
        start = min(into[stage] for stage in own)
        before = min(most, m * len(own)) * max(f[stage] for stage in own)
        held = [back[stage] + i[stage] + w[stage] - into[stage] for stage in own]
        found += [start + rest, back[max(own)] + rest - before, start + m * sum(held) / most]
        found += [into[stage] + -(-m // most) * one for stage, one in zip(own, held, strict=True)]
    return max(found)
