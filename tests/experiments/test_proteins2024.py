"""Compute-optimal protein models: verdicts turn with made-up best sizes and losses."""

import math
from collections.abc import Callable
from dataclasses import replace

from experiments.proteins2024 import compute_optimal as experiment
from harness.analysis.isoflop import budget
from harness.records.record import Record
from tests.experiments.as_printed import ABSENT, NO, OPEN, YES, judged
from tests.experiments.test_stability import records
from tests.harness.made_up_records import FLOOR

NAME = "proteins2024/compute_optimal"


def made(powers: dict[str, float], noise: float = 0.0, over: float = 1.0) -> list[Record]:
    """Records whose best size grows from 5,000 weights on with these powers; `noise` moves it from budget to budget."""
    least = {family: 5e9 * experiment.MORE[family] for family in powers}
    losses: dict[str, float] = {}
    for one in records(lambda _: 2.0, NAME):
        run, family = one.run, one.run.model.family
        grown = (budget(one) / least[family]) ** powers[family]
        best = 5e3 * grown * math.exp(noise * (-1) ** round(math.log2(budget(one) / least[family])))
        losses[run.id] = FLOOR + over + 0.1 * math.log(run.model.active_weights / best) ** 2
    return records(lambda run: losses[run.id] - 0.001 * run.seed, NAME)


def verdicts(found: list[Record]) -> list[str]:
    return judged(experiment.EXPERIMENT.claims, found)


def test_verdicts_turn() -> None:
    assert verdicts(made({"gpt": 0.6, "bert": 0.7})) == [YES] * 5
    assert verdicts(made({"gpt": 0.45, "bert": 0.3})) == [NO, NO, NO, NO, YES]
    assert verdicts(made({"gpt": 0.62, "bert": 0.65}, noise=0.4))[:3] == [OPEN] * 3
    assert verdicts(made({"gpt": 0.6, "bert": 0.7}, over=-0.2))[4] == NO
    assert verdicts([]) == [ABSENT] * 5


def test_without_masked_models_only_causal_ones_are_judged() -> None:
    causal = [one for one in made({"gpt": 0.6, "bert": 0.7}) if one.run.model.family == "gpt"]
    assert verdicts(causal) == [ABSENT, YES, ABSENT, ABSENT, YES]


def test_budgets_are_equal_for_all_sizes_and_each_is_twice_the_one_before() -> None:
    by_family: dict[str, set[float]] = {"gpt": set(), "bert": set()}
    for one in records(lambda _: 2.0, NAME):
        by_family[one.run.model.family].add(budget(one))
    assert sorted(by_family["gpt"]) == [5e9, 1e10, 2e10, 4e10]
    assert sorted(by_family["bert"]) == [4e10, 8e10, 1.6e11, 3.2e11]


def test_the_floor_of_masked_tokens_is_that_of_known_families() -> None:
    """Masked losses may be below the text's code length, causal ones may not."""
    found: Callable[[str], list[Record]] = lambda family: [
        one for one in made({"gpt": 0.6, "bert": 0.7}, over=-0.1) if one.run.model.family == family
    ]
    lower = [with_known_families(one, FLOOR - 0.5) for one in found("bert")]
    assert verdicts(lower)[4] == YES
    assert verdicts([with_known_families(one, FLOOR - 0.5) for one in found("gpt")])[4] == NO


def with_known_families(one: Record, nats: float) -> Record:
    data = one.resolved.data
    assert data is not None
    assert data.entropy is not None
    return replace(
        one, resolved=replace(one.resolved, data=replace(data, entropy=replace(data.entropy, nats_per_token=nats)))
    )


def test_table_and_figure_show_every_budget() -> None:
    found = made({"gpt": 0.6, "bert": 0.7})
    table = experiment.EXPERIMENT.table
    assert table is not None
    assert len(table(found).frame) == 40
    drawn = experiment.EXPERIMENT.figure
    assert drawn is not None
    figure = drawn(found)
    assert [ax.get_title() for ax in figure.axes] == ["causal models", "masked models", "best size"]
