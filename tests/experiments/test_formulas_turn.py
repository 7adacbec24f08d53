"""Claims that rest on formulas and printed numbers, or on many runs at once: other numbers turn their verdicts."""

import copy
import functools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.experiment import published
from harness.experiment.loading import load
from harness.experiment.verdicts import records_of
from harness.records.record import Record
from impl.run import with_fields
from tests.experiments.as_printed import judged
from tests.harness.made_up_records import record_of

ROOT = Path(__file__).resolve().parents[2]
BY_FORMULA = {"frontier2023/models": ("the models have", "14 bytes a parameter give")}


def forget() -> None:
    """Empty what experiments keep of published numbers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("experiments."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@pytest.fixture
def other_papers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Papers whose numbers are each another: by a third to three times as much."""
    real = published._read

    @functools.cache
    def other(path: Path) -> Any:
        draw = random.Random(0)
        rows = real(path)
        return rows.assign(value=[value * 3 ** draw.uniform(-1, 1) for value in rows["value"]])

    monkeypatch.setattr(published, "_read", other)
    forget()
    yield
    monkeypatch.undo()
    forget()


def verdicts(name: str, records: Sequence[Record], begins: Sequence[str]) -> list[str]:
    experiment = load(name)
    chosen = [claim for begin in begins for claim in experiment.claims if claim.text.startswith(begin)]
    return ["not reproduced" if one == "partly" else one for one in judged(chosen, records)]


def some(name: str) -> list[Record]:
    """Return a made-up record for each of the paper's models."""
    return [record_of(run, device="cuda") for run in load(name).runs["paper"]]


@pytest.mark.parametrize("name", BY_FORMULA)
def test_formulas_give_the_papers_numbers(name: str) -> None:
    assert set(verdicts(name, some(name), BY_FORMULA[name])) == {"reproduced"}


@pytest.mark.usefixtures("other_papers")
@pytest.mark.parametrize("name", BY_FORMULA)
def test_formulas_do_not_give_other_numbers(name: str) -> None:
    assert set(verdicts(name, some(name), BY_FORMULA[name])) == {"not reproduced"}


def test_shares_of_memory_turn() -> None:
    name, claim = "korthikanti2022/activation_recomputation", ("each way leaves",)
    records = records_of(load(name), ROOT / "results", ("small",))
    assert verdicts(name, records, claim) == ["reproduced"]
    records = copy.deepcopy(records)
    for record in records:
        for rank in record.ranks if record.run.plan.recompute != "none" else ():
            assert rank.activation_bytes is not None
            rank.activation_bytes["layer"] *= 2
    assert verdicts(name, records, claim) == ["not reproduced"]


def test_the_largest_model_by_stage_turns() -> None:
    name, claim = "zero2019/zero_max_model_size", ("no stage fits less",)
    records = records_of(load(name), ROOT / "results", ("small",))
    assert verdicts(name, records, claim) == ["reproduced"]
    deeper = lambda run: with_fields(run, {"model.num_layers": 10 * run.model.num_layers})
    records = [one if one.run.plan.zero_stage else replace(one, run=deeper(one.run)) for one in records]
    assert verdicts(name, records, claim) == ["not reproduced"]
