"""PyTorch's pipelining and DeepSpeed's do the same work as ours: equal losses, norms, gradients and predictions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from impl.model.config import ModelConfig
from impl.peers.gpt import rearranged
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.impl.blocks import BLOCKS
from tests.impl.peer_runs import Data, Trained, assert_same_work, both, first_gradients, ours, write_data
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=5, hidden_size=64, num_heads=4, seq_len=16)
LLAMA = replace(BLOCKS["llama"], num_layers=5, hidden_size=64, num_heads=4, kv_heads=2)
RECIPE = Recipe(steps=3, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=2, clip_norm=0.5)
PLANS = {
    "gpipe": Plan(pp=2, schedule="gpipe"),
    "1F1B": Plan(pp=2, schedule="one_f_one_b"),
    "interleaved": Plan(pp=2, schedule="interleaved", chunks=2),
    "zb_h1": Plan(pp=2, schedule="zb_h1"),
    "zbv": Plan(pp=2, schedule="zbv", chunks=2),
    "dualpipe_v": Plan(pp=2, schedule="dualpipe_v", chunks=2),
}
TORCH = Run(model=MODEL, train=RECIPE, engine="torch")
DEEPSPEED = replace(TORCH, plan=PLANS["1F1B"], engine="deepspeed")
RUNS = {**{plan: replace(TORCH, plan=PLANS[plan]) for plan in PLANS}, "deepspeed": DEEPSPEED}
RUNS |= {
    "1F1B bf16": replace(TORCH, plan=PLANS["1F1B"], precision="bf16"),
    "1F1B recomputed": replace(TORCH, plan=replace(PLANS["1F1B"], recompute="full")),
    "interleaved bf16 gradients": replace(TORCH, plan=PLANS["interleaved"], precision="bf16", fp32_gradients=False),
    "1F1B Llama": replace(TORCH, model=LLAMA, plan=PLANS["1F1B"]),
    "deepspeed Llama": replace(DEEPSPEED, model=LLAMA),
    "deepspeed bf16": replace(DEEPSPEED, precision="bf16"),
    "deepspeed bf16 gradients": replace(DEEPSPEED, precision="bf16", fp32_gradients=False),
    "deepspeed recomputed, unclipped": replace(
        DEEPSPEED, plan=replace(PLANS["1F1B"], recompute="full"), train=replace(RECIPE, clip_norm=0.0)
    ),
    "deepspeed zero 1": replace(DEEPSPEED, plan=replace(PLANS["1F1B"], zero_stage=1)),
}
WIDE = {
    "zero 0": replace(DEEPSPEED, plan=Plan(pp=2, dp=2)),
    "zero 1 bf16": replace(DEEPSPEED, plan=Plan(pp=2, dp=2, zero_stage=1), precision="bf16"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return write_data(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def trained(data: Data) -> list[dict[Any, Trained]]:
    return both(RUNS, 2, data)


@pytest.mark.parametrize("case", RUNS)
def test_pipelines_equal_ours_over_many_steps(case: str, trained: list[dict[Any, Trained]]) -> None:
    for rank in trained:
        if case not in rank:
            pytest.skip("deepspeed is not installed")
        assert_same_work(rank[case], rank[ours(RUNS[case])], RUNS[case])


def test_settings_say_what_the_pipelines_are(trained: list[dict[Any, Trained]]) -> None:
    told = {case: found.settings for case, found in trained[0].items() if isinstance(case, str)}
    assert told["interleaved"]["schedule"] == "ScheduleInterleaved1F1B"
    assert told["interleaved"]["layers_of_stages"] == [1, 1, 2, 1]
    if "deepspeed" in told:
        stages = [told[case]["zero_optimization"]["stage"] for case in ("deepspeed", "deepspeed zero 1")]
        assert stages == [0, 1]
        assert told["deepspeed bf16"]["optimizer_class"] == "BF16_Optimizer", "it adds gradients up in bf16"


def test_deepspeeds_pipeline_with_data_parallelism_equals_ours(data: Data) -> None:
    for rank in both(WIDE, 4, data):
        for case, run in WIDE.items():
            if case not in rank:
                pytest.skip("deepspeed is not installed")
            assert_same_work(rank[case], rank[ours(run)], run)


@pytest.mark.parametrize(
    ("plans", "model"),
    [
        (list(PLANS.values()), MODEL),
        ([PLANS["interleaved"], PLANS["zbv"]], LLAMA),
        ([Plan(pp=4, schedule="one_f_one_b")], LLAMA),
    ],
    ids=["GPT", "Llama", "Llama on 4"],
)
def test_every_gradient_of_pipelining_equals_ours(plans: list[Plan], model: ModelConfig, data: Data) -> None:
    """An outside oracle for our engine. Torch's model has the vocabulary of 301 tokens, we pad it."""
    changes: dict[str, Any] = {"model": replace(model, vocab_size=301), "precision": "fp64"}
    runs = [replace(TORCH, plan=plan, **changes) for plan in plans]
    for answers in zip(*run_ranks(plans[0].pp, first_gradients, runs, data[0]), strict=True):
        seen: set[str] = set()
        for mine, of_stages, _ in answers:
            theirs = {name.partition(".")[2]: gradient for name, gradient in of_stages.items()}
            elsewhere = {f"trunk.{end}.weight": np.zeros((384, 64)) for end in ("tokens", "output")}
            whole = {name: torch.from_numpy(grad) for name, grad in (elsewhere | mine).items()}
            expected = rearranged(whole, model, 301)
            ends = {"head.weight", "trunk.tokens.weight"}
            assert (
                theirs.keys() - ends
                == expected.keys() & (mine.keys() | {name.replace(".up.", ".gate.") for name in mine}) - ends
            )
            for name, found in theirs.items():
                assert found.shape == expected[name].shape, name
                assert np.linalg.norm(found - expected[name].numpy()) < 1e-12 * expected[name].norm(), name
            seen |= theirs.keys()
        assert {"head.weight", "trunk.tokens.weight", "trunk.final_norm.weight", "trunk.layers.4.mlp.up.weight"} <= seen
