"""GPT trained by PyTorch alone on one rank, and by its DistributedDataParallel on more, at its fastest settings."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from impl.peers.gpt import whole_model
from impl.peers.training import PeerTrainer
from impl.train import WEIGHTS


class PlainTrainer(PeerTrainer):
    """`PeerTrainer` on one rank: nothing is split, nothing wrapped."""

    def build(self, mesh: DeviceMesh) -> None:
        self.model = whole_model(self.run, self.vocab_size, mesh).to(self.device)
        self.keep(self.model)


class DDPTrainer(PlainTrainer):
    """`PeerTrainer` over the ranks of a mesh's data-parallel axis; a step's last microbatch reduces its gradient.

    DDP reduces gradients in the parameters' precision. Where they are to be summed in fp32, all but the last microbatch
    add theirs up there, and a communication hook adds the last one's buckets and reduces the sums instead of them.
    static_graph is off: it fails if the first backward pass reduces nothing, and spares only what is off here.
    """

    def build(self, mesh: DeviceMesh) -> None:
        super().build(mesh)
        plan, weights = self.run.plan, WEIGHTS[self.run.precision]
        cap: Any = plan.bucket_bytes * weights.itemsize / self.accumulated.itemsize / 2**20
        self.ddp = DistributedDataParallel(
            self.model,
            process_group=self.dp_group,
            bucket_cap_mb=cap,
            gradient_as_bucket_view=True,
            batched_grad_copy=self.device.type == "cuda",  # saves launches of kernels
            forward_sync_buffers=False,
        )
        if self.widens:
            self.ddp.register_comm_hook(None, self._reduce)
        self.sums: dict[int, tuple[list[Tensor], Tensor]] = {}
        """By number of a bucket: its parameters, and the sums of their gradients, one after another."""

    def settings(self) -> dict[str, Any]:
        told = self.ddp._get_ddp_logging_data()
        sizes = told.get("rebuilt_bucket_sizes") or told.get("initial_bucket_sizes") or ""
        names = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
        return super().settings() | {
            **{name: bool(told.get(name)) for name in names},
            "bucket_cap_bytes": told.get("bucket_cap_bytes"),
            "bucket_bytes": [int(size) for size in str(sizes).split(",") if size.strip()],
            "comm_hook": "sums in fp32" if self.widens else "none",
        }

    def microbatch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with nullcontext() if self.is_last else self.ddp.no_sync():
            with torch._dynamo.config.patch(optimize_ddp=False):  # layers are compiled whole
                logits = self.ddp(inputs)
            loss = self.mean(logits, targets)
            (loss / self.dp_group.size() if self.widens else loss).backward()  # DDP's own reduction takes the mean
        return loss

    def forget(self) -> None:
        """Drop the old gradients; sums in fp32 stay where they are, and are overwritten."""
        if self.widens:
            self.model.zero_grad()
        else:
            super().forget()

    @torch.no_grad()
    def hand_over(self, parameter: Tensor) -> None:
        if not self.widens:
            super().hand_over(parameter)
        elif not self.is_last:  # whose gradients DDP has put into its buckets
            assert isinstance(parameter, nn.Parameter)
            master = self.masters[parameter]
            if self.is_first and master.grad is not None and parameter.grad is not None:
                master.grad.copy_(parameter.grad)
                parameter.grad = None
            else:
                super().hand_over(parameter)

    @torch.no_grad()
    def _reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to sum a bucket's gradients over microbatches and ranks, in fp32."""
        sums = self._sums(bucket)
        if self.is_first:
            sums.copy_(bucket.buffer())
        else:
            sums.add_(bucket.buffer())
        work = dist.all_reduce(sums, group=self.dp_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: bucket.buffer())

    def _sums(self, bucket: dist.GradBucket) -> Tensor:
        """Gradients of a bucket so far; DDP lays its buckets out again after the first step, and these follow."""
        parameters = bucket.parameters()
        before, sums = self.sums.get(bucket.index(), ([], bucket.buffer()))
        if [id(p) for p in before] == [id(p) for p in parameters]:
            return sums
        sums = torch.empty(bucket.buffer().numel(), dtype=self.accumulated, device=self.device)
        for parameter, part in zip(parameters, sums.split([p.numel() for p in parameters]), strict=True):
            assert isinstance(parameter, nn.Parameter)
            master = self.masters[parameter]
            if master.grad is not None:
                part.copy_(master.grad.flatten())
            master.grad = part.view_as(master)
        self.sums[bucket.index()] = parameters, sums
        return sums
