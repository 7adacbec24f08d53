"""GPT made tensor parallel by PyTorch's own DTensor styles, as its documentation does it, at its fastest settings.

`parallelize_module` splits plain `nn.Linear`, `nn.LayerNorm` and `nn.Embedding`. All tokens of a microbatch are one
dim: sequence parallelism then gathers and scatters neighbouring rows without a copy.
"""

from typing import Any

import torch
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
from impl.peers.gpt import GPT, initial_weights, places
from impl.peers.training import PeerTrainer, own
from impl.pipeline.stage import split
from impl.run import Run
from impl.train import WEIGHTS


def parallelize(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Split the model over a mesh with one axis, and return the styles by module.

    Both ends of the tied matrix are split by rows of the vocabulary. Between the split blocks activations are
    plain tensors: DTensor's dispatch would only add to their cost.
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
    return styles


class DTensorTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's tensor-parallel axis.

    Clipping and AdamW work on the ranks' own parts: `clip_grad_norm_` refuses plain parameters beside DTensors.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(run, data, mesh, device)
        self.group = mesh.get_group("tp")
        here = places(run)
        if run.plan.sequence_parallel:
            here = here.chunk(self.group.size())[self.group.rank()]
        (whole,) = split(run.model, self.vocab_size, 1)
        self.model = GPT(run, self.vocab_size, whole, here).to(WEIGHTS[run.precision])
        self.model.load_state_dict(initial_weights(run, self.vocab_size, mesh))
        self.model.to(device)
        self.styles = parallelize(self.model, mesh["tp"], sequence_parallel=run.plan.sequence_parallel)
        self.keep(self.model)
        is_split = [isinstance(p, DTensor) and p.placements[0].is_shard() for p in self.masters]
        self.is_split = torch.tensor(is_split, device=device)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"styles": {name: repr(style) for name, style in self.styles.items()}}

    def backward(self, i: int) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.forget()
        for k, (inputs, targets) in enumerate(self.share(i, 0), 1):
            with loss_parallel():
                part = self.mean(self.model(inputs), targets)
                part.backward()
            loss += own(part.detach())
            if k == self.run.microbatches or self.widens:
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
        split, whole = (squares * self.is_split).sum(), (squares * ~self.is_split).sum()
        return (all_reduce_sum(split, self.group) + whole).sqrt()

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs)
        return self.scores(logits.full_tensor(), targets)
