"""The loss scale of fp16 training: gradients too small for fp16 are made larger, and made smaller again before use."""

import torch

from impl.recipe import Recipe


class LossScale:
    """Loss scale of fp16: halved at a step whose gradients overflow, doubled after `loss_scale_window` steps without.

    Source: Micikevicius et al. 2018 (1710.03740), section 3.2. For other precisions than fp16 it is 1 and stays 1.
    """

    def __init__(self, recipe: Recipe, precision: str) -> None:
        self.is_dynamic = precision == "fp16"
        self.scale = recipe.initial_loss_scale if self.is_dynamic else 1.0
        self.window = recipe.loss_scale_window
        self.good_steps = 0
        """In a row, since the scale was last changed."""
        self.skipped = 0
        """Steps in all whose gradients overflowed; they change nothing else."""

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale once a step's gradients are known."""
        if not self.is_dynamic:
            return
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.skipped += 1
            self.scale /= 2
        elif self.good_steps == self.window:
            self.good_steps = 0
            self.scale *= 2


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type without its module, as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
