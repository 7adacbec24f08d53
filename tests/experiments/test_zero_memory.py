"""ZeRO's table 1, figure 1 and table 2: the formulas reproduce them, and verdicts turn with what was counted."""

import pytest

from experiments.zero2019 import STAGES, zero_max_model_size
from experiments.zero2019.zero_max_model_size import DEEPEST, LIMIT, MEASURED, MORE, deep, on_v100s
from harness.experiment.experiment import Experiment
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.predict.memory import predicted
from impl.cost.parameters import count_parameters
from tests.experiments import as_printed
from tests.experiments.as_printed import ABSENT, NO, YES, counted, simulated
from tests.experiments.as_printed import turned as verdicts
from tests.harness.made_up_records import record_of

MEMORY, LARGEST = load("zero_memory"), load("zero_max_model_size")


@pytest.mark.parametrize("experiment", [MEMORY, LARGEST])
def test_what_is_as_predicted_is_reproduced(experiment: Experiment) -> None:
    records = [counted(run) for run in experiment.runs["small"]]
    assert set(verdicts(experiment, records)) - {ABSENT} == {YES}
    assert experiment.table is not None
    rows = experiment.table(records).frame
    assert list(rows["memory_bytes"].dropna()) == list(rows["predicted_memory_bytes"].dropna())
    assert len(rows["memory_bytes"].dropna()) == len(records)
    assert verdicts(experiment, [record_of(run) for run in experiment.runs["smoke"]])[:1] == [ABSENT]  # older ones


def test_published_numbers_stand_beside_the_formulas() -> None:
    for experiment, columns in ((MEMORY, "formula_states_bytes"), (LARGEST, "formula")):
        assert experiment.table is not None
        rows = experiment.table([counted(experiment.runs["smoke"][0])]).frame.dropna(subset="published")
        assert len(rows) == (58 if experiment is MEMORY else 20)
        for row in rows.to_dict("records"):
            assert row[columns] == pytest.approx(row["published"], rel=0.03)  # 512 billion are printed as 0.5T
            if experiment is MEMORY:  # where the last digit is rounded, or cut off
                digit = 1e9 * 10 ** -len(f"{row['published'] / 1e9:.4g}".partition(".")[2])
                assert abs(row[columns] - row["published"]) < digit


def test_verdicts_on_memory_turn() -> None:
    runs = MEMORY.runs["smoke"]
    assert verdicts(MEMORY, [counted(run, times=1.5) for run in runs]) == [YES, YES, NO]
    records = [counted(run) for run in runs]
    for rank in records[2].ranks:
        assert rank.memory is not None
        rank.memory["gradients"] *= 2
    assert verdicts(MEMORY, records) == [NO, NO, NO]


def test_verdicts_on_the_largest_model_turn() -> None:
    runs = LARGEST.runs["smoke"]
    assert verdicts(LARGEST, [counted(run, times=2) for run in runs])[0] == NO
    records = [counted(run) for run in runs]
    for rank in records[2].ranks:  # stage 1 with the fewest layers
        assert rank.memory is not None
        rank.memory["optimizer"] += int(LIMIT)
    assert verdicts(LARGEST, records)[:2] == [NO, ABSENT]


def test_the_deepest_models_are_those_that_are_predicted_to_fit() -> None:
    for (tp, stage), layers in DEEPEST.items():
        runs = [deep(layers + more, tp, stage) for more in (0, 1, MORE)]
        sizes = [max(rank.total for rank in predicted(run, 257, "cpu")) for run in runs]
        assert [size <= LIMIT for size in sizes] == [True, False, False]


def test_the_papers_measured_models_have_its_sizes_and_can_be_laid_out() -> None:
    rows = [row for row in published("zero2019").to_dict("records") if "measured" in row["quantity"]]
    assert len(rows) == len(LARGEST.runs["paper"]) == 10
    for row in rows:
        stage = STAGES[int(row["quantity"].rpartition("_")[2])]
        billions, hidden = MEASURED[stage][row["tp"]]
        run = on_v100s(billions, hidden, row["tp"], stage)
        assert run in LARGEST.runs["paper"]
        assert count_parameters(run.model) / 1e9 == pytest.approx(row["value"], rel=0.1)


def test_models_that_were_trained_are_held_against_what_is_predicted_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters fit as were trained; then, by the real formulas, up to half as many again and more."""
    of = lambda memory: [simulated(run, memory=memory) for run in LARGEST.runs["paper"]]
    assert as_printed.verdicts(LARGEST, of(27e9)) == [ABSENT, ABSENT, YES, NO]
    assert as_printed.verdicts(LARGEST, of(35e9))[2] == NO
    assert LARGEST.table is not None
    rows = LARGEST.table(of(27e9)).frame
    printed = rows.dropna(subset="trained")
    assert len(printed) == 10
    for row in printed.to_dict("records"):
        assert row["trained"] < row["predicted"] < row["formula"]
    monkeypatch.setattr(zero_max_model_size, "deepest", lambda run: run.model)
    assert as_printed.verdicts(LARGEST, of(27e9))[3] == YES


def test_verdicts_on_constant_buffers_turn() -> None:
    experiment = load("constant_buffers")
    records = [counted(run) for run in experiment.runs["small"]]
    assert verdicts(experiment, records) == [YES] * 3
    assert experiment.table is not None
    assert len(experiment.table(records).frame) == len(records)
    for record in records:
        for rank in record.ranks:
            assert rank.memory is not None
            rank.memory["buffers"] = 10**13 // record.run.plan.bucket_bytes // record.run.model.num_layers
    assert verdicts(experiment, records) == [NO] * 3
    paper = [simulated(run, memory=1e18 / run.plan.bucket_bytes) for run in experiment.runs["paper"]]
    assert as_printed.verdicts(experiment, paper) == [ABSENT, ABSENT, NO]
