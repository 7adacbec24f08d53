"""The training recipe: batch, optimizer and learning-rate schedule."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, Count, Fraction, Positive


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Recipe:
    """Recipe of training, independent of model, data and plan. AdamW, as in Megatron-LM 2019, section 4.2."""

    steps: Positive = 100
    global_batch: Positive = 16
    """Sequences in one optimizer step, over all data-parallel ranks."""
    microbatch: Positive = 8
    """Sequences in one forward and backward pass of one rank."""
    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: Count = 10
    """Steps of linear warm-up of the learning rate."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: NonNegativeFloat = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: initial weights and learning rates scale with width and depth, so that the best `lr` of the base model is
    best at other sizes. Heads need the base's size, and `model.init_std` its value."""
    base_hidden_size: Positive | None = None
    """mup: hidden size of the base model; None: the model's own."""
    base_layers: Positive | None = None
    """mup: layers of the base model; None: the model's own, so that depth changes nothing."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    initial_loss_scale: PositiveFloat = 2.0**16
    """fp16: initial factor of the loss, halved at every step whose gradients overflow, which is skipped."""
    loss_scale_window: Positive = 1000
    """fp16: steps without an overflow after which the loss scale is doubled."""
