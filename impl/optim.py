"""AdamW on fp32 master weights of what this rank owns, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.adamw import adamw

from impl.grouping import by_key
from impl.recipe import Recipe
from impl.zero.partition import Piece

if TYPE_CHECKING:
    from impl.device import Device


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: linear warm-up over `warmup_steps`, then decay to `min_lr`.

    It would reach that a step after the last.

    Source: Megatron-LM 2019, section 4.2 (cosine), PTD-P's scripts (linear).
    """
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    remaining = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[recipe.decay]
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * remaining


class Share(NamedTuple):
    """Part of one bucket that this rank updates."""

    weights: Tensor
    """Weights in the model's precision. Shapes: [n]."""
    gradient: Tensor
    """Gradient of the weights. Shapes: [n]."""
    pieces: Mapping[Piece, slice]
    """Range of each parameter's part in these tensors; the rest is padding."""
    is_first_copy: bool
    """True if no lower rank updates the same elements."""


class Owned(NamedTuple):
    """The training state of a part of a parameter: elements `start` to `stop` of it, flattened."""

    name: str
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """Master weight and moments, by AdamW's names; writing to them changes the training. Shapes: [stop - start]."""
    is_writer: bool
    """True if no lower rank has the same elements."""


TINY = 1e-30
"""Epsilon where a change is the gradient over its own size."""


class Rate(NamedTuple):
    """Rate at which a parameter changes, relative to the recipe's."""

    factor: float
    """Factor of the learning rate."""
    decay: float
    """Weight decay; biases and norms have none."""
    fixed: float | None = None
    """Size of every change, against the gradient's sign, whatever its size and the learning rate; None: AdamW's."""


class _Group(NamedTuple):
    """The pieces of a share that have the same rate; what the update takes of each."""

    rate: Rate
    places: list[slice]
    weights: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    updates: list[Tensor]
    """Number of updates so far, for the moments' bias correction."""


class MasterAdamW:
    """AdamW whose weights and moments are at least fp32; the model's weights are rounded copies when they are smaller.

    Memory: 8 bytes per fp32 parameter that is owned, 12 per smaller one, besides weight and gradient.

    Args:
        rates: of each parameter, by its name.
        dtype: of master weights and moments.
        offload: keep them in the memory of this device's host, and update them there (ZeRO-Offload, 2101.06840, 4.1).
        publish: called for each share, by its index, when its weights are new.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        rates: Mapping[str, Rate],
        recipe: Recipe,
        *,
        dtype: torch.dtype,
        offload: "Device | None",
        publish: Callable[[int], None],
    ) -> None:
        self.shares, self.recipe, self._publish = shares, recipe, publish
        self.masters: list[Tensor] = []
        self.moments: list[Tensor] = []
        self._groups: list[list[_Group]] = []
        self._updates = 0
        self._offload = offload
        for share in shares:
            device = torch.device("cpu") if offload else share.weights.device
            is_apart = bool(offload) or share.weights.dtype != dtype
            master = share.weights.detach().to(device, dtype, copy=is_apart)
            moments = torch.zeros(2, len(master), dtype=dtype, device=device)
            self.masters.append(master)
            self.moments.append(moments)
            self._groups.append([])
            by_rate = by_key((rates[piece.name], place) for piece, place in share.pieces.items())
            for rate, places in by_rate.items():
                weights, means, squares = ([whole[at] for at in places] for whole in (master, *moments))
                updates = [torch.zeros((), device=device) for _ in places]
                self._groups[-1].append(_Group(rate, places, weights, means, squares, updates))

    def step(self, lr: float, factor: Tensor | None = None) -> None:
        """Do one update with this learning rate, share by share.

        Args:
            factor: scalar on all gradients, which multiplies them once they are in the masters' type: with the loss
                scale taken from them, small ones would be lost in fp16.
        """
        self._updates += 1
        for i, (share, groups) in enumerate(zip(self.shares, self._groups, strict=True)):
            gradient = share.gradient
            if self._offload:
                gradient = self._offload.fetch(gradient)
                self._offload.wait()
            gradient = gradient.to(self.masters[i].dtype)
            if factor is not None:
                gradient.mul_(factor.to(gradient.device))
            with record_function("Optimizer.step#AdamW"):  # as a profile calls those of torch.optim
                for group in groups:
                    fixed, recipe = group.rate.fixed, self.recipe
                    # without memory of other steps the change is the gradient over its own size
                    betas = (recipe.beta1, recipe.beta2, recipe.eps) if fixed is None else (0.0, 0.0, TINY)
                    adamw(
                        group.weights,
                        [gradient[place] if fixed is None else gradient[place].sign() for place in group.places],
                        group.means,
                        group.squares,
                        [],
                        group.updates,
                        fused=True,
                        amsgrad=False,
                        beta1=betas[0],
                        beta2=betas[1],
                        lr=lr * group.rate.factor if fixed is None else fixed,
                        weight_decay=group.rate.decay,
                        eps=betas[2],
                        maximize=False,
                    )
            del gradient  # what was converted is not kept
            self._round(i)

    def publish(self) -> None:
        """Copy the master weights to the model's weights and publish them, after the masters were overwritten."""
        for i in range(len(self.shares)):
            self._round(i)

    def _round(self, i: int) -> None:
        if self._offload:
            self._offload.put(self.masters[i], self.shares[i].weights)
        elif self._is_apart(i):
            self.shares[i].weights.copy_(self.masters[i])
        self._publish(i)

    def owned(self) -> Iterator[Owned]:
        """Yield all that this rank updates, piece by piece."""
        for share, master, (mean, square) in zip(self.shares, self.masters, self.moments, strict=True):
            for (name, start, stop, _), place in share.pieces.items():
                tensors = {"weight": master[place], "exp_avg": mean[place], "exp_avg_sq": square[place]}
                yield Owned(name, start, stop, tensors, share.is_first_copy)

    @property
    def updates(self) -> int:
        """Number of updates so far, for the moments' bias correction."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        for step in (step for groups in self._groups for group in groups for step in group.updates):
            step.fill_(count)

    def tensors(self) -> list[Tensor]:
        """Return the optimizer's moments, and its master weights where they are not the model's own."""
        return self.moments + [master for i, master in enumerate(self.masters) if self._is_apart(i)]

    def _is_apart(self, i: int) -> bool:
        return self.masters[i].data_ptr() != self.shares[i].weights.data_ptr()
