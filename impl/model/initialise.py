"""Initial weights that depend on the seed and the parameter's name only, never on the layout."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from impl.model.bert import BERT, MultipleChoice
from impl.model.config import ModelConfig
from impl.model.gpt import GPT
from impl.pipeline.stage import Stage, split
from impl.seeding import derive
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import shards_of

Model = TypeVar("Model", bound=GPT | BERT | MultipleChoice)


def build_model(
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    stages: Sequence[Stage] | None = None,
    *,
    recompute_core: bool = False,
) -> GPT | BERT:
    """This rank's part of the model with Megatron's initial weights: normal(0, 0.02), residual projections scaled by
    1/sqrt(2L).

    Args:
        stages: those that this rank owns; None: all of a model in one stage.
        recompute_core: compute attention's scores and their product with v anew in the backward pass.
    Source: Megatron-LM 2019, section 4.2. Biases are 0, LayerNorm is the identity.
    """
    family = GPT if config.family == "gpt" else BERT
    stages = stages or split(config, vocab_size, 1)
    model = family(config, vocab_size, tp, stages, recompute_core=recompute_core)
    return _initialised(model.to(dtype), config, seed, tp)


def build_choices(
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    stages: Sequence[Stage],
    *,
    recompute_core: bool = False,
) -> MultipleChoice:
    """The same of BERT that answers questions; what it shares with BERT has BERT's initial weights."""
    model = MultipleChoice(config, vocab_size, tp, stages, recompute_core=recompute_core)
    return _initialised(model.to(dtype), config, seed, tp)


def _initialised(model: Model, config: ModelConfig, seed: int, tp: TensorParallel) -> Model:
    shards = shards_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_residual = name.endswith(("attention.projection.weight", "mlp.down.weight"))
            std = config.init_std / math.sqrt(2 * config.num_layers) if is_residual else config.init_std
            shard = shards.get(name)
            shape = shard.whole_shape(parameter.shape) if shard else parameter.shape
            whole = _normal(shape, std, derive(seed, "init", name))
            with torch.no_grad():
                parameter.copy_(shard.take(whole, tp.part) if shard else whole)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def _normal(shape: list[int] | torch.Size, std: float, seed: int) -> Tensor:
    # drawn in fp32 whatever the weight's precision: bf16 starts at the rounded fp32 weights
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
