"""The training recipe: batch, optimizer and learning-rate schedule."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, Count, Fraction, Positive


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Recipe:
    """How a model is trained, whatever the model, the data and the plan. AdamW, as in Megatron-LM 2019, section 4.2."""

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
    """mup: initial weights and learning rates follow width and depth so that the base's best `lr` is other sizes' too.
    Heads are to have the base's size, `model.init_std` its value."""
    base_hidden_size: Positive | None = None
    """mup: hidden size at which it is the standard parametrization."""
    base_layers: Positive | None = None
    """mup: layers at which it is; None: as many as the model has, the depth changes nothing."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    initial_loss_scale: PositiveFloat = 2.0**16
    """fp16: the loss is multiplied by this, halved at every step whose gradients overflow, which is then skipped."""
    loss_scale_window: Positive = 1000
    """fp16: steps without an overflow after which the loss scale is doubled."""
