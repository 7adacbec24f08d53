"""GPT and Llama trained by PyTorch's context parallelism: a rank has a part of each sequence, and attention is a ring.

The model is whole on every rank, and DDP takes the mean of its gradients over them. PyTorch calls this interface a
prototype, and its ring has an entry for each kernel of a GPU only; that of a CPU is entered here.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from impl.context_parallel import attention_grad_on_cpu
from impl.peers.ddp import DDPTrainer

ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GRAD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class ContextParallelTrainer(DDPTrainer):
    """`PeerTrainer` over the ranks of a mesh's axis of context parallelism, as PyTorch deals tokens to them."""

    def build(self, mesh: DeviceMesh) -> None:
        self.dp_group, self.mesh = mesh.get_group("cp"), mesh["cp"]
        ring.custom_ops |= {ON_CPU: _attention, GRAD_ON_CPU: _attention_grad}
        ring._cp_options.convert_to_f32 = self.run.precision != "fp64"  # what it adds up in
        super().build(mesh)
        self.trunk: Any = self.model.trunk
        self.places = self.trunk.places.view(self.run.train.microbatch, -1).clone()
        with self._parts(self.places):
            here = self.places[0].cpu()
        own_places = lambda length: here if length == len(here) else torch.arange(length)
        for layer in self.trunk.layers.values():
            if layer.attention.rotary is not None:
                layer.attention.rotary = layer.attention.rotary._replace(places=own_places)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"ring": ring._cp_options.rotate_method.name}

    def share(self, i: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield whole sequences, the same on every rank."""
        return super().share(i, 0)

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        trunk, whole = self.trunk, (self.trunk.places, self.trunk.seq_len)
        inputs, targets = inputs.clone(), targets.clone()  # which share memory, and are overwritten by their parts
        with self._parts(inputs, targets):
            trunk.places, trunk.seq_len = self.places.flatten(), self.places.shape[1]
            loss = super().microbatch(inputs, targets)
        trunk.places, trunk.seq_len = whole
        return loss

    def _parts(self, *wholes: Tensor) -> AbstractContextManager[None]:
        """Keep this rank's part of each, for good; in this context attention is a ring. Shapes: [b, s] -> [b, s/c]."""
        dims = [1] * len(wholes)
        return context_parallel(self.mesh, buffers=[*wholes], buffer_seq_dims=dims, no_restore_buffers={*wholes})


def _attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return attention over the keys of all ranks, and the logarithms of its sums, by PyTorch's ring."""
    *tensors, dropout, causal = args
    group, (q, k, v) = tensors[0].device_mesh.get_group(), map(DTensor.to_local, tensors)
    out, logs = ring._templated_ring_attention(group, 2, op, q, k, v, is_causal=causal, dropout_p=dropout, **kwargs)
    return DTensor._op_dispatcher.wrap(out, tensors[0]._spec), logs


def _attention_grad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the gradients of queries, keys and values, by PyTorch's ring."""
    *wholes, logs, dropout, causal = args
    (grad, q, k, v, out), tensors = map(DTensor.to_local, wholes), wholes[1:4]
    kwargs |= {"is_causal": causal, "dropout_p": dropout}
    group, backward = tensors[0].device_mesh.get_group(), ring._templated_ring_attention_backward
    found = backward(group, 2, attention_grad_on_cpu, grad, "grad_out", q, k, v, out, logs, **kwargs)
    return [DTensor._op_dispatcher.wrap(one, whole._spec) for one, whole in zip(found, tensors, strict=True)]
