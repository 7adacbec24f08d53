"""Evaluation at ZeRO's stage 3, where a forward pass is a collective: ranks with unequal work give serial's numbers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.evaluate import Evaluation
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from impl.zero.buckets import Bucket
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=24, num_heads=2, seq_len=16)
RECIPE = Recipe(steps=3, global_batch=4, microbatch=1, lr=1e-2, warmup_steps=0)
PASSAGES = ["one two three", "a long way to walk before the very end", "x yz"]
"""Fewer than four ranks: one has none."""
PLANS = [Plan(dp=2, zero_stage=3), Plan(dp=4, zero_stage=3), Plan(dp=2, pp=2, zero_stage=3)]


class Found(NamedTuple):
    evaluations: list[Evaluation]
    training_bytes: int
    """Of gathered weights at most."""
    evaluation_bytes: int


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


def evaluated(one: Trainer) -> Found:
    most, acquire = [0], one.parameters.acquire

    def watched(buckets: Sequence[Bucket], ahead: Sequence[Bucket] = ()) -> None:
        acquire(buckets, ahead)
        gathered = [bucket.weights.untyped_storage().nbytes() for bucket in one.buckets if bucket.stage == 3]
        most[-1] = max(most[-1], sum(gathered))

    one.parameters.acquire = watched
    for i in range(one.run.train.steps):
        one.step(i)
    most.append(0)
    return Found(one.evaluate(final=True), *most)


def test_unequal_work_gives_serials_numbers_and_gathers_no_more_than_training(data: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the cat sat on the mat, and so on " * 3)
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    texts = (str(tmp_path / "words.txt"),)
    of_gpt = EvaluationConfig(sequences=5, overlap=3, texts=texts, lambada=str(tmp_path / "lambada.jsonl"))
    of_bert = EvaluationConfig(sequences=5)
    gpt = Run(model=MODEL, train=RECIPE, evaluation=of_gpt, precision="fp64")
    alone = [gpt, replace(gpt, model=replace(MODEL, family="bert"), evaluation=of_bert)]
    runs = {run: [replace(run, plan=plan) for plan in PLANS] for run in alone}
    found = on_ranks(evaluated, [*alone, *(one for some in runs.values() for one in some)], data)
    for run, some in runs.items():
        [serial] = found[run]
        assert len(serial.evaluations) == (3 if run is gpt else 1)
        for one in some:
            for of_rank in found[one]:
                assert 0 < of_rank.evaluation_bytes <= of_rank.training_bytes
                for a, b in zip(of_rank.evaluations, serial.evaluations, strict=True):
                    assert a.nats == pytest.approx(b.nats, rel=1e-6)
                    assert replace(a, nats=0.0) == replace(b, nats=0.0)
