"""AdamW on fp32 master weights, and the learning-rate schedule."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from impl.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then decay to `min_lr` at the last step.

    Source: Megatron-LM 2019, section 4.2 (cosine), PTD-P's scripts (linear).
    """
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    remaining = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[recipe.decay]
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * remaining


class MasterAdamW:
    """AdamW whose weights and moments are at least fp32; the model's weights are rounded copies when they are smaller.

    Biases and norms are not decayed. Memory: 8 bytes per fp32 parameter, 12 per bf16 one, besides weight and gradient.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], gradients: Mapping[nn.Parameter, Tensor], recipe: Recipe
    ) -> None:
        self.recipe = recipe
        self.rounded: list[tuple[Tensor, Tensor]] = []
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        decayed, kept = [], []
        for parameter in named.values():
            master = parameter
            if parameter.dtype != gradients[parameter].dtype:
                master = nn.Parameter(parameter.detach().to(gradients[parameter].dtype))
                self.rounded.append((parameter.detach(), master.detach()))
            master.grad = gradients[parameter]
            self.masters[parameter] = master
            (decayed if parameter.dim() > 1 else kept).append(master)
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}],
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            fused=True,
        )

    def step(self, lr: float) -> None:
        """One update with this learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        if self.rounded:
            torch._foreach_copy_([w for w, _ in self.rounded], [m for _, m in self.rounded])

    def states(self) -> dict[nn.Parameter, list[Tensor]]:
        """What is kept of each of the model's parameters besides weight and gradient, once a step was taken."""
        states: dict[nn.Parameter, list[Tensor]] = {}
        for parameter, master in self.masters.items():
            moments = [self.adam.state[master][name] for name in ("exp_avg", "exp_avg_sq") if self.adam.state[master]]
            states[parameter] = [*moments, *([] if master is parameter else [master])]
        return states
