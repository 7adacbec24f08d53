"""Korthikanti's figure 7, tables 4 and 5, PTD-P's figure 17: points are runs, shares are formulas, verdicts turn."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.korthikanti2022 import (
    BOTH,
    DEGREE,
    FULL,
    PAPER,
    WAYS,
    Saved,
    in_print,
    published_share,
    quarter,
    two_layers,
    way_of,
    with_way,
)  # fmt: skip
from experiments.korthikanti2022.activation_recomputation import of_the_paper
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.parts import Rank
from harness.records.record import Record
from impl.cost.activations import layer_bytes
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, YES, bare, timed, turned

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
    for run, one in of_the_paper().items():
        times = one.printed
        seconds = 1 / times.get("published_speed", math.nan)
        if "published_rate" in times:
            seconds = run.train.global_batch / times["published_rate"]
        elif math.isnan(seconds):
            seconds = 1 / times["published_gain"] if "published_gain" in times else SLOWER[way_of(run)]
        out.append(made(run, seconds * factor(run)))
    return out


def verdicts(records: list[Record]) -> list[str]:
    return turned(EXPERIMENT, records)


def test_the_paper_tier_has_every_printed_point() -> None:
    assert {run.plan.world_size for run in EXPERIMENT.runs["smoke"]} == {2}
    paper = of_the_paper()
    assert list(paper) == EXPERIMENT.runs["paper"][:-5]
    assert [run.train.global_batch for run in EXPERIMENT.runs["paper"][-5:]] == [16, 32, 64, 128, 256]
    assert len([run for run in paper if not math.isnan(published_share(run))]) == 4 * 4 + 8
    gains = [run for run, one in paper.items() if "published_gain" in one.printed]
    assert [run.plan.world_size for run in gains[::2]] == [8, 64, 280, 512]
    batches = {one.printed["published_rate"]: run for run, one in paper.items() if "published_rate" in one.printed}
    rows = published("ptdp2021").query("where == 'figure 17'").to_dict("records")
    assert len(rows) == 13
    for row in rows:
        run = batches[row["value"]]
        assert (run.plan.tp, run.plan.pp, run.model.num_layers) == (8, 16, 80)
        assert run.train.global_batch == row["global_batch"]


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("way", [way for way in WAYS if way])
def test_the_formulas_are_figure_7_to_a_fifth_of_a_point(name: str, way: str) -> None:
    run = with_way(two_layers(name), way)
    share = Saved(run).formula_share
    assert 100 * share == pytest.approx(in_print(f"activation_memory{way}", name), abs=0.2)
    small = replace(run, model=quarter(PAPER[name]))
    assert Saved(small).formula_share == pytest.approx(share, abs=0.005)
    assert published_share(small) == pytest.approx(share, abs=0.005)
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
    assert verdicts(smoke) == [YES, ABSENT, YES, YES, ABSENT, YES, NO], "as large batches fit without it"
    crowded = copy.deepcopy(smoke)  # rows of the same records are made once
    for record in crowded:
        record.ranks[0].activation_bytes = {"layer": 1, "model": 2}
        record.environment.device, record.environment.cores = "cpu", 1
    assert verdicts(crowded) == [NO, *[ABSENT] * 6]
