"""Bytes moved over bytes needed: every plan stands in the table, and verdicts turn with what was counted."""

import math
from collections.abc import Callable
from dataclasses import replace

from harness.experiment.loading import load
from harness.records.parts import Rank
from harness.records.record import Record
from impl.cost.place import Place
from impl.cost.traffic import Count, Op, step_traffic
from impl.run import Run
from tests.experiments.as_printed import NO, YES, collectives, verdicts
from tests.harness.made_up_records import record_of

EXPERIMENT = load("ours/communication_bound")
VOCAB = 257


def counted(run: Run, share: float = 1.0) -> Record:
    """Return a record whose ranks counted this share of what the formulas say."""
    part = lambda count: Count(count.calls, int(count.bytes * share))
    made = record_of(replace(run, model=replace(run.model, vocab_size=VOCAB)))
    made.ranks = []
    for i in range(run.plan.pp):
        traffic: dict[str, dict[Op, Count]] = step_traffic(Place(made.run, VOCAB, i), run.model.seq_len)
        of = {axes: {op: part(count) for op, count in ops.items()} for axes, ops in traffic.items()}
        made.ranks.append(Rank(rank=i, traffic=collectives(of)))
    return made


def smoke(of: Callable[[Run], float] = lambda _: 1.0) -> list[Record]:
    return [counted(run, of(run)) for run in EXPERIMENT.runs["smoke"]]


def test_copies_save_a_third_and_a_pipeline_of_single_ranks_needs_nothing() -> None:
    assert EXPERIMENT.table
    found = EXPERIMENT.table(smoke()).frame
    over = dict(zip(found["way"], found["over"], strict=True))
    assert 0.6 < over["dp 2 + ZeRO-1"] / over["dp 2 + ZeRO-3"] * 4 < 0.7  # of four microbatches, which come last
    assert math.isnan(over["pp 2"])


def test_verdicts_turn() -> None:
    assert verdicts(EXPERIMENT, smoke()) == [YES, YES]
    assert verdicts(EXPERIMENT, smoke(lambda _: 0.1))[0] == NO
    assert verdicts(EXPERIMENT, smoke(lambda _: 1.3)) == [YES, NO]
