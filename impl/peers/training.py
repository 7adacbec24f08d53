"""What peer engines have in common: data, gradient clipping and AdamW on master weights, as in our own training."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.data.batches import causal_batch
from impl.data.tokens import TokenFolder
from impl.optim import learning_rate
from impl.recipe import Recipe
from impl.run import Run
from impl.train import MASTERS, Step


class Peer(ABC):
    """Another engine that trains one run as `impl.train.Trainer` does."""

    def __init__(self, run: Run, data: TokenFolder, device: torch.device) -> None:
        self.run, self.device, self.tokens = run, device, data.tokens("train")

    @abstractmethod
    def step(self, i: int) -> Step:
        """Forward and backward over the i-th global batch, then the update."""

    def batch(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets. Shapes: [b, s] both."""
        batch = causal_batch(self.tokens, samples, seq_len=self.run.model.seq_len, seed=self.run.seed)
        place = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return place(batch.inputs), place(batch.targets)

    def share(self, i: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The microbatches of a data-parallel rank in the i-th global batch. Shapes: [b, s] both."""
        count, size = self.run.microbatches, self.run.train.microbatch
        for k in range(rank * count, (rank + 1) * count):
            first = i * self.run.train.global_batch + k * size
            yield self.batch(np.arange(first, first + size))

    def mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A microbatch's part of the mean loss over the microbatches. Shapes: [b s, V], [b, s] -> scalar."""
        wide = logits.to(MASTERS[self.run.precision])
        return F.cross_entropy(wide, targets.flatten()) / self.run.microbatches


class PeerTrainer(Peer):
    """What engines do that leave the update to us.

    A subclass makes its part of the model, gives it to `keep`, and says how a global batch's gradient is computed.
    """

    def keep(self, model: nn.Module) -> None:
        """Train this rank's part of the model: master weights for its parameters, and AdamW."""
        dtype = MASTERS[self.run.precision]
        self.masters = {p: nn.Parameter(own(p).detach().to(dtype)) for p in model.parameters()}
        self.adam = adamw(self.masters.values(), self.run.train)

    @abstractmethod
    def backward(self, i: int) -> Tensor:
        """Leave the gradient of the i-th global batch's mean loss to AdamW; returns that loss."""

    @abstractmethod
    def norm(self, squares: Tensor) -> Tensor:
        """The global L2 norm of the gradients, from the squared norms of this rank's, in the order of `masters`."""

    def step(self, i: int) -> Step:
        loss = self.backward(i)
        norm = self._clip(self.run.train.clip_norm)
        lr = learning_rate(self.run.train, i)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        rounded = [(own(p), m) for p, m in self.masters.items() if p.dtype != m.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])
        return Step(loss, norm, lr)

    def forget(self) -> None:
        """Drop the old gradients: autograd then hands its own tensor over, with no copy."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None

    @torch.no_grad()
    def hand_over(self, parameter: Tensor) -> None:
        """Give a parameter's gradient to its master, which adds those of smaller precision up in its own."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        master, grad = self.masters[parameter], own(parameter.grad)
        if parameter.dtype == master.dtype:
            master.grad = grad
            return
        if master.grad is None:
            master.grad = grad.to(master.dtype)
        else:
            master.grad.add_(grad)
        parameter.grad = None

    def _clip(self, limit: float) -> Tensor:
        """Scale the gradients down to the global L2 norm `limit`; 0: never. Returns the norm before."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = self.norm(torch.stack(torch._foreach_norm(grads)).square())
        if limit:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def adamw(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """PyTorch's fused AdamW; biases and norms are not decayed."""
    parameters = list(parameters)
    decayed, kept = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
    )


def own(tensor: Tensor) -> Tensor:
    """This rank's part, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
