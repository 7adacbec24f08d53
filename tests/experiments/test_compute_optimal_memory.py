"""Memory of compute-optimal models: budgets are the inverse of the published laws, and verdicts turn."""

import pytest

from experiments.ours.compute_optimal_memory import BUDGETS, EXPERIMENT, Law, answers, number
from harness.predict.memory import predicted
from harness.records.record import Record
from impl.cost.parameters import count_parameters
from tests.experiments import as_printed
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, simulated
from tests.harness.made_up_records import record_of


@pytest.mark.parametrize(("name", "prefix"), [("Chinchilla's fit", "fit"), ("second fit", "refit")])
def test_a_budgets_best_model_has_that_budget(name: str, prefix: str) -> None:
    law = Law(*(number(f"{prefix}_{constant}") for constant in Law._fields))
    for flops in (1e20, 5.76e23):
        assert BUDGETS[name](law.optimum(flops)[0]) == pytest.approx(flops)


def test_chinchilla_has_20_tokens_a_parameter_and_a_node_holds_less() -> None:
    assert BUDGETS["20 tokens a parameter"](70e9) == pytest.approx(number("compute"), rel=0.03)
    assert max(one.printed["largest"] for one in answers()) == 80 * 2**30 / 2


def counted(times: float) -> list[Record]:
    records = [record_of(run) for run in EXPERIMENT.runs["small"]]
    for record in records:
        of = predicted(record.run, 257, "cpu")[0].as_dict()
        for rank in record.ranks:
            rank.peak_memory_bytes = 1
            rank.memory = {name: round(times * size) for name, size in of.items() if name not in ("total", "host")}
    return records


def test_verdicts_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_printed.verdicts(EXPERIMENT, counted(1.0)) == [YES, ABSENT, ABSENT]
    assert as_printed.verdicts(EXPERIMENT, counted(1.2))[0] in (NO, PARTLY)
    paper = [simulated(run, memory=2 * count_parameters(run.model)) for run in EXPERIMENT.runs["paper"]]
    assert as_printed.verdicts(EXPERIMENT, paper) == [ABSENT, YES, PARTLY]
    assert (
        as_printed.verdicts(EXPERIMENT, [simulated(run, memory=1e9) for run in EXPERIMENT.runs["paper"]])[1] == PARTLY
    )
    monkeypatch.setitem(BUDGETS, "Chinchilla's fit", BUDGETS["second fit"])
    assert as_printed.verdicts(EXPERIMENT, paper)[2] == YES
