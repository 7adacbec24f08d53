"""Tables of actions: complete, possible, with every transfer matched; what is no schedule is refused."""

from collections import Counter
from functools import cache
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.figures import timeline
from impl.errors import InputError
from impl.own_code import trust
from impl.pipeline.schedule import Action, Op, Schedule, forward_only, lower, peak_in_flight
from impl.pipeline.schedules import SCHEDULES, build, check, ranks_of, require

GRID = [(p, m, v) for p in range(1, 9) for m in range(1, 17) for v in range(1, 5)]
V_SHAPED = ("zbv", "v_half", "v_min", "dualpipe_v")


def takes(name: str, p: int, m: int, v: int) -> bool:
    if name in V_SHAPED:
        return v == 2 and (m >= 2 * p or name != "dualpipe_v")
    return m % p == 0 if name == "interleaved" else v == 1


VALID = [(name, *sizes) for name in SCHEDULES for sizes in GRID if takes(name, *sizes)]
SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}

cached = cache(build)


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def table(*rows: str) -> Schedule:
    return Schedule("mine", tuple(map(actions, rows)))


def rendezvous(rows: list[list[Action]], rank_of: dict[int, int]) -> int:
    """Run the rows with sends that wait for their receives; the number of actions that were left over."""
    heads = [list(reversed(row)) for row in rows]
    moved = True
    while moved:
        moved = False
        for row in heads:
            while row and row[-1].op not in ("sF", "rF", "sB", "rB"):
                row.pop()
                moved = True
            if row and row[-1].op in SENDS:
                op, stage, microbatch = row[-1]
                receive, step = SENDS[op]
                other = heads[rank_of[stage + step]]
                if other and other[-1] == (receive, stage + step, microbatch):
                    row.pop()
                    other.pop()
                    moved = True
    return sum(map(len, heads))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_goes_once_through_every_stage(name: str):
    for _, p, m, v in (case for case in VALID if case[0] == name):
        require(name, p, m, v)
        found = Counter(chain.from_iterable(cached(name, p, m, v).rows))
        ops = "FIW" if cached(name, p, m, v).is_split else "FB"
        if name != "dualpipe_v":  # splits some backward passes
            assert found == Counter((op, stage, i) for op in ops for stage in range(p * v) for i in range(m))
        across = range(p)
        dealt = [*across, *reversed(across)] if name in V_SHAPED else [*across] * v
        assert cached(name, p, m, v).rank_of == dict(enumerate(dealt))
        assert ranks_of(name, p, m, v) == tuple(dealt)


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_are_matched_in_order_and_no_rank_waits_for_ever(name: str):
    for _, p, m, v in (case for case in VALID if case[0] == name):
        schedule = cached(name, p, m, v)
        rows = lower(schedule)
        sent: dict[tuple[int, int], list[Action]] = {}
        received: dict[tuple[int, int], list[Action]] = {}
        for rank, row in enumerate(rows):
            for a in row:
                if a.op in SENDS:
                    receive, step = SENDS[a.op]
                    mate = Action(receive, a.stage + step, a.microbatch)
                    sent.setdefault((rank, schedule.peer(a)), []).append(mate)
                elif a.op in (Op.RECV_F, Op.RECV_B):
                    received.setdefault((schedule.peer(a), rank), []).append(a)
            assert [a for a in row if a.op in "FBIW"] == list(schedule.rows[rank])
            place = {action: i for i, action in enumerate(row)}
            for a in schedule.rows[rank]:  # what is read has arrived, what is sent is there
                for need in schedule.needs(a):
                    arrival = Action(Op.RECV_F if need.op is Op.F else Op.RECV_B, a.stage, a.microbatch)
                    assert place[arrival if schedule.transfers.get(need) == a else need] < place[a]
                if a in schedule.transfers:
                    sent_as = Action(Op.SEND_F if a.op is Op.F else Op.SEND_B, a.stage, a.microbatch)
                    assert place[sent_as] == place[a] + 1
        assert sent == received
        borders = p * v - 1 - (name in V_SHAPED)  # the last rank hands a microbatch to itself
        assert sum(map(len, sent.values())) == (2 * borders * m if p > 1 else 0)
        assert rendezvous(rows, schedule.rank_of) == 0


def test_the_papers_tables():
    """PTD-P figures 3 and 4, zero bubble figure 2 (top), at p = 4 and m = 8, counted from 0."""
    chunks = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2, "zb_h1": 1}
    shown = {name: timeline.actions(build(name, 4, 8, v)) for name, v in chunks.items()}
    text = {name: [" ".join(row) for row in rows] for name, rows in shown.items()}
    forwards, backwards = (" ".join(f"{{0}}{op}{i}" for i in range(8)) for op in "FB")
    assert text["gpipe"] == [f"{forwards} {backwards}".format(rank) for rank in range(4)]
    assert text["one_f_one_b"][0] == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    assert text["one_f_one_b"][3] == " ".join(f"3F{i} 3B{i}" for i in range(8))
    assert text["interleaved"][0].startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2")
    assert text["interleaved"][3].startswith("3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1")
    assert text["zb_h1"][0].startswith("0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5")
    assert text["zb_h1"][3].startswith("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5")
    assert text["zb_h1"][3].endswith("3F7 3I7 3W4 3W5 3W6 3W7")


@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (4, 2), (1, 3)])
def test_evaluation_passes_forward_once_through_every_stage(p: int, v: int):
    schedule = build("interleaved", p, 2 * p, v)
    evaluated = forward_only(schedule)
    assert Counter(chain.from_iterable(evaluated.rows)) == Counter(Action(Op.F, stage, 0) for stage in range(p * v))
    assert rendezvous(lower(evaluated), schedule.rank_of) == 0
    assert schedule.stages_of(p - 1) == list(range(p - 1, p * v, p))
    assert (schedule.transfers == {}) == (p == 1)


def test_receives_stand_where_the_transfer_would_arrive():
    """Before the action of the receiver in whose time it is sent: posted early, with no later send held up by it."""
    rows = [" ".join(map(str, row)) for row in lower(build("one_f_one_b", 2, 3))]
    assert rows[0] == "0F0 0sF0 0F1 0sF1 0rB0 0B0 0F2 0sF2 0rB1 0B1 0rB2 0B2"
    assert rows[1] == "1rF0 1rF1 1F0 1B0 1sB0 1F1 1rF2 1B1 1sB1 1F2 1B2 1sB2"


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("interleaved", 4, 6, 2), "multiples of plan.pp 4 microbatches, not 6; valid: 4 or 8"),
        (("interleaved", 4, 3, 2), "not 3; valid: 4$"),
        (("one_f_one_b", 4, 8, 2), "has 1 chunk a rank, not plan.chunks 2; with chunks: interleaved, zbv"),
        (("gpipe", 0, 8), "plan.pp 0 is not a count; valid: 1 or more"),
        (("gpipe", 2, 0), "microbatches 0 is not"),
        (("interleaved", 2, 2, -1), "plan.chunks -1 is not"),
        (("1f1b", 2, 2), f"'1f1b' does not exist; valid: {', '.join(SCHEDULES)}, module:name, FILE.py:name"),
        (("impl.nowhere:mine", 2, 2), "cannot be loaded: No module named"),
        (("impl.errors:mine", 2, 2), "cannot be loaded: module 'impl.errors' has no attribute 'mine'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(numbers: tuple, message: str):
    trust(numbers[0])
    for function in (build, require):
        with pytest.raises(InputError, match=message):
            function(*numbers)


@pytest.mark.parametrize(
    ("rows", "v", "message"),
    [
        (["0F0 0B0", "1F0"], 1, "stage 1, microbatch 0 has F; valid: F B, or F I W"),
        (["0F0 0B0", "1F0 1B0 1W0"], 1, "stage 1, microbatch 0 has F B W"),
        (["0F0 0B0", "1F0 1I0"], 1, "stage 1, microbatch 0 has F I"),
        (["0F0 0B0", ""], 1, "stage 1, microbatch 0 has nothing"),
        (["0F0 0F0 0B0", "1F0 1B0"], 1, "0F0 is there twice"),
        (["0F0 0B0 1B0", "1F0"], 1, "stage 1 is on ranks 0 and 1"),
        (["0F0 0B0", "1F0 1B0", ""], 1, r"its ranks have \[1, 1, 0\] stages; valid: \[1, 1\]"),
        (["0F0 1F0 2F0 2B0 1B0 0B0", "3F0 3B0"], 2, r"its ranks have \[3, 1\] stages; valid: \[2, 2\]"),
        (["0F0 0B0", "1F0 1B0 1F1"], 1, "1F1 on rank 1; valid: F, B, I, W of stages 0 to 1, microbatches 0 to 0"),
        (["0F0 0sF0 0B0", "1F0 1B0"], 1, "0sF0 on rank 0"),
        (["0F0 0B0", "1B0 1F0"], 1, "cannot run: rank 0 is stuck at 0B0, which needs 1B0; rank 1 is stuck at 1B0, wh"),
        (["0F0 0W0 0I0", "1F0 1B0"], 1, "cannot run: rank 0 is stuck at 0W0, which needs 0I0$"),
    ],
)
def test_a_table_that_is_no_schedule_is_told(rows: list[str], v: int, message: str):
    with pytest.raises(InputError, match=message):
        check(table(*rows), 2, 1, v)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["gpipe", "zb_h1"]))
def test_a_shuffled_table_runs_or_is_refused(random, p: int, m: int, name: str):
    rows = [random.sample(row, len(row)) for row in build(name, p, m).rows]
    schedule = Schedule("shuffled", tuple(map(tuple, rows)))
    done: set[Action] = set()
    heads = [list(reversed(row)) for row in rows]
    while ready := [row for row in heads if row and done.issuperset(schedule.needs(row[-1]))]:
        done.add(ready[0].pop())
    if any(heads):
        with pytest.raises(InputError, match="cannot run") as refused:
            lower(schedule)
        assert [str(row[-1]) in str(refused.value) for row in heads if row] == [True] * sum(map(bool, heads))
    else:
        assert rendezvous(lower(schedule), schedule.rank_of) == 0


def test_a_schedule_may_live_in_any_module_that_is_trusted():
    name = "impl.pipeline.schedules:gpipe"
    for function in (build, require):
        with pytest.raises(InputError, match="schedules:gpipe' is named by data, so it is not loaded"):
            function(name, 2, 3)
    trust(name)
    assert build(name, 2, 3).rows == build("gpipe", 2, 3).rows


def test_actions_are_written_and_read():
    every = [Action(op, 12, 3) for op in Op]
    assert [Action.parse(str(action)) for action in every] == every
    assert str(Action(Op.F, 0, 3)) == "0F3"
    for text in ("", "F3", "0F", "0X1", "0F3 "):
        with pytest.raises(InputError, match="is not an action"):
            Action.parse(text)


def test_an_activation_is_held_from_forward_to_the_end_of_backward():
    assert peak_in_flight(actions("0F0 0F1 0B0 0F2 0B1 0B2")) == 2
    assert peak_in_flight(actions("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2")) == 3
    assert peak_in_flight(actions("0F0 0rF1 0sF0 0B0")) == 1
