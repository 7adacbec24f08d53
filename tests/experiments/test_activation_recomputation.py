"""Korthikanti's figure 7, tables 4 and 5, PTD-P's figure 17: points are runs, shares are formulas, verdicts turn."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.korthikanti2022.activation_recomputation import (
    BOTH,
    FULL,
    WAYS,
    described,
    of_the_paper,
    printed,
    two_layers,
    way_of,
    with_way,
)
from experiments.korthikanti2022.sequence_parallel_memory import DEGREE, PAPER, quarter
from harness.experiment.claims import claims_table
from harness.experiment.experiment import TIERS, load
from harness.experiment.published import published
from harness.records.record import Rank, Record, point
from impl.cost.activations import layer_bytes
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, YES, bare, timed
from tests.turned import turned

EXPERIMENT = load("activation_recomputation")
SLOWER = {"": 1.0, "_sequence_parallel": 0.97, "_selective": 1.07, BOTH: 1.04, FULL: 1.36}
"""Seconds of a made-up step, relative to one in which nothing is recomputed."""


def made(run: Run, seconds: float) -> Record:
    """A record of the run, with the formula's bytes."""
    full = bare(run, device="cuda", device_name=A100, tier="paper")
    kept = {"layer": round(layer_bytes(run)), "model": round(layer_bytes(run) * run.model.num_layers)}
    return replace(timed(full, seconds), ranks=[Rank(activation_bytes=kept, traffic={})])


def paper(factor: Callable[[Run], float] = lambda _: 1.0) -> list[Record]:
    """Records of the paper's runs that take as long as printed, or a made-up time, times a factor."""
    out = []
    for run, times in of_the_paper().values():
        seconds = 1 / times.get("published_speed", math.nan)
        if "published_rate" in times:
            seconds = run.train.global_batch / times["published_rate"]
        elif math.isnan(seconds):
            seconds = 1 / times["published_gain"] if "published_gain" in times else SLOWER[way_of(run)]
        out.append(made(run, seconds * factor(run)))
    return out


def verdicts(records: list[Record]) -> list[str]:
    return turned(claims_table(EXPERIMENT.claims, records))


def test_every_run_of_every_tier_is_valid() -> None:
    for tier in TIERS:
        assert [run.why_invalid() for run in EXPERIMENT.runs[tier] if run.why_invalid()] == []
    assert {run.plan.world_size for run in EXPERIMENT.runs["smoke"]} == {2}


def test_the_paper_tier_has_every_printed_point() -> None:
    known = [described(run) for run in EXPERIMENT.runs["paper"]]
    count = lambda name: sum(not math.isnan(row[name]) for row in known)
    assert (count("published_gain"), count("published_rate")) == (8, 13)
    assert len([row for row in known if not math.isnan(row["published_share"])]) == 4 * 4 + 8
    for row in published("ptdp2021").query("where == 'figure 17'").to_dict("records"):
        found = [run for run, times in of_the_paper().values() if times.get("published_rate") == row["value"]]
        assert any(run.train.global_batch == row["global_batch"] for run in found)
        assert all((run.plan.tp, run.plan.pp, run.model.num_layers) == (8, 16, 80) for run in found)
    worlds = {run.plan.world_size for run, times in of_the_paper().values() if "published_gain" in times}
    assert worlds == {8, 64, 280, 512}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("way", [way for way in WAYS if way])
def test_the_formulas_are_figure_7_to_a_fifth_of_a_point(name: str, way: str) -> None:
    run = with_way(two_layers(name), way)
    share = layer_bytes(run) / layer_bytes(with_way(run, ""))
    assert 100 * share == pytest.approx(printed(f"activation_memory{way}", model=name), abs=0.2)
    small = replace(run, model=quarter(PAPER[name]))
    assert described(small)["formula_share"] == pytest.approx(share, abs=0.005)
    assert described(small)["published_share"] == pytest.approx(share, abs=0.005)
    assert small.plan.tp == DEGREE


def test_every_printed_point_stands_in_the_table_beside_ours_or_below() -> None:
    assert EXPERIMENT.table is not None
    smoke = [made(run, SLOWER[way_of(run)]) for run in EXPERIMENT.runs["smoke"]]
    below = EXPERIMENT.table(smoke).frame
    assert len(below) == len(smoke) + len(of_the_paper())
    beside = EXPERIMENT.table(paper()).frame
    assert len(beside) == len(of_the_paper())
    both = beside.dropna(subset=["speed", "published_speed"])
    assert len(both) == 5 + 8
    assert list(both["speed"]) == pytest.approx(list(both["published_speed"]))
    assert list(beside["share"].dropna()) == pytest.approx(list(beside.dropna(subset=["share"])["formula_share"]))
    assert EXPERIMENT.table([]).frame.empty


TURNED: list[tuple[Callable[[Run], float], dict[int, str]]] = [
    (lambda run: 1.0, {}),
    (lambda run: 1.2 if way_of(run) == "_selective" else 1.0, {2: NO}),
    (lambda run: 2.0 if way_of(run) == BOTH else 1.0, {3: NO, 4: NO}),
    (lambda run: 0.8 if way_of(run) == BOTH else 1.0, {4: NO}),
    (lambda run: 0.5 if way_of(run) == FULL and run.plan.pp == 16 else 1.0, {5: NO}),
    (lambda run: 3.0 if run.train.global_batch > 8 and run.plan.pp == 16 else 1.0, {6: NO}),
]


@pytest.mark.parametrize(("factor", "turned"), TURNED)
def test_verdicts_on_the_papers_own_numbers(factor: Callable[[Run], float], turned: dict[int, str]) -> None:
    assert verdicts(paper(factor)) == [turned.get(i, YES) for i in range(7)]


def test_verdicts_of_small_runs() -> None:
    smoke = [made(run, run.train.global_batch**0.5 * SLOWER[way_of(run)]) for run in EXPERIMENT.runs["smoke"]]
    assert verdicts(smoke) == [YES, ABSENT, YES, YES, ABSENT, YES, YES]
    crowded = copy.deepcopy(smoke)  # rows of the same records are made once
    for record in crowded:
        record.ranks[0].activation_bytes = {"layer": 1, "model": 2}
        record.environment.device, record.environment.cores = "cpu", 1
    assert verdicts(crowded) == [NO, *[ABSENT] * 6]


def test_points_are_told_apart_by_their_way() -> None:
    keys = {point(run) for run in EXPERIMENT.runs["smoke"]}
    assert len(keys) == len(EXPERIMENT.runs["smoke"])
    assert [way_of(run) for run in EXPERIMENT.runs["smoke"][:5]] == list(WAYS)
