"""Initial weights that depend on the seed and the parameter's name only, never on the layout."""

import math

import torch
from torch import Tensor, nn

from impl.model.bert import BERT
from impl.model.config import ModelConfig
from impl.model.gpt import GPT
from impl.seeding import derive


def build_model(config: ModelConfig, vocab_size: int, seed: int, dtype: torch.dtype) -> GPT | BERT:
    """The model with Megatron's initial weights: normal(0, 0.02), residual projections scaled by 1/sqrt(2L).

    Source: Megatron-LM 2019, section 4.2. Biases are 0, LayerNorm is the identity.
    """
    model = (GPT if config.family == "gpt" else BERT)(config, vocab_size).to(dtype)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = config.init_std
            if name.endswith(("attention.projection", "mlp.down")):
                std /= math.sqrt(2 * config.num_layers)
            _normal(module.weight, std, derive(seed, "init", f"{name}.weight"))
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
    return model


def _normal(weight: Tensor, std: float, seed: int) -> None:
    # drawn in fp32 whatever the weight's precision: bf16 starts at the rounded fp32 weights
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=random))
