"""Outlier dimensions: what a look at them says, and verdicts that turn."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from experiments.ours import layernorm_outliers as experiment
from harness.analysis.outliers import measured
from harness.experiment.loading import load
from harness.records.parts import Dimensions
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, judged
from tests.harness.made_up_records import record_of

Look = Callable[[Run, float], Dimensions]


def look(
    *, out: float = 30.0, in_layers: int = 6, weight: float = 5.0, same: bool = True, lost: float = 1.0
) -> Dimensions:
    """Six layers of 64 dimensions around 1, of which the eighth is `out` in the first `in_layers`."""
    sizes = 1 + 0.1 * np.random.default_rng(0).random((6, 64))
    sizes[:in_layers, 7] = out
    norms = {f"{i}.mlp_norms.sum": {"weight": (weight, 7 if same or i == 0 else i), "bias": (1.0, 0)} for i in range(6)}
    layers = {str(i): of.tolist() for i, of in enumerate(sizes)}
    return Dimensions(layers=layers, norms=norms, nats=2.0, zeroed=[(7, 2.0 + lost), (3, 2.01)])


def records(looked: Look) -> list[Record]:
    """The small tier's, looked at after each third of the training."""
    made = []
    for run in load("layernorm_outliers").runs["small"]:
        full = record_of(run, tier="small")
        last, steps = full.evaluations[-1], run.train.steps
        full.evaluations = [replace(last, step=steps * i // 3, dimensions=looked(run, i / 3)) for i in (1, 2, 3)]
        full.steps = full.steps[:: steps - 1]
        made.append(full)
    return made


def verdicts(looked: Look) -> list[str]:
    return judged(load("layernorm_outliers").claims, records(looked))


def pre(run: Run) -> bool:
    return run.model.norm_placement == "pre"


def test_what_a_look_says() -> None:
    seen = measured(look())
    assert seen["outliers"] == 1
    assert seen["ratio"] == pytest.approx(30 / 1.05, rel=0.02)
    assert (seen["weight"], seen["same"]) == (5.0, 1.0)
    assert (seen["lost"], seen["lost_average"]) == (1.0, pytest.approx(0.01))
    assert measured(look(in_layers=2))["outliers"] == 0
    assert measured(look(same=False))["same"] < 0.5


def test_the_table_has_every_placement_over_time() -> None:
    table = experiment.table(records(lambda run, share: look(out=1 + share * (20 if pre(run) else 10))))
    assert len(table.frame) == 2 * 3 * 3
    assert set(table.frame["n"]) == {3}
    grown = list(table.frame[table.frame["norm_placement"] == "pre"]["ratio"])
    assert grown[2] > grown[1] > grown[0]
    assert experiment.figure(records(lambda *_: look())) is not None


def test_verdicts_turn() -> None:
    more_in_pre = lambda run, _: look(out=40.0 if pre(run) else 20.0)
    assert verdicts(more_in_pre) == [YES] * 6
    assert verdicts(lambda run, _: look(out=1.05)) == [NO, YES, YES, ABSENT, NO, NO]
    assert verdicts(lambda run, _: look(weight=2.0))[1] == NO
    assert verdicts(lambda run, _: look(same=False))[1] == NO
    assert verdicts(lambda run, _: look(lost=0.05))[2] == NO
    assert verdicts(lambda run, share: look(out=30.0 if share == 1 else 1.05))[3] == NO
    assert verdicts(lambda run, _: look(out=20.0 if pre(run) else 40.0))[5] == NO
    only_bert = lambda run, _: look(out=30.0 if run.model.family == "bert" else 1.05)
    assert verdicts(only_bert)[0] == PARTLY
