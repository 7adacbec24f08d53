"""Frontier's experiments: their points are the paper's as far as it is known, and verdicts turn with the records."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from experiments.frontier2023 import models, recipes, scaling, search, sweeps
from harness.experiment.experiment import Experiment
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.predict.published_scaling import FITTED, MICROBATCH, STUDIES
from harness.records.record import Record
from harness.tune.search import shapley
from harness.tune.space import KNOBS, Space, spaces
from impl.cost.parameters import count_parameters
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, as_fast_as_printed, fast, simulated, verdicts

MODELS, RECIPES, SCALING, SEARCH = (load(f"frontier2023/{name}") for name in ("models", "recipes", "scaling", "search"))
MI250X = "AMD Instinct MI250X"


@pytest.mark.parametrize("experiment", [MODELS, RECIPES, SCALING, SEARCH])
def test_small_tiers_have_two_ranks(experiment: Experiment) -> None:
    assert max(run.plan.world_size for tier in ("smoke", "small") for run in experiment.runs[tier]) == 2


def needing(factor: float, memory: float = 50e9) -> list[Record]:
    """The four models simulated, with parameters and memory so many times as many."""
    records = [simulated(run, memory=memory * factor, device=MI250X) for run in MODELS.runs["paper"]]
    more = lambda resolved: replace(resolved, parameters=round(factor * resolved.parameters))
    return [replace(record, resolved=more(record.resolved)) for record in records]


def test_sizes_of_models_turn_with_their_parameters() -> None:
    assert verdicts(MODELS, needing(1.0)) == [YES, YES, YES]
    assert verdicts(MODELS, needing(1.005, memory=90e9)) == [YES, YES, NO]
    too_large = [replace(record, status="oom") for record in needing(1.0, memory=90e9)]
    assert verdicts(MODELS, too_large)[2] == NO
    assert verdicts(MODELS, needing(1.1))[:2] == [ABSENT, ABSENT]  # no published model has that size
    named = {run.model.num_layers: count_parameters(run.model) / 1e9 for run in MODELS.runs["paper"]}
    assert [round(size, 1) for size in named.values()] == [1.4, 22.1, 174.6, 1008.0]
    table = models.table(needing(1.0)).frame
    assert list(table["published_states"].dropna() / 1e9) == [14000]  # others are the formula's own product


def of_recipes(factor: Callable[[Run], float] = lambda _: 1.0, device: str = MI250X) -> list[Record]:
    """The three runs, simulated to be as fast as printed, times a factor."""
    return as_fast_as_printed(recipes.FIGURE, factor, device=device)


def test_recipes_are_the_launch_scripts() -> None:
    plans = [(run.plan.tp, run.plan.pp, run.plan.dp, run.plan.zero_stage) for run in RECIPES.runs["paper"]]
    assert plans == [(1, 8, 2, 0), (4, 16, 2, 1), (8, 64, 2, 1)]
    assert [run.train.global_batch for run in RECIPES.runs["paper"]] == [640, 640, 1600]
    rates = [one.printed["published_rate"] / recipes.PEAK for one in recipes.FIGURE.printed.values()]
    shares = published("frontier2023", "hardware_flop_utilization")["value"]
    assert rates == pytest.approx(list(shares / 100), abs=5e-4)


def test_verdicts_on_recipes_turn() -> None:
    assert verdicts(RECIPES, of_recipes()) == [YES, YES, YES]
    assert verdicts(RECIPES, of_recipes(device="NVIDIA A100")) == [ABSENT, YES, YES]
    is_largest = lambda run: run.plan.pp == 64
    assert verdicts(RECIPES, of_recipes(lambda run: 1.3 if is_largest(run) else 1.0)) == [PARTLY, PARTLY, PARTLY]
    assert verdicts(RECIPES, of_recipes(lambda _: 1.2)) == [NO, YES, YES]
    assert verdicts(RECIPES, of_recipes(lambda run: float(run.plan.pp)))[1] == NO


def of_scaling(kept: Callable[[str, Run], float]) -> list[Record]:
    """Every point simulated, its devices keeping a share of the rate."""
    points = [(study, kind, dp) for study in STUDIES for kind in MICROBATCH for dp in scaling.BETWEEN[study.model]]
    return [
        simulated(run, 40e12 * kept(kind, run), device=MI250X)
        for (_, kind, _), run in zip(points, SCALING.runs["paper"], strict=True)
    ]


def as_published(kind: str, run: Run) -> float:
    """All of the rate, or 1% less with each replica and the published share with the most."""
    if kind == "weak":
        return 1.0
    return {16: 0.89, 6: 0.87}.get(run.plan.dp, 1 - 0.01 * run.plan.dp)


def test_verdicts_on_scaling_turn() -> None:
    assert verdicts(SCALING, of_scaling(as_published)) == [YES] * 3
    worse = of_scaling(lambda kind, run: as_published(kind, run) ** 2)
    assert verdicts(SCALING, worse) == [NO, YES, YES]
    lost = of_scaling(lambda kind, run: 0.7 if kind == "weak" and run.plan.dp > 2 else as_published(kind, run))
    assert verdicts(SCALING, lost) == [YES, YES, NO]
    rising = of_scaling(lambda kind, run: 1 + 0.01 * run.plan.dp if kind == "strong" else 1.0)
    assert verdicts(SCALING, rising) == [NO, NO, NO]
    assert verdicts(SCALING, [fast(run, 1e9) for run in SCALING.runs["small"]])[0] == ABSENT
    table = scaling.table(of_scaling(as_published))
    assert len(table.frame) == 24
    assert sorted(table.frame["published"].dropna()) == [0.87, 0.87, 0.89, 0.89, 1, 1]
    assert any(note.startswith("Fitted") for note in table.notes)


def test_a_fitted_microbatch_has_no_verdict() -> None:
    failing = of_scaling(lambda kind, run: 0.5 if kind in FITTED else as_published(kind, run))
    assert verdicts(SCALING, failing) == [YES] * 3
    matching = of_scaling(lambda kind, run: as_published("strong", run) if kind in FITTED else 1.0)
    assert verdicts(SCALING, matching) == [NO] * 3


def test_shapley_values_are_exact() -> None:
    a, b = np.array([0.0, 1.0, 5.0]), np.array([0.0, 10.0])
    added = a[:, None] + b[None, :]
    expected = [abs(a - a.mean()).mean(), abs(b - b.mean()).mean()]
    assert shapley(added) == pytest.approx(expected)
    assert shapley(np.array([[0.0, 0.0], [0.0, 1.0]])) == pytest.approx([0.25, 0.25])  # neither counts for more
    assert shapley(np.broadcast_to(a[:, None], (3, 4)).copy())[1] == 0


def of_search(rate: Callable[[Run], float | None]) -> list[Record]:
    """The space simulated; what has no rate is out of memory."""
    return [
        simulated(run, rate(run) or 1e12, status="oom" if rate(run) is None else "ok", device=MI250X)
        for run in SEARCH.runs["paper"]
    ]


def plain(run: Run) -> float:
    """A rate that has the paper's order: microbatch first, few ranks to a layer, few stages, many microbatches."""
    plan = run.plan
    points = 10 * run.train.microbatch - plan.tp - plan.pp / 4 + run.microbatches / 10 - plan.zero_stage / 100
    return 1e12 * (points + 20)


def test_the_space_is_whole() -> None:
    runs = SEARCH.runs["paper"]
    knobs = [(r.plan.tp, r.plan.pp, r.train.microbatch, r.microbatches, r.plan.zero_stage) for r in runs]
    assert set(knobs) == set(itertools.product(*search.SPACE.values()))
    assert {run.plan.world_size for run in SEARCH.runs["paper"]} == {search.GPUS}


def test_verdicts_on_the_search_turn() -> None:
    assert verdicts(SEARCH, of_search(plain)) == [YES] * 4
    assert verdicts(SEARCH, of_search(lambda run: 1e15 - plain(run)))[:3] == [NO] * 3
    assert set(verdicts(SEARCH, of_search(plain)[1:])) == {ABSENT}  # a space with a hole says nothing


def test_a_plan_that_the_sampler_does_not_come_upon_refutes_it() -> None:
    last = max(SEARCH.runs["paper"], key=lambda run: (run.plan.tp, run.plan.pp, run.train.microbatch, run.id))
    alone = of_search(lambda run: 9e15 if run is last else None if run.plan.tp == 8 else plain(run))
    assert verdicts(SEARCH, alone)[3] == NO


def test_the_search_is_drawn() -> None:
    assert SEARCH.figure is not None
    [ax] = SEARCH.figure(of_search(plain)).axes
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "microbatch"


def test_failures_are_part_of_the_space() -> None:
    records = of_search(lambda run: None if run.train.microbatch == 16 else plain(run))
    [space] = spaces(records)
    failures = [values[KNOBS.index("microbatch")] for values, rate in space.rates.items() if rate == 0]
    assert failures == [16] * sum(run.train.microbatch == 16 for run in SEARCH.runs["paper"])
    table = search.table(records)
    assert "fails" in " ".join(table.frame["by_value"])
    assert sum(table.frame["share"]) == pytest.approx(1)
    assert set(verdicts(SEARCH, [simulated(run, status="oom") for run in SEARCH.runs["paper"]])) == {ABSENT}


def test_the_small_space_leaves_out_what_two_ranks_cannot_be() -> None:
    records = [fast(run, plain(run) / 1e3) for run in SEARCH.runs["small"]]
    [space] = spaces(records)
    assert all(space.rates.values())
    assert set(space.importance) == set(KNOBS)


SWEPT = load("frontier2023/sweeps")


def swept(rate: Callable[[Run], float]) -> list[Record]:
    return [simulated(run, 1e12 * rate(run), device=MI250X) for run in SWEPT.runs["paper"]]


def test_every_run_of_a_sweep_differs_from_the_recipe_by_its_knob() -> None:
    lengths = {name: [len(line) for line in sweeps.lines(swept(lambda _: 50), name)] for name in sweeps.KNOBS}
    assert lengths == {name: [len(changes)] for name, (_, changes) in sweeps.KNOBS.items()}
    assert len(sweeps.table(swept(lambda _: 50)).frame) == sum(len(changes) for _, changes in sweeps.KNOBS.values())


def test_verdicts_on_sweeps_turn() -> None:
    best = lambda run: 50 - abs(run.train.microbatch - 2) - 5 * max(0, run.plan.zero_stage - 1)
    assert verdicts(SWEPT, swept(best)) == [YES] * 3
    worse = lambda run: 50 / run.plan.pp + run.train.microbatch + 5 * run.plan.zero_stage
    assert verdicts(SWEPT, swept(worse)) == [NO] * 3
    records = [fast(run, 1e9 * run.train.microbatch) for run in SWEPT.runs["small"]]
    assert verdicts(SWEPT, records) == [ABSENT, NO, ABSENT]
    assert SWEPT.figure is not None
    assert len(SWEPT.figure(swept(best)).axes) == len(sweeps.KNOBS)


def test_a_search_that_proposes_no_plan_has_the_slowest() -> None:
    """Of 8 combinations, 2 do not divide the ranks; one seed's first two proposals are both of these."""
    every = itertools.product((1, 2), (1, 2), (1, 8))
    rates = {(tp, pp, size, 4, 0): 9.0 - tp - size for tp, pp, size in every if tp * pp <= 2}
    assert Space("model", "device", 2, rates, {}).searches[1] == min(rates, key=rates.__getitem__) == (2, 1, 8, 4, 0)
