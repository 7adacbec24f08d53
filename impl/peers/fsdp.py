"""GPT trained by PyTorch's fully sharded data parallelism (FSDP2), as documented, at its fastest settings.

Every layer is a group of its own, the embeddings and the last norm are the root's. Stage 3 frees a layer's parameters
after its forward pass; stages 1 and 2 keep them all from the first forward pass to the last backward pass. Stages 2
and 3 reduce gradients at every microbatch, so that they stay sharded; stage 1 reduces the sum once. With replicas it is
hybrid sharding (HSDP), which sums gradients over these once a step.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from impl.evaluate import Evaluation
from impl.peers.gpt import GPT, whole_model
from impl.peers.training import PeerTrainer
from impl.precision import name_of
from impl.run import Run
from impl.train import MASTERS, WEIGHTS


def shard(model: GPT, mesh: DeviceMesh, run: Run) -> list[FSDPModule]:
    """Shard the model over the mesh's last axis; returns its groups in the order in which the forward pass needs them.

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
    """

    def build(self, mesh: DeviceMesh) -> None:
        self.model = whole_model(self.run, self.vocab_size, mesh)
        self.model.to(self.device, MASTERS[self.run.precision])
        plan, data = self.run.plan, mesh["dp"]
        if plan.replicas > 1:
            axes = "replicas", "zero"
            data = init_device_mesh(mesh.device_type, (plan.replicas, plan.zero), mesh_dim_names=axes)
        self.groups = shard(self.model, data, self.run)
        self.keep(self.model, at_once=False)
        self.group = data.get_group(data.ndim - 1)

    def settings(self) -> dict[str, Any]:
        stage = self.run.plan.zero_stage
        return super().settings() | {
            "groups": ["root", *(f"layers.{i}" for i in range(self.run.model.num_layers))],
            "param_dtype": name_of(WEIGHTS[self.run.precision]),
            "reduce_dtype": name_of(self.accumulated),
            "reshard_after_forward": stage == 3,
            "reduces_every_microbatch": stage > 1,
            "replicas": self.run.plan.replicas,
            "forward_prefetch": 1,
        }

    def evaluate(self, *, final: bool) -> list[Evaluation]:
        found = super().evaluate(final=final)
        for group in self.groups:
            group.reshard()
        return found

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        root, stage = self.groups[0], self.run.plan.zero_stage
        root.set_requires_gradient_sync(stage > 1 or self.is_last)
        root.set_requires_all_reduce(self.is_last)
        root.set_reshard_after_backward(stage == 3 or self.is_last)
        loss = self.mean(self.model(inputs), targets)
        (loss / self.dp_group.size()).backward()
        return loss
