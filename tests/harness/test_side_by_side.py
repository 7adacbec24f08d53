"""Engines take turns; the ratio of their medians has an interval that knows how sure it is."""

from statistics import median

import numpy as np
import pytest
import torch

from harness import render
from harness.side_by_side import Turn, compared, notes, ratio_of_medians, table, take_turns
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Step
from tests.ranks import run_ranks


class Noting:
    """An engine that notes when it is called."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def step(self, i: int) -> Step:
        self.notes.append(f"{self.name}{i}")
        return Step(torch.tensor(float(i)), torch.tensor(0.0), 0.0)


def two_noting_engines() -> tuple[list[str], dict[str, list[Turn]]]:
    called: list[str] = []
    return called, take_turns({name: Noting(name, called) for name in "ab"}, 3)


def test_engines_take_turns():
    for called, turns in run_ranks(2, two_noting_engines):
        assert called == ["a0", "b0", "a1", "b1", "a2", "b2"]
        assert [turn.loss for turn in turns["b"]] == [0.0, 1.0, 2.0]
        assert all(turn.seconds > 0 for turn in turns["a"])


def test_ratio_is_of_medians():
    theirs = [1.0, 2.0, 3.0, 4.0, 100.0]
    ratio = ratio_of_medians([2 * t for t in theirs], theirs)
    assert ratio.value == 2.0
    assert ratio.low <= 2.0 <= ratio.high


def test_interval_of_pairs_covers_the_truth():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        mood = random.lognormal(0, 0.3, 12)  # the machine's, which both engines meet
        ours, theirs = 0.8 * mood * random.lognormal(0, 0.02, 12), mood * random.lognormal(0, 0.02, 12)
        ratio = ratio_of_medians(ours.tolist(), theirs.tolist())
        assert ratio.value == pytest.approx(median(ours) / median(theirs))
        covered += ratio.low <= 0.8 <= ratio.high
    assert covered >= 34


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(ours: list[float], theirs: list[float]):
    with pytest.raises(ValueError, match="come in pairs"):
        ratio_of_medians(ours, theirs)


def test_a_step_takes_what_its_slowest_rank_takes():
    rank = lambda ours, theirs: {"a": [Turn(t, 2.0) for t in ours], "b": [Turn(t, 2.5) for t in theirs]}
    result = compared([rank([9, 1, 4], [9, 8, 8]), rank([9, 3, 2], [9, 2, 2])], "a", "b", warmup=1)
    assert (result["ours"], result["theirs"], result["value"]) == (3.5, 8, 3.5 / 8)
    assert result["loss_difference"] == pytest.approx(0.2)
    assert result["seconds"]["a"] == [[9, 1, 4], [9, 3, 2]]
    text = render.markdown(table("x", "Title", "Peer", [{"precision": "fp32", "plan": "tensor", **result}], ["Said."]))
    assert "| fp32 " in text
    assert "3,500" in text
    assert "Peer, step time (ms)" in text
    assert text.endswith("- Said.\n")


def test_notes_say_what_was_run():
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=2, seq_len=16, vocab_size=8192)
    run = Run(model=model, plan=Plan(pp=2), train=Recipe(steps=9, global_batch=12, microbatch=2))
    device = {"torch_threads": 1, "backend": "gloo", "device_name": "a processor"}
    what, how, where = notes(run, device, warmup=2)
    for words in ("3 layers", "hidden size 64", "vocabulary 8,192", "6 microbatches of 2 sequences"):
        assert words in what
    assert "median of 7 steps after 2" in how
    assert "2 ranks of 1 thread, gloo, on a processor" in where
