"""Zero bubble's tables 4 and 5: their rows are the runs, printed numbers stand beside ours, and verdicts turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments import zerobubble2024
from experiments.zerobubble2024 import PAPER, SCHEDULES
from harness.experiment.experiment import TIERS, Experiment
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.parameters import count_parameters
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, OPEN, PARTLY, YES, counted, fast, simulated, verdicts

THROUGHPUT, MEMORY = load("zerobubble2024/throughput"), load("zerobubble2024/memory")


@pytest.mark.parametrize("experiment", [THROUGHPUT, MEMORY])
def test_runs_are_pipelines_of_all_schedules(experiment: Experiment) -> None:
    schedules = {tier: {run.plan.schedule for run in experiment.runs[tier]} for tier in TIERS}
    some = {"small": SCHEDULES[:2]} if experiment is THROUGHPUT else {}
    assert schedules == {tier: set(some.get(tier, SCHEDULES)) for tier in TIERS}


def test_the_paper_tier_is_table_4() -> None:
    rows = published("zerobubble2024", "sample_rate_one_f_one_b").to_dict("records")
    runs = [run for run in THROUGHPUT.runs["paper"] if run.plan.schedule == "one_f_one_b"]
    assert len(runs) == len(rows) == 12
    for row, run in zip(rows, runs, strict=True):
        assert (run.plan.pp, run.plan.world_size) == (row["pp"], row["gpus"])
        assert run.train.global_batch == row["global_batch"]
        size = float(row["note"].partition("B:")[0])
        assert count_parameters(run.model) / 1e9 == pytest.approx(size, rel=0.03)


def of_paper(gain: Callable[[Run, float], float], bubble: float = 1.0) -> list[Record]:
    """Tables 4 and 7 simulated: the printed gains changed, and the printed bubbles so many times as large.

    ZB-H2's gain is that of ranks that all wait, where it is printed.
    """
    made = []
    for run, row in PAPER.items():
        flops = fast(run).flops_per_step() / run.train.global_batch
        printed = row.printed["published_gain"]
        gained = row.printed.get("published_synchronized", printed)
        rate = row.printed["published_rate"] / printed * (1.0 if printed == 1 else gain(run, gained)) * flops
        share = row.printed["published_bubble"] * bubble
        made.append(simulated(run, rate, bubble=share / (1 - share)))
    return made


def test_verdicts_on_throughput_turn() -> None:
    assert verdicts(THROUGHPUT, of_paper(lambda _, gain: gain)) == [YES] * 7
    slower = of_paper(lambda _, gain: 2 - gain)
    assert verdicts(THROUGHPUT, slower) == [NO, NO, NO, YES, YES, NO, NO]
    more = of_paper(lambda _, gain: gain + 0.1)
    assert verdicts(THROUGHPUT, more) == [YES, YES, NO, YES, YES, YES, NO]
    one = of_paper(lambda run, gain: 0.9 if run.plan.schedule == "zb_h1" and run.plan.pp == 32 else gain)
    assert verdicts(THROUGHPUT, one)[0] == PARTLY
    assert verdicts(THROUGHPUT, of_paper(lambda _, gain: gain, bubble=2.0))[3] == NO


@pytest.mark.parametrize(("error", "said"), [(0.01, YES), (0.02, OPEN)])
def test_the_error_of_a_step_is_one_of_its_bubble(error: float, said: str) -> None:
    records = of_paper(lambda _, gain: gain)
    for record in records:
        record.prediction = replace(record.prediction, own_sd=error)
    assert verdicts(THROUGHPUT, records)[3] == said


def test_other_times_of_passes_give_other_bubbles(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = of_paper(lambda _, gain: gain)
    longer = lambda one: one.printed | {"time_transfer": 1.1 * one.printed["time_transfer"]}
    changed = {run: replace(one, printed=longer(one)) for run, one in PAPER.items()}
    monkeypatch.setattr(zerobubble2024, "PAPER", changed)
    assert verdicts(THROUGHPUT, printed)[3:5] == [YES, NO]


def test_the_table_has_what_is_printed() -> None:
    assert THROUGHPUT.table
    rows = THROUGHPUT.table(of_paper(lambda _, gain: gain)).frame
    assert len(rows) == 36
    waits = rows["published_synchronized"].fillna(rows["published_gain"])
    assert list(rows["simulated_rate"] / rows["published_rate"]) == pytest.approx(list(waits / rows["published_gain"]))
    assert list(rows["simulated_gain"]) == pytest.approx(list(waits))
    assert list(rows["simulated_bubble"]) == pytest.approx(list(rows["published_bubble"]))


def test_gains_are_drawn_beside_the_published() -> None:
    assert THROUGHPUT.figure is not None
    [ax] = THROUGHPUT.figure(of_paper(lambda _, gain: gain)).axes
    assert len(ax.lines) == 2 * 4
    assert list(ax.lines[0].get_ydata()) == pytest.approx(list(ax.lines[1].get_ydata()))


def test_verdicts_on_counted_memory_turn() -> None:
    runs = [run for run in MEMORY.runs["small"] if run.plan.pp == 2]
    assert verdicts(MEMORY, [counted(run) for run in runs])[1:] == [YES, YES, ABSENT, ABSENT]
    of_zb_h1 = lambda run, times: counted(run, times if run.plan.schedule == "zb_h1" else 1.0)
    doubled = verdicts(MEMORY, [of_zb_h1(run, 3.0) for run in runs])
    assert (doubled[0], doubled[2]) == (NO, PARTLY)
    growing = [of_zb_h1(run, run.microbatches / 4) for run in runs]
    assert verdicts(MEMORY, growing)[1] == PARTLY


def test_verdicts_on_predicted_memory_turn() -> None:
    of = lambda run: PAPER[run].printed["published_memory"]
    as_printed = [simulated(run, memory=of(run)) for run in PAPER]
    assert verdicts(MEMORY, as_printed) == [YES, ABSENT, ABSENT, YES, YES]
    less = [simulated(run, memory=of(run) / 2) for run in PAPER]
    assert verdicts(MEMORY, less) == [YES, ABSENT, ABSENT, NO, YES]
    more = [simulated(run, memory=of(run) * (1.2 if run.plan.schedule == "zb_h2" else 1.0)) for run in PAPER]
    assert verdicts(MEMORY, more)[3:] == [PARTLY, NO]
    elsewhere = [simulated(run, memory=of(run), device="AMD") for run in PAPER]
    assert verdicts(MEMORY, elsewhere)[3] == ABSENT
    too_large = [simulated(run, memory=of(run), status="oom") for run in PAPER]
    # what is predicted counts, whether it fits or not
    assert verdicts(MEMORY, too_large) == [YES, ABSENT, ABSENT, YES, YES]
    assert as_printed[0].environment.device_name == A100
    assert MEMORY.table
    table = MEMORY.table(as_printed).frame
    assert list(table["held"]) == list(table["published_memory"])
