"""Data parallelism and ZeRO by DeepSpeed and by PyTorch's DDP and FSDP2: an outside oracle for our stages."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from impl.model.config import ModelConfig
from impl.peers.gpt import rearranged
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.peer_runs import Trained, assert_same_work, train_all, write_data
from tests.ranks import run_ranks

RUN = Run(
    model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=16, vocab_size=301),  # FSDP splits rows: oddly
    plan=Plan(dp=2, bucket_bytes=40_000),
    train=Recipe(steps=3, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=2, clip_norm=0.5, eps=1e-4),
)
Key = tuple[str, int, str]
"""Engine, ZeRO stage and case."""
MORE: dict[str, dict[str, Any]] = {
    "bf16 gradients": {"precision": "bf16", "fp32_gradients": False},
    "one microbatch": {"precision": "bf16", "train": replace(RUN.train, microbatch=4)},
}
ENGINES = ("native", "torch", "deepspeed")


def of(engine: str, stage: int, changes: dict[str, Any]) -> Run:
    of_plan = {"zero_stage": stage} | {name: value for name, value in changes.items() if hasattr(RUN.plan, name)}
    of_run = {name: value for name, value in changes.items() if name not in of_plan}
    return replace(RUN, plan=replace(RUN.plan, **of_plan), engine=engine, **of_run)


RUNS: dict[Key, Run] = {(engine, stage, "fp32"): of(engine, stage, {}) for engine in ENGINES for stage in (0, 1, 2, 3)}
RUNS |= {
    (engine, stage, "bf16"): of(engine, stage, {"precision": "bf16"})
    for engine, stages in (("native", (0, 2, 3)), ("torch", (0, 3)), ("deepspeed", (2, 3)))
    for stage in stages
}
LLAMA = {"model": replace(BLOCKS["llama"], hidden_size=64, num_heads=4, kv_heads=2, vocab_size=301)}
RUNS |= {(engine, stage, "Llama"): of(engine, stage, LLAMA) for engine in ENGINES[:2] for stage in (0, 3)}
RUNS["deepspeed", 3, "Llama"] = of("deepspeed", 3, LLAMA)
RUNS |= {(engine, 0, case): of(engine, 0, changes) for case, changes in MORE.items() for engine in ("native", "torch")}
RUNS |= {(engine, 3, "recomputed"): of(engine, 3, {"recompute": "full"}) for engine in ("torch", "deepspeed")}
GROUPS = {"dp": 4, "zero_group": 2, "train": replace(RUN.train, microbatch=1)}
"""Hybrid sharding, of two microbatches a rank."""
RUNS["native", 0, "groups"] = of("native", 0, {**GROUPS, "zero_group": None})
RUNS |= {(engine, stage, "groups"): of(engine, stage, GROUPS) for engine in ("native", "torch") for stage in (1, 3)}


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    """A peer's whole, by name; of ours what this rank owns, by name and first element."""
    if isinstance(trainer, Trainer):
        return {f"{o.name} {o.start}": o.tensors["weight"].numpy() for o in trainer.optimizer.owned() if o.is_writer}
    named = dict(trainer.model.named_parameters())
    with ExitStack() as gathered:
        if trainer.run.engine == "deepspeed":
            from deepspeed import zero

            gathered.enter_context(
                zero.GatheredParameters(list(named.values()), enabled=trainer.run.plan.zero_stage == 3)
            )
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named.items()}
        return {name: weight.detach().float().numpy().copy() for name, weight in whole.items()}


def whole(
    ranks: list[dict[str, np.ndarray]], shapes: dict[str, tuple[int, ...]], model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Ours, put together from what the ranks own, under the peers' names."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for key, part in (item for rank in ranks for item in rank.items()):
        name, start = key.split()
        parts.setdefault(name, {})[int(start)] = part
    flat = {name: np.concatenate([of[start] for start in sorted(of)]) for name, of in parts.items()}
    ours = {name: torch.from_numpy(weight.reshape(-1, *shapes[name][1:])) for name, weight in flat.items()}
    theirs = rearranged(ours, model, model.vocabulary(0))
    if model.tied:
        del theirs["head.weight"]
    return theirs


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Key, Trained]]]:
    """By number of ranks."""
    path, evaluation = write_data(tmp_path_factory.mktemp("tokens"))
    runs = {key: replace(run, evaluation=evaluation) for key, run in RUNS.items()}
    of_ranks = lambda ranks: {key: run for key, run in runs.items() if run.plan.world_size == ranks}
    return {ranks: run_ranks(ranks, train_all, of_ranks(ranks), path, weights_of) for ranks in (2, 4)}


@pytest.mark.parametrize("key", RUNS)
def test_losses_norms_predictions_and_weights_equal_those_of_our_stage(
    key: Key, all_trained: dict[int, list[dict[Key, Trained]]]
) -> None:
    """Ours are held against our stage 0, peers against our own of their stage, which recomputes nothing."""
    engine, stage, case = key
    trained = all_trained[RUNS[key].plan.world_size]
    if key not in trained[0]:
        pytest.skip("deepspeed is not installed")
    run, against = RUNS[key], ("native", 0 if engine == "native" else stage, "fp32" if case == "recomputed" else case)
    model_of = "Llama" if case == "Llama" else "fp32"
    shapes = {name: weight.shape for name, weight in all_trained[2][0]["torch", 0, model_of].weights.items()}
    shapes["trunk.output.weight"] = shapes["trunk.tokens.weight"]
    ours = whole([rank[against].weights for rank in trained], shapes, run.model)
    ranks = [rank[key].weights for rank in trained]
    for rank in trained:
        assert_same_work(rank[key], rank[against], run, loss=1e-6 if run.precision == "fp32" else None)
    for weights in [whole(ranks, shapes, run.model)] if engine == "native" else ranks:
        assert weights.keys() == ours.keys()
        for name, expected in ours.items():
            difference = np.linalg.norm(np.asarray(weights[name]) - expected.numpy())
            assert difference < (1e-5 if run.precision == "fp32" else 1e-2) * expected.norm(), name


def test_settings_say_what_the_engine_made_of_the_plan(all_trained: dict[int, list[dict[Key, Trained]]]) -> None:
    settings = {key: found.settings for key, found in all_trained[2][0].items() if key[0] != "native"}
    ddp, gathered = settings["torch", 0, "bf16"], settings["torch", 3, "bf16"]
    assert (ddp["part"], ddp["accumulates"], ddp["bucket_cap_bytes"]) == ("ddp", "float32", 20_000)
    assert len(ddp["bucket_bytes"]) > 1, "nothing overlaps"
    assert (gathered["part"], gathered["reduce_dtype"], gathered["reshard_after_forward"]) == ("fsdp", "float32", True)
    assert settings["torch", 3, "recomputed"]["recompute"] == "layers"
    assert gathered["replicas"] == 1 < all_trained[4][0]["torch", 3, "groups"].settings["replicas"]
    for (engine, stage, _), told in settings.items():
        if engine == "deepspeed":
            assert told["zero_optimization"]["stage"] == stage
            assert told["gradient_accumulation_steps"] * told["train_micro_batch_size_per_gpu"] == 4
            assert told["zero_optimization"]["sub_group_size"] > 0, "its defaults are not there"
