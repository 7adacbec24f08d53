"""Experiments of AxoNN: its model against products one by one, plans that are the fastest, and verdicts both ways."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest

from experiments.axonn2023 import (
    AS_STORED,
    PRODUCTS,
    SHAPES,
    communicating,
    grid_of,
    modelled,
    on_grid,
    on_perlmutter,
    volume,
    weak_scaling,
)
from experiments.axonn2023.weak_scaling import FOUND, GPUS, GRID, GRID_FREE, MEGATRON, MEGATRON_FREE
from harness.predict.simulation import given_by, predicted
from harness.predict.simulation import simulated as asked_of
from harness.predict.systems import load_system
from harness.records.parts import Rank
from harness.records.record import Record
from impl.cost.least_traffic import moved_bytes
from impl.cost.place import Place
from impl.cost.traffic import TRAVELS, collectives, state_traffic, step_traffic
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, OPEN, YES, at_rate, fast, simulated, timed
from tests.experiments.as_printed import collectives as counted
from tests.experiments.as_printed import judged as verdicts

GRIDS = [(4, 1, 1, 1), (1, 4, 2, 1), (2, 2, 2, 2), (4, 2, 1, 2), (2, 4, 4, 1)]


def bare(grid: tuple[int, int, int, int]) -> Run:
    """80B's layers without what AxoNN's model leaves out."""
    model = replace(SHAPES[80], biases=False, norm_placement="without", num_layers=3)
    return on_perlmutter(model, on_grid(grid), 1024 // (grid[2] * grid[3]))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_model_with_its_last_product_turned_is_what_each_collective_of_a_layer_sends(
    grid: tuple[int, int, int, int],
) -> None:
    run, (x, y, z, d) = bare(grid), grid
    place, ring = Place(run, 51200), lambda n, size: (n - 1) / n * size
    over = {"tp": 0.0, "features": 0.0}
    for one in collectives(place, "layer", 2048):
        n = x if one.over == "tp" else y
        over[one.over] += 3 * TRAVELS[one.op] * ring(n, one.bytes) * (2 if one.when == "forward" else 1)
    blocks = 3 * 12 * 12288**2 / (x * y)
    expected = (over["tp"], over["features"], 3 * ring(z, blocks * 2), 2 * ring(d, blocks / z * 4))
    assert modelled(run, PRODUCTS) == pytest.approx(expected)


def test_the_stored_model_doubles_x_and_loses_a_sixth_of_y() -> None:
    stored, turned = (modelled(bare((2, 2, 1, 1)), products) for products in (AS_STORED, PRODUCTS))
    assert stored[0] / turned[0] == 2
    assert stored[1] / turned[1] == pytest.approx(16 / 19)


@pytest.mark.parametrize(
    ("grid", "rates"),
    [((2, 2, 2, 1), (76, 76, 20, 1)), ((4, 1, 1, 8), (225, 1, 1, 20)), ((8, 1, 2, 1), (80, 1, 20, 1)),
     ((1, 2, 4, 2), (1, 76, 40, 20)), ((1, 1, 4, 2), (1, 1, 225, 20))],
)  # fmt: skip
def test_its_seconds_are_bytes_over_the_bandwidths_of_the_stored_table(
    grid: tuple[int, ...], rates: tuple[int, ...]
) -> None:
    run = bare(grid)  # type: ignore[arg-type]
    expected = sum(size / 2**30 / rate for size, rate in zip(modelled(run), rates, strict=True))
    assert communicating(run) == pytest.approx(expected)


def test_what_a_grid_moves_is_counted_over_its_own_axes() -> None:
    run = bare((4, 2, 1, 2))
    traffic = step_traffic(Place(run, 51200), 2048)
    states = state_traffic(Place(run, 51200))
    over = {"tp": 4, "features": 2}
    own = sum(TRAVELS[op] * one.bytes * (n - 1) / n for a, n in over.items() for op, one in traffic[a].items())
    assert moved_bytes(run, traffic) == pytest.approx(own + moved_bytes(run, states))


def test_plans_have_all_gpus_and_the_grids_among_them_are_the_fastest_that_fit() -> None:
    assert GPUS == {5: 64, 10: 128, 20: 256, 40: 512, 80: 1024}
    runs = weak_scaling.EXPERIMENT.runs["paper"]
    assert [run.plan.world_size for run in runs] == [GPUS[size] for size in FOUND for _ in FOUND[size]]
    assert {weak_scaling.way(run) for run in runs} == {GRID, GRID_FREE, MEGATRON, MEGATRON_FREE}
    system = load_system("perlmutter")

    def seconds(run: Run) -> float:
        found = predicted(asked_of(run, given_by(run, (), system), system).done, system)
        return float("inf") if not found.fits else found.seconds

    chosen = weak_scaling.plan_of(5, GRID)
    microbatch = lambda grid: 1024 // (grid[2] * grid[3])
    every = [
        on_perlmutter(SHAPES[5], replace(on_grid(grid), bucket_bytes=chosen.plan.bucket_bytes), microbatch(grid))
        for grid in volume.grids(64, has_d=True, least=4, most=16)
    ]
    assert chosen in every
    assert seconds(chosen) == min(map(seconds, every))


def at_scale(seconds: Callable[[Run], float], own_sd: float = 0.0) -> list[Record]:
    """Simulated grids, steps of which take a second less if the network is free."""
    made = []
    for run in volume.EXPERIMENT.runs["paper"]:
        one = timed(simulated(run), seconds(run))
        made.append(replace(one, prediction=replace(one.prediction, without={"network": 1.0}, own_sd=own_sd)))
    return made


def test_verdicts_on_the_models_order_turn() -> None:
    claims = volume.EXPERIMENT.claims
    order = [claims[i] for i in (0, 1, 5)]
    assert verdicts(order, at_scale(lambda run: 1 + communicating(run))) == [YES] * 3
    assert verdicts(order, at_scale(lambda run: 1 + 1 / communicating(run))) == [NO] * 3
    draw = random.Random(1)
    assert verdicts(order, at_scale(lambda _: 1 + draw.random()))[0] != YES, "no order"
    free = at_scale(lambda run: 1.0)
    assert verdicts(order, free)[0] != YES, "nothing to order"
    later_faster: Callable[[Run], float] = lambda run: 1 + 0.01 / communicating(run)
    assert verdicts(order, at_scale(later_faster))[1] == NO
    assert verdicts(order, at_scale(later_faster, own_sd=0.05))[1] == OPEN, "by less than the simulator's interval"


def test_verdicts_on_bytes_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = volume.EXPERIMENT.claims[2:5]
    small = [fast(run) for run in volume.EXPERIMENT.runs["small"]]
    assert verdicts(claims[:1], small) == [NO]
    monkeypatch.setattr(volume, "AS_STORED", PRODUCTS)
    assert verdicts(claims[:1], small) == [YES]
    monkeypatch.setattr(volume, "moved", lambda one: -grid_of(one.run)[0])
    assert verdicts(claims[1:], small) == [NO, NO]
    monkeypatch.setattr(volume, "moved", lambda one: -grid_of(one.run)[1])
    assert verdicts(claims[1:], small) == [YES, YES]


def test_the_verdict_on_counts_turns_by_a_byte() -> None:
    run = volume.EXPERIMENT.runs["smoke"][1]
    traffic = counted(step_traffic(Place(run, 512), run.model.seq_len))
    for more, verdict in ((0, YES), (1, NO)):
        other = {
            axes: {op: replace(one, bytes=one.bytes + more) for op, one in ops.items()} for axes, ops in traffic.items()
        }
        record = replace(fast(run), ranks=[Rank(traffic=other)] * prod(grid_of(run)))
        assert verdicts(volume.EXPERIMENT.claims[-1:], [record]) == [verdict]


def scaled(rates: dict[str, float], largest: float = 1.0) -> list[Record]:
    made = []
    for run in weak_scaling.EXPERIMENT.runs["paper"]:
        rate = rates[weak_scaling.way(run)] * (largest if run.model == SHAPES[80] else 1)
        made.append(at_rate(simulated(run), rate))
    return made


def test_verdicts_on_weak_scaling_turn() -> None:
    claims = weak_scaling.EXPERIMENT.claims
    model = 0.57 * 312e12 / 1.3305  # equation 3 over the model's FLOPs, by PaLM's convention
    rates = {GRID: model, GRID_FREE: model, MEGATRON: model / 1.26, MEGATRON_FREE: model / 1.1}
    assert verdicts(claims, scaled(rates)) == [YES] * 5
    slow = {GRID: model * 0.8, GRID_FREE: model, MEGATRON: model, MEGATRON_FREE: model * 1.1}
    assert verdicts(claims, scaled(slow, largest=0.8)) == [NO] * 5
    all_again = [at_rate(simulated(run), model) for run in weak_scaling.EXPERIMENT.runs["smoke"]]
    assert verdicts(claims[3:4], all_again) == [ABSENT], "no plan recomputes nothing"
