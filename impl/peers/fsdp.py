"""GPT trained by PyTorch's own fully sharded data parallelism (FSDP2), as its documentation does it, at its fastest
settings.

Every layer is a group of its own, the embeddings and the last norm are the root's. Stage 3 frees a layer's parameters
after its forward pass; stages 1 and 2 keep them all from the first forward pass to the last backward pass. Stages 2
and 3 reduce gradients at every microbatch, so that they stay sharded; stage 1 reduces the sum once.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from impl.collectives import all_reduce_sum
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.peers.gpt import GPT, whole_model, why_model_is_invalid
from impl.peers.training import PeerTrainer
from impl.run import Run
from impl.train import MASTERS, WEIGHTS


def why_invalid(run: Run) -> str | None:
    """What this engine cannot do of a run, in one line; None: it can train it."""
    lacks = why_model_is_invalid(run, "dp")
    if run.plan.zero_stage == 0:
        lacks.append("plan.zero_stage 0")
    return f"the fsdp engine has no {', '.join(lacks)}" if lacks else None


def shard(model: GPT, mesh: DeviceMesh, run: Run) -> list[FSDPModule]:
    """Shard the model over a mesh with one axis; returns its groups in the order in which the forward pass needs them.

    Gathers are asynchronous and one layer ahead: with gloo, streams overlap nothing. Gradients are summed and not
    divided: the loss is.
    """
    weights, masters = WEIGHTS[run.precision], MASTERS[run.precision]
    smaller = None if weights == masters else weights
    policy = MixedPrecisionPolicy(param_dtype=smaller, reduce_dtype=masters if run.fp32_gradients else smaller)
    frees = run.plan.zero_stage == 3
    layers = [
        fully_shard(layer, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
        for layer in model.trunk.layers.values()
    ]
    # the backward pass begins with the root's, which are kept in any case
    root = fully_shard(model, mesh=mesh, reshard_after_forward=None if frees else False, mp_policy=policy)
    root._set_unshard_async_op(True)
    groups = [root, *layers]
    for group, following in zip(groups, layers, strict=False):
        group.set_modules_to_forward_prefetch([following])
    for group in groups:
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
    return groups


class FSDPTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's data-parallel axis; ZeRO's stages 1 to 3.

    Clipping and AdamW work on the ranks' own parts, without DTensor's dispatch.

    Raises:
        InputError: the run needs something that this engine lacks.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        if reason := why_invalid(run):
            raise InputError(reason)
        super().__init__(run, data, device)
        self.group = mesh.get_group("dp")
        self.model = whole_model(run, run.model.vocabulary(data.manifest.vocab_size), mesh)
        self.model.to(device, MASTERS[run.precision])
        self.root, *_ = shard(self.model, mesh["dp"], run)
        self.keep(self.model)

    def backward(self, i: int) -> Tensor:
        count, stage = self.run.microbatches, self.run.plan.zero_stage
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.forget()
        for k, (inputs, targets) in enumerate(self.share(i, self.group.rank()), 1):
            self.root.set_requires_gradient_sync(stage > 1 or k == count)
            self.root.set_reshard_after_backward(stage == 3 or k == count)
            part = self.mean(self.model(inputs), targets) / self.group.size()
            part.backward()
            loss += part.detach()
        for parameter in self.masters:
            self.hand_over(parameter)
        return all_reduce_sum(loss, self.group)

    def norm(self, squares: Tensor) -> Tensor:
        return all_reduce_sum(squares.sum(), self.group).sqrt()

    def weights(self) -> dict[str, Tensor]:
        """All weights whole, by name. Communication: one all-gather of each."""
        parts = dict(self.model.named_parameters())
        return {name: part.full_tensor().detach() for name, part in parts.items() if isinstance(part, DTensor)}
