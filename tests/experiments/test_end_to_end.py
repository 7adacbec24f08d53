"""PTD-P's table 1 and figures 6 to 8: their points are the runs, and verdicts turn with the records."""

from collections.abc import Callable

import pytest

from experiments.ptdp2021 import bubble, end_to_end, microbatch_throughput
from harness.experiment.loading import load
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, PARTLY, YES, as_fast_as_printed, fast, simulated, verdicts

END, BUBBLE, MICRO = (load(f"ptdp2021/{name}") for name in ("end_to_end", "bubble", "microbatch_throughput"))


def table_1(factor: Callable[[Run], float] = lambda _: 1.0, device: str = A100) -> list[Record]:
    """The ten rows simulated to be as fast as printed, times a factor."""
    return as_fast_as_printed(end_to_end.FIGURE, factor, device=device)


def test_verdicts_on_table_1_turn() -> None:
    assert verdicts(END, table_1()) == [YES] * 3
    assert verdicts(END, table_1(device="Tesla V100")) == [YES, YES, ABSENT]
    assert verdicts(END, table_1(lambda run: 0.5 if run.plan.pp > 1 else 1.0)) == [NO, NO, NO]
    assert verdicts(END, table_1(lambda run: 1.2 if run.plan.pp == 35 else 1.0)) == [YES, PARTLY, PARTLY]
    small = [fast(run, 1e9 * (1 + run.model.num_layers)) for run in END.runs["small"]]
    assert verdicts(END, small) == [ABSENT, ABSENT, ABSENT]


def figure_6(of: Callable[[Run, float], float] = lambda _, bubble: bubble) -> list[Record]:
    return [simulated(run, bubble=of(run, bubble.formula(run))) for run in BUBBLE.runs["paper"]]


def test_verdicts_on_bubbles_turn() -> None:
    assert verdicts(BUBBLE, figure_6()) == [YES, YES, YES]
    assert verdicts(BUBBLE, figure_6(lambda _, bubble: 2 - bubble)) == [NO, NO, NO]
    assert verdicts(BUBBLE, figure_6(lambda run, bubble: bubble * (1.5 if run.plan.dp == 1 else 1))) == [
        PARTLY, YES, YES
    ]  # fmt: skip
    flat = figure_6(lambda run, bubble: 0.5)
    assert verdicts(BUBBLE, flat)[1:3] == [NO, NO]
    assert BUBBLE.table is not None
    rows = BUBBLE.table(figure_6()).frame
    assert list(rows["simulated_bubble"]) == pytest.approx(list(rows["formula"]))


def test_figure_6_is_drawn() -> None:
    assert BUBBLE.figure is not None
    assert len(BUBBLE.figure(figure_6()).axes[0].lines) == 2 * len(bubble.CURVES)


def figure_7(factor: Callable[[int], float] = lambda _: 1.0) -> list[Record]:
    """As fast as printed, times a factor of the microbatch."""
    return as_fast_as_printed(microbatch_throughput.FIGURE, lambda run: factor(run.train.microbatch))


def test_figure_8_follows_from_figure_7() -> None:
    rows = microbatch_throughput.FIGURE.table(figure_7()).frame
    for batch in microbatch_throughput.BATCHES:
        assert list(rows[f"estimate_{batch}"]) == pytest.approx(list(rows[f"published_{batch}"]), rel=0.02)


def test_verdicts_on_microbatches_turn() -> None:
    assert verdicts(MICRO, figure_7()) == [YES] * 4
    assert verdicts(MICRO, figure_7(lambda b: 1 / b)) == [NO] * 4
    assert verdicts(MICRO, figure_7(lambda b: float(b) ** 2))[2:] == [NO, NO]  # the largest wins then
    small = verdicts(MICRO, [fast(run, 1e9 * run.train.microbatch**0.1) for run in MICRO.runs["small"]])
    assert small[0] == YES
