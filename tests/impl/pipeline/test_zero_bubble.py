"""Tables of ZB-H2 and of schedules whose model is a V: PyTorch's own, and the bubbles and memory of their papers."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from impl.errors import InputError
from impl.pipeline.schedule import Action, Op
from impl.pipeline.schedules import build, require
from impl.pipeline.simulate import Number, Timeline, simulate, uniform

CHUNKS = {"zb_h2": 1, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}
GRID = [(p, m) for p in range(1, 9) for m in range(1, 3 * p + 1)]
OPS = {
    theirs._ComputationType.FORWARD: Op.F,
    theirs._ComputationType.FULL_BACKWARD: Op.B,
    theirs._ComputationType.BACKWARD_INPUT: Op.I,
    theirs._ComputationType.BACKWARD_WEIGHT: Op.W,
}


@cache
def ran(name: str, p: int, m: int) -> Timeline:
    """The table with T_F = T_B = T_W = 1 for each chunk."""
    v = CHUNKS[name]
    return simulate(build(name, p, m, v), uniform(v, v, v, chunks=v))


def idle(name: str, p: int, m: int) -> Number:
    """What a step takes beyond a rank's work."""
    timeline = ran(name, p, m)
    assert {timeline.busy(rank) for rank in range(p)} == {3 * CHUNKS[name] * m}
    return timeline.step_time - 3 * CHUNKS[name] * m


def in_flight(name: str, p: int, m: int) -> list[Fraction]:
    return [ran(name, p, m).microbatches_in_flight(rank) for rank in range(p)]


def flat(actions: Iterable[theirs._Action | None]) -> Iterator[Action]:
    for action in actions:
        if action is not None and action.sub_actions:
            yield from flat(action.sub_actions)
        elif action is not None:
            assert action.microbatch_index is not None
            yield Action(OPS[action.computation_type], action.stage_index, action.microbatch_index)


@pytest.mark.parametrize(
    ("name", "kind"), [("zbv", theirs.ScheduleZBVZeroBubble), ("dualpipe_v", theirs.ScheduleDualPipeV)]
)
def test_a_v_is_pytorchs_action_by_action(name: str, kind: type):
    for p, m in GRID:
        if name == "zbv" or m >= 2 * p:
            sizes = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
            expected = [tuple(flat(kind._calculate_single_rank_operations(sizes, rank))) for rank in range(p)]
            assert list(build(name, p, m, 2).rows) == expected


def test_zero_bubble_is_idle_only_before_the_first_and_after_the_last_action():
    """Zero bubble, section 2.2: 2p - 1 microbatches on every rank; ZB-V holds p. One chunk of ZB-V is half a rank's."""
    for p, m in GRID:
        if m >= 2 * p - 1:
            for name, held in (("zb_h2", 2 * p - 1), ("zbv", p)):
                assert idle(name, p, m) == p - 1
                assert in_flight(name, p, m) == [held] * p
                for rank, row in ran(name, p, m).rows.items():
                    assert row[0].start == rank
                    assert row[-1].end == 3 * CHUNKS[name] * m + rank
        assert max(in_flight("zb_h2", p, m)) == min(2 * p - 1, m)
        assert max(in_flight("zbv", p, m)) == min(p, m)


def test_half_and_a_third_of_1f1bs_memory_at_half_and_two_thirds_of_its_bubble():
    """Qi et al. 2024: (p + 2) // 2 and (p + 4) // 3 microbatches, bubbles of about p / 2m and 2p / 3m to 1F1B's p / m.

    Those are at T_F = T_B = T_W, as shares of the step; 1F1B is idle for 6 (p - 1) passes of half a rank's layers.
    """
    for p, m in GRID:
        assert max(in_flight("v_half", p, m)) <= (p + 2) // 2
        assert max(in_flight("v_min", p, m)) <= (p + 4) // 3
        if m >= p > 1:
            assert max(in_flight("v_half", p, m)) == (p + 2) // 2
            assert max(in_flight("v_min", p, m)) == (p + 4) // 3
            assert idle("v_half", p, m) == 3 * (p - 1) - p % 2
            assert idle("v_min", p, m) == (4 * p - 5 if p % 3 else 4 * p - 3)
            assert idle("v_half", p, m) <= 3 * p
            assert idle("v_min", p, m) <= 4 * p


def test_dualpipe_v_holds_half_a_microbatch_more_than_1f1b():
    """DeepSeek's table has PP + 1 at most. With equal times it is idle as ZB-V is."""
    for p, m in GRID:
        if m >= 2 * p:
            assert in_flight("dualpipe_v", p, m) == [p + Fraction(1, 2)] * p
            assert idle("dualpipe_v", p, m) == p - 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        *(((name, 2, 4, v), f"{name} has 2 chunks a rank, not plan.chunks {v}; valid: --plan.chunks 2$")
          for name in CHUNKS if name != "zb_h2" for v in (1, 3)),
        (("zb_h2", 2, 4, 2), "zb_h2 has 1 chunk a rank, not plan.chunks 2; with chunks: interleaved, zbv, v_half"),
        (("dualpipe_v", 2, 3, 2), "dualpipe_v takes 4 microbatches or more with plan.pp 2, not 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(numbers: tuple, message: str):
    for function in (build, require):
        with pytest.raises(InputError, match=message):
            function(*numbers)
