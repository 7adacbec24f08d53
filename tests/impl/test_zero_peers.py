"""ZeRO by DeepSpeed and by PyTorch's FSDP2: an outside oracle for our stages, on the same weights and data."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.peers import fsdp
from impl.peers.gpt import rearranged
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.ranks import run_ranks

RUN = Run(
    model=ModelConfig(num_layers=3, hidden_size=64, num_heads=4, seq_len=16, vocab_size=301),  # FSDP splits rows: oddly
    plan=Plan(dp=2, bucket_bytes=40_000),
    train=Recipe(steps=12, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5, eps=1e-4),
)
HAS_DEEPSPEED = find_spec("deepspeed") is not None
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
TRAINED = [
    *(("ours", stage, precision) for stage in (0, 1, 2, 3) for precision in PRECISIONS),
    *(("deepspeed", stage, precision) for stage in (0, 1, 2, 3) for precision in PRECISIONS),
    *(("fsdp", stage, precision) for stage in (1, 2, 3) for precision in PRECISIONS),
]
TRAINED.remove(("deepspeed", 0, "bf16"))


class Trained(NamedTuple):
    """What one engine did on one rank."""

    steps: np.ndarray
    """Loss, gradient norm and learning rate of every step."""
    weights: dict[str, np.ndarray]
    """Ours: what this rank owns, filled in among zeros."""


def engine(name: str, run: Run, data: TokenFolder) -> Any:
    mesh, cpu = build_mesh(run.plan, "cpu"), torch.device("cpu")
    if name == "deepspeed":
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
        from impl.peers.deepspeed import DeepSpeedTrainer  # its import takes seconds

        return DeepSpeedTrainer(run, data, mesh, cpu)
    return {"ours": Trainer, "fsdp": fsdp.FSDPTrainer}[name](run, data, mesh, cpu)


def owned_weights(trainer: Trainer, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for part in trainer.optimizer.owned():
        if part.is_writer:
            weights[part.name].view(-1)[part.start : part.stop] = part.tensors["weight"]
    return weights


def train_all(data: Path) -> dict[tuple[str, int, str], Trained]:
    """Every engine, one after another, in one pair of processes."""
    folder, found = TokenFolder.open(data), {}
    shapes: dict[str, torch.Size] = {}
    for name, stage, precision in TRAINED:
        if name == "deepspeed" and not HAS_DEEPSPEED:
            continue
        run = replace(RUN, plan=replace(RUN.plan, zero_stage=stage), precision=precision)
        trainer = engine(name, run, folder)
        shapes = shapes or {parameter: p.shape for parameter, p in trainer.model.named_parameters()}
        steps = [trainer.step(i) for i in range(run.train.steps)]
        weights = owned_weights(trainer, shapes) if name == "ours" else trainer.weights()
        found[name, stage, precision] = Trained(
            np.array([[step.loss.item(), step.grad_norm.item(), step.lr] for step in steps]),
            {parameter: weight.float().numpy() for parameter, weight in weights.items()},
        )
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


@pytest.fixture(scope="module")
def trained(data: Path) -> list[dict[tuple[str, int, str], Trained]]:
    return run_ranks(2, train_all, data)


def whole_weights(ranks: list[Trained]) -> dict[str, torch.Tensor]:
    """Ours, put together from what the ranks own, under the peers' names."""
    whole = {name: torch.from_numpy(sum(rank.weights[name] for rank in ranks)) for name in ranks[0].weights}
    theirs = rearranged(whole, RUN.model, RUN.model.vocabulary(0))
    del theirs["head.weight"]  # tied
    return theirs


@pytest.mark.parametrize(("name", "stage", "precision"), TRAINED)
def test_losses_norms_and_weights_equal_those_of_our_stage(
    name: str, stage: int, precision: Precision, trained: list[dict[tuple[str, int, str], Trained]]
) -> None:
    """Ours are held against our stage 0, peers against our own of their stage."""
    if name == "deepspeed" and not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    against = ("ours", 0 if name == "ours" else stage, precision)
    loss, norm, weight = {"fp32": (1e-6, 1e-5, 1e-5), "bf16": (1e-3, 1e-2, 1e-2)}[precision]
    for rank in trained:
        steps, expected = rank[name, stage, precision].steps, rank[against].steps
        np.testing.assert_allclose(steps[:, 0], expected[:, 0], rtol=loss)
        np.testing.assert_allclose(steps[:, 1], expected[:, 1], rtol=norm)
        np.testing.assert_array_equal(steps[:, 2], expected[:, 2])
        assert expected[-1, 0] < expected[0, 0]
        assert (expected[:, 1] > RUN.train.clip_norm).any(), "clipping was never at work"
    ours = whole_weights([rank[against] for rank in trained])
    ranks = [rank[name, stage, precision] for rank in trained]
    found = [whole_weights(ranks)] if name == "ours" else [rank.weights for rank in ranks]
    for weights in found:
        assert weights.keys() == ours.keys()
        for parameter, expected in ours.items():
            difference = np.linalg.norm(np.asarray(weights[parameter]) - expected.numpy())
            assert difference < weight * expected.norm(), parameter


CHANGES = [
    ({"model": ModelConfig(family="bert")}, "bert"),
    ({"model": ModelConfig(dropout=0.1)}, "dropout 0.1"),
    ({"plan": Plan(dp=2, tp=2, zero_stage=2)}, "tp 2"),
    ({"plan": Plan(dp=2, pp=2, zero_stage=2)}, "pp 2"),
    ({"plan": Plan(dp=2, zero_stage=2, recompute="full")}, "recompute 'full'"),
    ({"plan": Plan(dp=2, zero_stage=2, offload_optimizer=True)}, "offload_optimizer"),
    ({"precision": "fp16"}, "fp16"),
]


@pytest.mark.parametrize(
    ("changes", "word"), [*CHANGES, ({"plan": Plan(dp=2)}, "zero_stage 0"), ({"compile": True}, "compile")]
)
def test_what_fsdp_lacks_is_refused(changes: dict[str, Any], word: str, data: Path) -> None:
    valid = Run(plan=Plan(dp=2, zero_stage=2))
    assert fsdp.why_invalid(valid) is None
    run = replace(valid, **changes)
    assert word in (fsdp.why_invalid(run) or "")
    with pytest.raises(InputError, match=word):
        fsdp.FSDPTrainer(run, TokenFolder.open(data), None, torch.device("cpu"))  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_what_deepspeed_lacks_is_refused(data: Path) -> None:
    from impl.peers.deepspeed import DeepSpeedTrainer, why_invalid

    valid = Run(plan=Plan(dp=2, zero_stage=2))
    assert why_invalid(valid) is None
    for changes, word in [
        *CHANGES,
        ({"precision": "fp64"}, "fp64"),
        ({"precision": "bf16", "plan": Plan(dp=2)}, "zero_stage 0"),
    ]:
        run = replace(valid, **changes)
        assert word in (why_invalid(run) or "")
        with pytest.raises(InputError, match=word):
            DeepSpeedTrainer(run, TokenFolder.open(data), None, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
