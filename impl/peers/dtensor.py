"""GPT made tensor parallel by PyTorch's own DTensor styles, as its documentation does it, at its fastest settings.

`parallelize_module` splits plain `nn.Linear`, `nn.LayerNorm` and `nn.Embedding`. All tokens of a microbatch are one
dim: sequence parallelism then gathers and scatters neighbouring rows without a copy.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from impl.collectives import all_reduce_sum
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.peers.gpt import GPT, initial_weights, places, why_model_is_invalid
from impl.peers.training import PeerTrainer, own
from impl.pipeline.stage import split
from impl.run import Run
from impl.train import MASTERS, WEIGHTS


def why_invalid(run: Run) -> str | None:
    """What this engine cannot do of a run, in one line; None: it can train it."""
    lacks = why_model_is_invalid(run, "tp")
    return f"the dtensor engine has no {', '.join(lacks)}" if lacks else None


def parallelize(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the model over a mesh with one axis; both ends of the tied matrix are split by rows of the vocabulary.

    Between the split blocks activations are plain tensors: DTensor's dispatch would only add to their cost.
    """
    between = Shard(0) if sequence_parallel else Replicate()
    into, out_of = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    styles: dict[str, ParallelStyle] = {
        "trunk.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "trunk.layers.*.attention.qkv": into,
        "trunk.layers.*.attention.projection": out_of,
        "trunk.layers.*.mlp.up": into,
        "trunk.layers.*.mlp.down": out_of,
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence_parallel:
        for norm in ("trunk.layers.*.attention_norms.input", "trunk.layers.*.mlp_norms.input", "trunk.final_norm"):
            styles[norm] = SequenceParallel(sequence_dim=0)
        assert model.trunk.positions is not None
        distribute_module(model.trunk.positions, mesh)  # whole on every rank
        styles["trunk.positions"] = PrepareModuleInputOutput(
            input_layouts=between,
            desired_input_layouts=between,
            output_layouts=between,
            desired_output_layouts=between,
        )
    parallelize_module(model, mesh, styles)
    model.tie()


class DTensorTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's tensor-parallel axis.

    Clipping and AdamW work on the ranks' own parts: `clip_grad_norm_` refuses plain parameters beside DTensors.

    Raises:
        InputError: the run needs something that this engine lacks.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        if reason := why_invalid(run):
            raise InputError(reason)
        super().__init__(run, data, device)
        self.group = mesh.get_group("tp")
        vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        here = places(run)
        if run.plan.sequence_parallel:
            here = here.chunk(self.group.size())[self.group.rank()]
        (whole,) = split(run.model, vocab_size, 1)
        self.model = GPT(run.model, vocab_size, whole, here).to(WEIGHTS[run.precision])
        self.model.load_state_dict(initial_weights(run, vocab_size, mesh))
        self.model.to(device)
        parallelize(self.model, mesh["tp"], sequence_parallel=run.plan.sequence_parallel)
        self.keep(self.model)

    def backward(self, i: int) -> Tensor:
        count, size = self.run.microbatches, self.run.train.microbatch
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.forget()
        for k in range(count):
            first = i * self.run.train.global_batch + k * size
            inputs, targets = self.batch(np.arange(first, first + size))
            with loss_parallel():
                logits = self.model(inputs).to(MASTERS[self.run.precision])
                part = F.cross_entropy(logits, targets.flatten()) / count
                part.backward()
            loss += own(part.detach())
            if k == count - 1 or self.run.precision == "bf16":
                self._hand_all_over()
        self._sum_partial()
        return loss

    def _hand_all_over(self) -> None:
        self.partial: list[Tensor] = []
        for parameter, master in self.masters.items():
            grad = parameter.grad
            self.hand_over(parameter)
            if isinstance(grad, DTensor) and grad.placements[0].is_partial():
                assert master.grad is not None
                self.partial.append(master.grad)

    def _sum_partial(self) -> None:
        """Sum the gradients of whole parameters that met only this rank's tokens. Communication: one all-reduce."""
        if self.partial:
            flat = all_reduce_sum(torch.cat([grad.flatten() for grad in self.partial]), self.group)
            parts = flat.split([grad.numel() for grad in self.partial])
            torch._foreach_copy_(self.partial, [part.view_as(g) for part, g in zip(parts, self.partial, strict=True)])

    def norm(self, squares: Tensor) -> Tensor:
        is_split = [isinstance(p, DTensor) and p.placements[0].is_shard() for p in self.masters]
        split = torch.tensor(is_split, device=self.device)
        return (all_reduce_sum(squares[split].sum(), self.group) + squares[~split].sum()).sqrt()
