"""A model with its initial weights at once, for other engines; training draws them slice by slice."""

from collections.abc import Sequence

import torch

from impl.model.bert import BERT, MultipleChoice
from impl.model.config import ModelConfig
from impl.model.gpt import GPT
from impl.model.initialise import InitialWeights, build_structure
from impl.pipeline.stage import Stage, split
from impl.tensor_parallel.group import TensorParallel


def build_model(
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    stages: Sequence[Stage] | None = None,
) -> GPT | BERT:
    """Return this rank's part of the model with its initial weights, on the host.

    Args:
        stages: those that this rank owns; None: all of a model in one stage.
    """
    stages = stages or split(config, vocab_size, 1)
    model = build_structure(config, vocab_size, dtype, tp, stages).to_empty(device="cpu")
    assert not isinstance(model, MultipleChoice)
    initial = InitialWeights(model, config, seed, tp)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.cat([*initial(name, 0, parameter.numel())]).view_as(parameter))
    return model
