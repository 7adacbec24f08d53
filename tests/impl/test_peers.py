"""Peer engines do the same work as ours: equal losses, norms, gradients and predictions on the same run.

Here PyTorch on one rank, its DTensor, and what engines lack.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from impl.cost.parameters import named_parameters
from impl.engines import make
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.peers.gpt import rearranged
from impl.peers.validity import part_of
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.impl.blocks import BLOCKS
from tests.impl.peer_runs import Data, Trained, assert_same_work, both, first_gradients, ours, write_data
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=16)
RECIPE = Recipe(steps=3, global_batch=4, microbatch=2, lr=1e-3, warmup_steps=2, clip_norm=0.5)
PLANS = {"split": Plan(tp=2), "sequence split": Plan(tp=2, sequence_parallel=True)}
RING = Plan(cp=2)
PLAIN = Run(model=MODEL, train=RECIPE, engine="torch")
PERI = replace(MODEL, norm_placement="peri", norm="rmsnorm")
DEEPNORM = replace(MODEL, norm_placement="deepnorm")
LLAMA = replace(BLOCKS["llama"], num_layers=2, hidden_size=64, num_heads=8, kv_heads=2)
NEMOTRON = replace(LLAMA, mlp="squared_relu", norm="layernorm", kv_heads=None, biases=True, tied=True)
NEOX = replace(NEMOTRON, mlp="gelu", tied=False, parallel_residual=True, rotary_fraction=0.5)
ALONE = {
    "fp32": PLAIN,
    "alone, other norms, recomputed": replace(PLAIN, model=PERI, plan=Plan(recompute="full")),
    "alone, Llama": replace(PLAIN, model=LLAMA),
    "alone, Nemotron": replace(PLAIN, model=NEMOTRON),
    "alone, GPT-NeoX": replace(PLAIN, model=NEOX),
    "alone, ReLU": replace(PLAIN, model=replace(MODEL, mlp="relu")),
    "alone, exact GELU": replace(PLAIN, model=replace(MODEL, mlp="gelu_erf", mlp_size=80)),
    "bf16": replace(PLAIN, precision="bf16"),
    "alone, bf16 gradients": replace(PLAIN, precision="bf16", fp32_gradients=False),
    "one rank's ZeRO": replace(PLAIN, plan=Plan(zero_stage=2)),
    "deepspeed": replace(PLAIN, engine="deepspeed"),
    "deepspeed Llama, bf16": replace(PLAIN, model=LLAMA, engine="deepspeed", precision="bf16"),
}
SPLIT = {name: replace(PLAIN, plan=plan) for name, plan in PLANS.items()}
SPLIT["sequence split, bf16"] = replace(SPLIT["sequence split"], precision="bf16")
SPLIT["unclipped"] = replace(SPLIT["split"], train=replace(RECIPE, clip_norm=0.0, microbatch=4))
SPLIT["other norms"] = replace(PLAIN, model=PERI, plan=PLANS["sequence split"])
SPLIT["norms of sums, small microbatches"] = replace(
    PLAIN, model=DEEPNORM, plan=PLANS["sequence split"], train=replace(RECIPE, microbatch=1)
)
SPLIT["Llama, recomputed"] = replace(PLAIN, model=LLAMA, plan=replace(PLANS["split"], recompute="full"))
SPLIT["recomputed"] = replace(PLAIN, plan=replace(PLANS["sequence split"], recompute="full"))
SPLIT["ring"] = replace(PLAIN, plan=RING)
SPLIT["ring, a sequence a microbatch, bf16"] = replace(
    SPLIT["ring"], train=replace(RECIPE, microbatch=1), precision="bf16"
)
SPLIT["ring, Llama, recomputed"] = replace(PLAIN, model=LLAMA, plan=replace(RING, recompute="full"))
SPLIT["bf16 gradients"] = replace(PLAIN, plan=PLANS["split"], precision="bf16", fp32_gradients=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return write_data(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def trained(data: Data) -> dict[int, list[dict[Any, Trained]]]:
    """By number of ranks."""
    return {1: both(ALONE, 1, data), 2: both(SPLIT, 2, data)}


@pytest.mark.parametrize("case", ALONE | SPLIT)
def test_one_rank_and_dtensor_equal_ours_over_many_steps(
    case: str, trained: dict[int, list[dict[Any, Trained]]]
) -> None:
    run = (ALONE | SPLIT)[case]
    for rank in trained[run.plan.world_size]:
        if case not in rank:
            pytest.skip("deepspeed is not installed")
        assert_same_work(rank[case], rank[ours(run)], run)


def test_every_gradient_of_dtensor_equals_ours(data: Data) -> None:
    """An outside oracle for our layers. DTensor splits 301 tokens unevenly, we pad them."""
    runs = [
        Run(model=replace(model, vocab_size=size), plan=plan, train=RECIPE, precision="fp64", engine="torch")
        for model, size, names in (
            (MODEL, 301, PLANS),
            (LLAMA, 301, PLANS),
            (NEMOTRON, 512, ["sequence split"]),
            (NEOX, 301, ["split"]),
        )
        for plan in map(PLANS.__getitem__, names)
    ]
    for run, answers in zip(runs, zip(*run_ranks(2, first_gradients, runs, data[0]), strict=True), strict=True):
        shards = answers[0][2]
        parts = lambda engine, name, answers=answers: [torch.from_numpy(answer[engine][name]) for answer in answers]
        mine = {
            name: shards[name].join(parts(0, name)) if name in shards else parts(0, name)[0] for name in answers[0][0]
        }
        expected = rearranged(mine, run.model, run.model.vocabulary(0))
        shards |= {"head.weight": shards["trunk.tokens.weight"]}
        shards |= {name.replace(".up.", ".gate."): shard for name, shard in shards.items() if ".mlp.up." in name}
        if run.model.tied:
            del expected["head.weight"]
        assert expected.keys() == answers[0][1].keys()
        for name, gradient in expected.items():
            found = torch.cat(parts(1, name), shards[name].dim) if name in shards else parts(1, name)[0]
            assert found.shape == gradient.shape, name
            assert (found - gradient).norm() < 1e-12 * gradient.norm(), name


def test_every_gradient_of_pytorchs_context_parallelism_equals_ours(data: Data) -> None:
    """An outside oracle for our ring: which tokens a rank has, what meets what behind the mask, and positions."""
    runs = [
        Run(model=replace(model, vocab_size=301), plan=RING, train=RECIPE, precision="fp64", engine="torch")
        for model in (MODEL, LLAMA, NEOX)
    ]
    for of_rank in run_ranks(2, first_gradients, runs, data[0]):
        for run, (ours_here, theirs, _) in zip(runs, of_rank, strict=True):
            whole = {name: torch.from_numpy(found) for name, found in ours_here.items()}
            expected = rearranged(whole, run.model, run.model.vocabulary(0))
            for name, gradient in theirs.items():
                assert np.linalg.norm(gradient - expected[name].numpy()) < 1e-12 * np.linalg.norm(gradient), name


VALID = {
    "plain": Run(engine="torch"),
    "ddp": Run(engine="torch", plan=Plan(dp=2)),
    "fsdp": Run(engine="torch", plan=Plan(dp=2, zero_stage=2)),
    "dtensor": Run(engine="torch", plan=Plan(tp=2)),
    "context": Run(engine="torch", plan=RING),
    "pipelining": Run(engine="torch", plan=Plan(pp=2)),
    "deepspeed": Run(engine="deepspeed", plan=Plan(dp=2, zero_stage=3)),
    "deepspeed_pipeline": Run(engine="deepspeed", plan=Plan(pp=2, dp=2, zero_stage=1), train=Recipe(microbatch=4)),
}
LACKS_ALL: list[tuple[dict[str, Any], str]] = [
    ({"model": ModelConfig(family="bert")}, "bert"),
    ({"model": ModelConfig(norm_placement="olmo2")}, "olmo2"),
    ({"model": ModelConfig(norm_placement="sub")}, "sub"),
    ({"model": ModelConfig(norm="dyt")}, "dyt"),
    ({"model": ModelConfig(dropout=0.1, attention_dropout=0.0)}, "dropout 0.1"),
    ({"precision": "fp16"}, "fp16"),
    ({"offload_optimizer": True}, "offload_optimizer"),
    ({"recompute": "selective"}, "recompute 'selective'"),
    ({"recompute": "full", "offload_activations": True}, "offload_activations"),
]
LACKS: list[tuple[str, dict[str, Any], str]] = [
    *((part, changes, word) for part in VALID for changes, word in LACKS_ALL),
    ("ddp", {"overlap_grad_reduce": False}, "overlap_grad_reduce False"),
    ("fsdp", {"overlap_param_gather": False}, "overlap_param_gather False"),
    ("dtensor", {"dp": 2}, "dp 2"),
    ("dtensor", {"model": ModelConfig(kv_heads=1)}, "plan.tp 2 above model.kv_heads 1"),
    ("context", {"dp": 2}, "dp 2"),
    ("context", {"cp_attention": "ulysses"}, "cp_attention 'ulysses'"),
    ("context", {"zero_stage": 1}, "zero_stage 1 (it has 0)"),
    ("pipelining", {"dp": 2}, "dp 2"),
    ("pipelining", {"tp": 2}, "tp 2"),
    ("pipelining", {"schedule": "mine:rows"}, "mine:rows"),
    ("pipelining", {"schedule": "zb_h1", "precision": "bf16"}, "zb_h1 in bf16"),
    (
        "pipelining",
        {"model": ModelConfig(num_layers=4), "schedule": "zbv", "chunks": 2, "precision": "bf16"},
        "zbv in bf16",
    ),
    ("pipelining", {"schedule": "zb_h2"}, "zb_h2"),
    ("pipelining", {"train": Recipe(global_batch=8, microbatch=8)}, "fewer microbatches"),
    ("pipelining", {"schedule": "zb_h1", "train": Recipe(global_batch=5, microbatch=1)}, "5 microbatches: it"),
    ("deepspeed", {"tp": 2}, "tp 2"),
    ("deepspeed", {"zero_group": 1}, "zero_group 1"),
    ("deepspeed", {"precision": "fp64"}, "fp64"),
    ("deepspeed", {"zero_stage": 0, "precision": "bf16"}, "zero_stage 0"),
    ("deepspeed_pipeline", {"zero_stage": 2}, "zero_stage 2 (it has 0, 1)"),
    ("deepspeed_pipeline", {"schedule": "gpipe"}, "gpipe"),
    ("deepspeed_pipeline", {"zero_stage": 0, "precision": "bf16"}, "zero_stage 0"),
    ("dtensor", {"compile": True, "recompute": "full"}, "compile with plan.recompute 'full'"),
    ("pipelining", {"compile": True, "schedule": "zb_h1"}, "compile with zb_h1"),
    ("deepspeed", {"compile": True}, "compile with plan.zero_stage 3"),
]


@pytest.mark.parametrize(("part", "changes", "word"), LACKS)
def test_what_an_engine_lacks_is_refused(part: str, changes: dict[str, Any], word: str) -> None:
    valid = VALID[part]
    assert part_of(valid) == part
    assert valid.problems() == []
    of_run = {name: value for name, value in changes.items() if name in vars(valid)}
    of_plan = {name: value for name, value in changes.items() if name not in of_run}
    run = replace(valid, plan=replace(valid.plan, **of_plan), **of_run)
    reason = run.problems()[-1]
    assert word in reason
    assert "\n" not in reason
    with pytest.raises(InputError, match=word.partition(" (")[0]):
        make(run, None, None, torch.device("cpu"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("model", [MODEL, LLAMA, replace(NEMOTRON, mlp_size=600)])
def test_deepspeeds_stage_3_fetches_a_whole_layer_ahead_and_keeps_vectors_of_every_model(model: ModelConfig) -> None:
    pytest.importorskip("deepspeed")
    from impl.peers.deepspeed import configuration

    sizes = configuration(replace(VALID["deepspeed"], model=model), 301)["zero_optimization"]
    layer = [p for p in named_parameters(model, 301, 1) if p.name.startswith("trunk.layers.0.")]
    vectors, matrices = ([p.size for p in layer if len(p.shape) == dims] for dims in (1, 2))
    assert max(vectors) <= sizes["stage3_param_persistence_threshold"] < min(matrices)
    assert sizes["stage3_prefetch_bucket_size"] == sum(matrices)
