"""GPT and Llama made tensor parallel by PyTorch's DTensor styles as its documentation does it, at its fastest settings.

`parallelize_module` splits plain `nn.Linear`, `nn.LayerNorm` and `nn.Embedding`. All tokens of a microbatch are one
dim: sequence parallelism then gathers and scatters neighbouring rows without a copy.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from impl.collectives import all_reduce_sum
from impl.peers.gpt import GPT, places, whole_model
from impl.peers.training import PeerTrainer


def parallelize(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Split the model over a mesh with one axis, and return the styles by module.

    Both ends of a tied matrix are split by rows of the vocabulary. Between the split blocks activations are
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
    if any(name.endswith(".mlp.gate") for name, _ in model.named_modules()):  # two products of one input
        styles["trunk.layers.*.mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        styles["trunk.layers.*.mlp.gate"] = styles["trunk.layers.*.mlp.up"] = ColwiseParallel()
    if sequence_parallel:
        norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)}
        for norm in dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", name) for name in sorted(norms)):
            is_before_linear = norm.endswith(("norms.input", "final_norm"))  # which takes DTensors
            styles[norm] = SequenceParallel(sequence_dim=0, use_local_output=not is_before_linear)
        if model.trunk.positions is not None:
            distribute_module(model.trunk.positions, mesh)  # whole on every rank
            inputs = {"input_layouts": between, "desired_input_layouts": between}
            outputs = {"output_layouts": between, "desired_output_layouts": between}
            styles["trunk.positions"] = PrepareModuleInputOutput(**inputs, **outputs)
    parallelize_module(model, mesh, styles)
    model.tie()
    return styles


class DTensorTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's tensor-parallel axis.

    Clipping and AdamW work on the ranks' own parts: `clip_grad_norm_` refuses plain parameters beside DTensors.
    """

    def build(self, mesh: DeviceMesh) -> None:
        here, is_split = places(self.run), self.run.plan.sequence_parallel
        if is_split:
            here = here.chunk(self.group.size())[self.group.rank()]
        self.model = whole_model(self.run, self.vocab_size, mesh, here).to(self.device)
        self.styles = parallelize(self.model, mesh["tp"], sequence_parallel=is_split)
        self.keep(self.model, at_once=False)
        is_part = lambda p: isinstance(p, DTensor) and p.placements[0].is_shard()
        self.counted = torch.tensor([is_part(p) or self.group.rank() == 0 for p in self.masters], device=self.device)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"styles": {name: repr(style) for name, style in self.styles.items()}}

    def backward(self, i: int) -> Tensor:
        """Accumulate the gradient; those of whole parameters that met only this rank's tokens are summed at its end.

        Communication: one all-reduce.
        """
        loss = super().backward(i)
        if self.partial:
            flat = all_reduce_sum(torch.cat([grad.flatten() for grad in self.partial]), self.group)
            parts = flat.split([grad.numel() for grad in self.partial])
            torch._foreach_copy_(self.partial, [part.view_as(g) for part, g in zip(parts, self.partial, strict=True)])
        return loss

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = super().microbatch(inputs, targets)
        if self.widens and not self.is_last:
            self.hand_all_over()
        return loss

    def hand_all_over(self) -> None:
        is_partial = lambda grad: isinstance(grad, DTensor) and grad.placements[0].is_partial()
        partial = [self.masters[parameter] for parameter in self.masters if is_partial(parameter.grad)]
        for parameter in self.masters:  # an untied embedding's gradient is whole
            grad = parameter.grad
            if isinstance(parameter, DTensor) and parameter.placements[0].is_shard() and isinstance(grad, DTensor):
                parameter.grad = grad.redistribute(placements=parameter.placements)
        super().hand_all_over()
        self.partial = [master.grad for master in partial if master.grad is not None]

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.scores(self.model(inputs).full_tensor(), targets)
