"""The common part of peer engines: data, evaluation, gradient clipping and AdamW on master weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from impl.collectives import all_reduce_sum, broadcast, receive_start, send_start
from impl.cost.place import ranks_of_stages
from impl.data.batches import causal_batch
from impl.data.tokens import TokenFolder
from impl.device import Device
from impl.evaluate import Evaluation, evaluate
from impl.optim import learning_rate
from impl.peers.validity import part_of
from impl.pipeline.engine import Watch
from impl.precision import name_of
from impl.recipe import Recipe
from impl.run import Run
from impl.squares import squares
from impl.train import MASTERS, WEIGHTS, Step, to_device


class Peer(ABC):
    """Engine that trains one run as `impl.train.Trainer` does."""

    model: nn.Module
    """This rank's part of the model, as the engine calls it."""
    adam: torch.optim.AdamW
    counted: Tensor | float = 1.0
    """1 for each parameter whose norm counts on this rank, 0 where another rank of `group` has the same."""

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        self.run, self.data, self.tokens = run, data, data.tokens("train")
        self.device, self.there = device, Device.of(device)
        self.dp_group = mesh.get_group("dp")
        self.group = mesh.get_group("tp")
        """Ranks that have different parts of the model."""
        self.vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        self.build(mesh)

    @abstractmethod
    def build(self, mesh: DeviceMesh) -> None:
        """Create `model` with its initial weights, and what trains it."""

    @abstractmethod
    def step(self, i: int, watch: Watch | None = None) -> Step:
        """Run forward and backward over the i-th global batch, then update."""

    def settings(self) -> dict[str, Any]:
        """Return the part of the engine used, its version and its resolved configuration, ready for JSON."""
        run = self.run
        return {
            "part": part_of(run),
            "version": torch.__version__,
            "weights": name_of(WEIGHTS[run.precision]),
            "accumulates": name_of(self.accumulated),
            "optimizer": {"name": "AdamW", "fused": True, "weights": name_of(MASTERS[run.precision])},
            "recompute": "layers" if run.plan.recompute == "full" else "none",
            "compile": "layers" if run.compile else "none",
        }

    @property
    def accumulated(self) -> torch.dtype:
        """Type in which gradients are accumulated and reduced."""
        return (MASTERS if self.run.fp32_gradients else WEIGHTS)[self.run.precision]

    @property
    def widens(self) -> bool:
        """True if gradients are accumulated in a wider type than autograd's."""
        return self.accumulated != WEIGHTS[self.run.precision]

    def evaluate(self, *, final: bool) -> list[Evaluation]:
        """Run validation, and after the last step the run's other evaluations; results are equal on every rank."""
        self.model.eval()
        with torch.no_grad():
            found = evaluate(self.run, self.data, self, self.dp_group, final=final, batch=self.run.train.microbatch)
        self.model.train()
        return found

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return -log p of every target and whether it is the likeliest token. Shapes: [b, s] -> [b, s], [b, s].

        A whole microbatch is computed; its padding rows and positions change nothing.
        """
        count, length = inputs.shape
        padding = ((0, self.run.train.microbatch - count), (0, self.run.model.seq_len - length))
        whole = [to_device(np.pad(part, padding), self.there) for part in (inputs, targets)]
        nats, is_likeliest = self.score(*whole)[:, :count, :length].cpu()
        return nats, is_likeliest > 0

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return results of `next_token` as one tensor, on all ranks. Shapes: [b, s], [b, s] -> float32 [2, b, s]."""
        return self.scores(self.model(inputs), targets)

    def relay(self, stages: Mapping[int, Callable[[Tensor], Tensor]], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return `score` by the stages of a pipeline over `group`, one after another.

        For engines whose own forward pass returns only the mean loss. Communication: a send of [b s, h] between two
        stages, a broadcast of the result.
        """
        rank_of, x = ranks_of_stages(self.run), inputs
        last = len(rank_of) - 1
        for i, me in enumerate(rank_of):
            if me == self.group.rank():
                if i > 0 and rank_of[i - 1] != me:
                    x = receive_start(self.between(self.device), rank_of[i - 1], self.group).wait()
                x = stages[i](x)
                if i < last and rank_of[i + 1] != me:
                    send_start(x.contiguous(), rank_of[i + 1], self.group).wait()
        scores = torch.empty(2, *targets.shape, device=self.device)
        return broadcast(self.scores(x, targets) if last in stages else scores, rank_of[last], self.group)

    def between(self, device: torch.device | str, width: int | None = None) -> Tensor:
        """Return an empty tensor like a stage's output for a microbatch. Shapes: [b s, width]; None: [b s, h]."""
        model, tokens = self.run.model, self.run.train.microbatch * self.run.model.seq_len
        return torch.empty(tokens, width or model.hidden_size, dtype=WEIGHTS[self.run.precision], device=device)

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return both results of `next_token` from the logits. Shapes: [b s, V], [b, s] -> float32 [2, b, s]."""
        goal = targets.flatten()
        nats = F.cross_entropy(logits.to(MASTERS[self.run.precision]), goal, reduction="none")
        return torch.stack([nats.float(), (logits.argmax(1) == goal).float()]).view(2, *targets.shape)

    def batch(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples. Shapes: [b, s] both."""
        batch = causal_batch(self.tokens, samples, seq_len=self.run.model.seq_len, seed=self.run.seed)
        return to_device(batch.inputs, self.there), to_device(batch.targets, self.there)

    def set_learning_rate(self, i: int) -> float:
        """Set AdamW's learning rate to that of the i-th step."""
        lr = learning_rate(self.run.train, i)
        for group in self.adam.param_groups:
            group["lr"] = lr
        return lr

    def share(self, i: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the microbatches of a data-parallel rank in the i-th global batch. Shapes: [b, s] both."""
        count, size = self.run.microbatches, self.run.train.microbatch
        for k in range(rank * count, (rank + 1) * count):
            first = i * self.run.train.global_batch + k * size
            yield self.batch(np.arange(first, first + size))

    def mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a microbatch's share of the mean loss over the microbatches. Shapes: [b s, V], [b, s] -> scalar."""
        wide = logits.to(MASTERS[self.run.precision])
        return F.cross_entropy(wide, targets.flatten()) / self.run.microbatches

    def clip(self, grads: list[Tensor]) -> Tensor:
        """Scale the gradients down to the global L2 norm `train.clip_norm` (0: never), and return the norm before."""
        norm = all_reduce_sum((squares(grads) * self.counted).sum(), self.group).sqrt()
        if limit := self.run.train.clip_norm:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


class PeerTrainer(Peer):
    """Base of engines whose optimizer update is done here.

    A subclass builds its part of the model, passes it to `keep`, and adds to `microbatch` what its passes need.
    """

    is_first = is_last = True
    """True for the first or last of a step's microbatches."""

    def keep(self, model: nn.Module, *, at_once: bool = True) -> None:
        """Register this rank's part of the model: create master weights for its parameters, and AdamW.

        Args:
            at_once: add gradients to wider ones of the masters as soon as autograd has computed them.
        """
        dtype = MASTERS[self.run.precision]
        self.masters = {p: nn.Parameter(own(p).detach().to(dtype)) for p in model.parameters()}
        self.adam = adamw(self.masters.values(), self.run.train)
        for parameter in self.masters if at_once and self.widens else ():
            parameter.register_post_accumulate_grad_hook(self.hand_over)

    def backward(self, i: int) -> Tensor:
        """Accumulate the gradient of the i-th global batch's mean loss for AdamW, and return that loss."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.forget()
        for k, (inputs, targets) in enumerate(self.share(i, self.dp_group.rank()), 1):
            self.is_first, self.is_last = k == 1, k == self.run.microbatches
            loss += own(self.microbatch(inputs, targets).detach())
        self.hand_all_over()
        return all_reduce_sum(loss, self.dp_group) / self.dp_group.size()

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run a microbatch's forward and backward pass, and return its share of this rank's mean loss."""
        loss = self.mean(self.model(inputs), targets)
        loss.backward()
        return loss

    def step(self, i: int, watch: Watch | None = None) -> Step:
        loss = self.backward(i)
        norm = self.clip([master.grad for master in self.masters.values() if master.grad is not None])
        lr = self.set_learning_rate(i)
        self.adam.step()
        rounded = [(own(p), m) for p, m in self.masters.items() if p.dtype != m.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])
        return Step(loss, norm, lr)

    def forget(self) -> None:
        """Drop the old gradients, so that autograd stores its own tensor without a copy."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None

    def hand_all_over(self) -> None:
        for parameter in self.masters:
            if parameter.grad is not None:
                self.hand_over(parameter)

    @torch.no_grad()
    def hand_over(self, parameter: Tensor) -> None:
        """Move a parameter's gradient to its master, accumulating in the master's precision if that is wider."""
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


def adamw(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Return PyTorch's fused AdamW, without weight decay of biases and norms."""
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
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
