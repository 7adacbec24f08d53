"""Engines take turns; the ratio of their medians has an interval that covers the true one."""

from statistics import median

import numpy as np
import pytest
import torch

from harness.analysis import render
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Step
from tests.bench import side_by_side
from tests.bench.side_by_side import Turn, against_peers, compared, notes, ratio_of_medians, raw, table, take_turns


class Noting:
    """An engine that notes when it is called."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def step(self, i: int) -> Step:
        self.notes.append(f"{self.name}{i}")
        return Step(torch.tensor(float(i)), torch.tensor(0.0), 0.0)


def test_engines_take_turns_and_ranks_start_a_step_together(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    seen: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(side_by_side.dist, "barrier", lambda: called.append("|"))
    engines = {name: Noting(name, called) for name in "abc"}
    turns = take_turns(engines, 2, lambda i, seconds: seen.append((i, [n for n in seconds if seconds[n] > 0])))
    assert "".join(called) == "|a0|b0|c0|a1|b1|c1"
    assert [turn.loss for turn in turns["b"]] == [0.0, 1.0]
    assert all(turn.seconds > 0 for turn in turns["a"])
    assert seen == [(0, ["a", "b", "c"]), (1, ["a", "b", "c"])]


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


def test_what_is_not_paired_is_refused():
    with pytest.raises(ValueError, match="come in pairs"):
        ratio_of_medians([1.0], [1.0, 2.0])


def test_a_step_takes_what_its_slowest_rank_takes():
    rank = lambda ours, theirs: {"a": [Turn(t, 2.0) for t in ours], "b": [Turn(t, 2.5) for t in theirs]}
    ranks = [rank([9, 1, 4], [9, 8, 8]), rank([9, 3, 2], [9, 2, 2])]
    result = compared(ranks, "a", "b", warmup=1)
    assert (result["ours"], result["theirs"], result["value"]) == (3.5, 8, 3.5 / 8)
    assert result["loss_difference"] == pytest.approx(0.2)
    assert raw(ranks)["seconds"]["a"] == [[9, 1, 4], [9, 3, 2]]
    assert raw(ranks)["losses"] == {"a": [2.0] * 3, "b": [2.5] * 3}


def test_the_best_peer_is_the_fastest_one():
    seconds = {"ours": 2.0, "slow": 4.0, "fast": 2.5}
    ranks = [{name: [Turn(each, 1.0)] * 3 for name, each in seconds.items()}] * 2
    cell = against_peers(ranks, "ours", warmup=1)
    text = render.markdown(table("x", "Title", [{"precision": "fp32", "plan": "tp", **cell}], ["Said."]))
    first, second = text.splitlines()[4:6]
    assert all(word in first for word in ("fp32", "tp", "slow ", "2,000", "4,000", "0.5"))
    assert "fast (best)" in second
    assert "0.800 to 0.800" in second
    assert text.endswith("- Said.\n")
    del ranks[0]["slow"]
    alone = against_peers(ranks, "ours", warmup=1)
    assert "best" not in render.markdown(table("x", "Title", [{"precision": "fp32", "plan": "tp", **alone}], []))


def test_notes_say_what_was_run():
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=2, seq_len=16, vocab_size=8192)
    run = Run(model=model, plan=Plan(pp=2), train=Recipe(steps=9, global_batch=12, microbatch=2))
    text = " ".join(notes(run, {"torch_threads": 1, "backend": "gloo", "device_name": "a processor"}, warmup=2))
    for words in ("3 layers", "12 sequences in microbatches of 2", "7 steps after 2", "1 thread, gloo, on a processor"):
        assert words in text
