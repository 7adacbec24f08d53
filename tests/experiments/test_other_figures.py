"""Megatron-LM's table 8, Korthikanti's figure 1 and ZeRO's figure 4: printed numbers, and verdicts that turn."""

from collections.abc import Callable
from functools import cache

import pytest

from experiments.megatron2019 import strong_scaling
from experiments.zero2019 import data_parallel_only
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.parts import Collective
from harness.records.record import Record
from impl.cost.activations import layer_bytes
from impl.cost.parameters import count_parameters
from impl.pipeline.schedule import peak_in_flight
from impl.pipeline.schedules import build
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, fast, simulated, verdicts
from tests.harness.made_up_records import record_of

STRONG, FILLED, ALONE = load("strong_scaling"), load("memory_per_gpu"), load("data_parallel_only")
V100 = "Tesla V100-SXM3-32GB-H"


SPEEDUPS = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}


def table_8(factor: Callable[[int], float] = lambda _: 1.0) -> list[Record]:
    """The printed speed-ups times a factor."""
    every = [(run, run.plan.tp) for run in STRONG.runs["paper"]]
    return [simulated(run, 1e12 * SPEEDUPS[tp] * factor(tp) / tp, device=V100) for run, tp in every]


def test_verdicts_on_strong_scaling_turn() -> None:
    assert [run.plan.tp for run in STRONG.runs["paper"]] == list(SPEEDUPS)
    assert list(published("megatron2019", "strong_scaling_speedup")["value"]) == list(SPEEDUPS.values())
    assert verdicts(STRONG, table_8()) == [YES, YES, ABSENT]
    assert verdicts(STRONG, table_8(lambda t: 1.3 if t > 2 else 1.0)) == [YES, NO, ABSENT]
    assert verdicts(STRONG, table_8(lambda t: 0.5 if t > 1 else 1.0)) == [PARTLY, NO, ABSENT]
    assert verdicts(STRONG, table_8(lambda t: t**1.1 / SPEEDUPS[t]))[0] == NO  # faster than linear
    rows = strong_scaling.table(table_8()).frame
    assert list(rows["simulated_speedup"]) == pytest.approx(list(rows["published_speedup"]))


def test_what_is_sent_is_counted() -> None:
    def sent(size: Callable[[int], int]) -> list[Record]:
        records = [record_of(run) for run in STRONG.runs["smoke"]]
        for run, full in zip(STRONG.runs["smoke"], records, strict=True):
            for rank in full.ranks if run.plan.tp > 1 else ():
                rank.traffic = {"tp": {"all_reduce": Collective(calls=4, bytes=size(run.plan.tp))}}
        return records

    assert verdicts(STRONG, sent(lambda _: 4096))[2] == YES
    assert verdicts(STRONG, sent(lambda tp: 4096 // tp))[2] == NO


def filled(memory: Callable[[Run], float]) -> list[Record]:
    """The bars simulated with so much memory, and the microbatches in flight that schedules have."""
    return [simulated(run, memory=memory(run), in_flight=held(run)) for run in FILLED.runs["paper"]]


@cache
def held(run: Run) -> float:
    plan = run.plan
    rows = build(plan.schedule, plan.pp, run.microbatches, plan.chunks).rows
    return peak_in_flight(rows[0]) / plan.chunks


def test_verdicts_on_what_fits_turn() -> None:
    assert len(FILLED.runs["paper"]) == 8
    saves = lambda run: run.plan.sequence_parallel
    right = lambda run: 60e9 if saves(run) else 120e9
    assert verdicts(FILLED, filled(right)) == [YES, YES]
    assert verdicts(FILLED, filled(lambda run: 90e9))[0] == PARTLY
    assert verdicts(FILLED, filled(lambda run: 120e9 if saves(run) else 60e9))[0] == NO
    assert FILLED.table is not None
    table = FILLED.table(filled(right)).frame
    assert list(table["formula_activations"]) == pytest.approx(list(table["published_activations"]), rel=0.02)


def test_figure_1_is_drawn_with_its_80_gb() -> None:
    assert FILLED.figure is not None
    [ax] = FILLED.figure(filled(lambda _: 90e9)).axes
    assert len(ax.patches) == 3 * 8
    assert 80 in ax.lines[-1].get_ydata()


def counted(run: Run, kept: float = 1.0) -> Record:
    """A record whose layers keep what is predicted; with both ways of saving, so many times as much."""
    full = record_of(run)
    for rank in full.ranks:
        rank.activation_bytes = {"layer": round(layer_bytes(run) * (kept if run.plan.sequence_parallel else 1))}
    return full


def test_verdicts_on_counted_activations_turn() -> None:
    runs = FILLED.runs["smoke"]
    assert verdicts(FILLED, [counted(run) for run in runs]) == [ABSENT, YES]
    assert verdicts(FILLED, [counted(run, kept=9.0) for run in runs])[1:] == [NO]


def figure_4(factor: Callable[[Run], float] = lambda _: 1.0, room: float = 1.0) -> list[Record]:
    """As fast as printed, times a factor; memory by the states, times a factor."""
    made = []
    for run in ALONE.runs["paper"]:
        states = count_parameters(run.model) * (2.2 if run.plan.zero_stage else 16)
        row = data_parallel_only.PAPER.get(run)
        rate, status = (row.printed["published_rate"] * factor(run), "ok") if row else (1e12, "oom")
        made.append(simulated(run, rate, memory=states * room, status=status, device=V100))
    return made


def test_verdicts_on_data_parallelism_alone_turn() -> None:
    assert len(ALONE.runs["paper"]) == 12
    assert verdicts(ALONE, figure_4()) == [YES, YES, YES, ABSENT]
    assert verdicts(ALONE, figure_4(room=0.5))[0] == PARTLY  # 2.5B would fit with undivided states
    assert verdicts(ALONE, figure_4(room=1.4))[0] == PARTLY
    assert verdicts(ALONE, figure_4(lambda run: 4.0 if run.model.num_layers == 62 else 1.0))[1:3] == [NO, PARTLY]
    for faster, expected in ((1, NO), (4, YES)):
        small = [fast(run, faster * 1e9 if run.plan.zero_stage else 2e9) for run in ALONE.runs["small"]]
        assert verdicts(ALONE, small)[::2] == [ABSENT, ABSENT]
        assert verdicts(ALONE, small)[3] == expected
    assert ALONE.table
    rows = ALONE.table(figure_4()).frame
    assert len(rows) == 11
    assert ALONE.figure is not None
    assert len(ALONE.figure(figure_4()).axes[0].lines) == 4
