"""InternEvo's page as runs, and verdicts that turn."""

from collections.abc import Callable

from experiments.internevo2023.zero_within_nodes import EXPERIMENT, PAPER
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.flops import model_flops
from impl.cost.parameters import count_parameters
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, YES, fast, simulated, verdicts


def at(rate: Callable[[Run], float]) -> list[Record]:
    """The page's runs at a number of tokens per second and GPU."""
    flops = {run: model_flops("ptdp", run.model, 1) / run.model.seq_len for run in PAPER}
    return [simulated(run, rate(run) * flops[run]) for run in PAPER]


def test_rows_are_runs_of_7b_and_both_ways_are_one_on_a_node():
    assert list(PAPER) == EXPERIMENT.runs["paper"]
    assert len(PAPER) == len(published("internevo2023")) - 2
    assert {round(count_parameters(run.model) / 1e9, 1) for run in PAPER} == {7.3}
    assert {run.microbatches for run in PAPER} == {4}
    assert {run.plan.tp * run.plan.zero for run in PAPER if run.plan.replicas > 1} == {8}


def test_verdicts_of_the_paper_turn():
    assert verdicts(EXPERIMENT, at(lambda run: PAPER[run].printed["published_rate"])) == [YES] * 5
    assert verdicts(EXPERIMENT, at(lambda run: 1e4 * run.plan.zero + 1e2 * run.plan.world_size)) == [NO] * 5


def test_published_rates_stand_beside_others_in_the_table():
    assert EXPERIMENT.table is not None
    frame = EXPERIMENT.table(at(lambda run: 1000.0)).frame
    assert sorted(frame["published_rate"]) == sorted(one.printed["published_rate"] for one in PAPER.values())


def test_small_runs_only_tell_whether_copies_are_faster():
    small = EXPERIMENT.runs["smoke"]
    for factor, verdict in ((2.0, YES), (0.5, NO)):
        found = [fast(run, 1e9 * (factor if run.plan.replicas > 1 else 1.0)) for run in small]
        assert verdicts(EXPERIMENT, found) == [verdict, *[ABSENT] * 4]
