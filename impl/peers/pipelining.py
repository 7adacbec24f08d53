"""GPT trained by PyTorch's own pipelining, as its documentation does it, at its fastest settings.

The loss is divided by the number of microbatches, so that no gradient is scaled afterwards; shapes are static, so that
ranks exchange none; outputs of the microbatches are not kept.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from impl.collectives import all_reduce_sum
from impl.cost.place import ranks_of_stages
from impl.mesh import ends_group
from impl.peers.gpt import GPT, initial_weights, places
from impl.peers.training import PeerTrainer
from impl.pipeline.stage import Stage, split
from impl.train import WEIGHTS

SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
"""Torch's schedules by our names; zb_h1 is the interleaved zero-bubble one with one stage a rank."""


class PipeliningTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's pipeline axis, with the same layers on each as ours has."""

    model: torch.nn.ModuleDict

    def build(self, mesh: DeviceMesh) -> None:
        run = self.run
        self.group, count = mesh.get_group("pp"), run.plan.pp * run.plan.chunks
        self.stages = parts = split(run.model, self.vocab_size, count)
        rank_of = ranks_of_stages(run)
        here = {i: parts[i] for i, rank in enumerate(rank_of) if rank == self.group.rank()}
        weights = initial_weights(run, self.vocab_size, mesh)
        self.model = torch.nn.ModuleDict()
        for i, part in here.items():
            module = GPT(run, self.vocab_size, part, places(run)).to(WEIGHTS[run.precision])
            module.load_state_dict({name: weights[name] for name in module.state_dict()})
            self.model[str(i)] = module.to(self.device)
        self.keep(self.model)
        self.has_first, self.has_last = 0 in here, count - 1 in here
        self.ends = ends_group(mesh, {rank_of[0], rank_of[-1]})
        tied = {"0.trunk.tokens.weight", f"{count - 1}.head.weight"}
        self.tied = [p for name, p in self.model.named_parameters() if run.model.tied and name in tied]
        elsewhere = self.tied[1:] if self.has_first else self.tied  # its norm counts where the first stage is
        self.counted = torch.tensor([all(p is not q for q in elsewhere) for p in self.masters], device=self.device)
        stages = [self._stage(i, part, count) for i, part in here.items()]
        kind, how = SCHEDULES[run.plan.schedule], {"loss_fn": self.mean, "scale_grads": False}
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(stages if several else stages[0], run.microbatches, **how)  # type: ignore[arg-type]

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "schedule": type(self.schedule).__name__,
            "stages_of_a_rank": self.run.plan.chunks,
            "microbatches": self.run.microbatches,
            "layers_of_stages": [len(stage.layers) for stage in self.stages],
        }

    def _stage(self, i: int, part: Stage, count: int) -> PipelineStage:
        model = self.run.model
        like = lambda width=None: self.between("meta", width).requires_grad_()
        tokens = torch.empty(self.run.train.microbatch, model.seq_len, dtype=torch.int64, device="meta")
        return PipelineStage(
            self.model[str(i)],
            i,
            count,
            self.device,
            input_args=tokens if part.is_first else like(),
            output_args=like(self.vocab_size if part.is_last else None),
            group=self.group,
        )

    def backward(self, i: int) -> Tensor:
        recipe, losses = self.run.train, list[Tensor]()
        self.forget()
        first = i * recipe.global_batch
        ends = self.has_first or self.has_last
        inputs, targets = self.batch(np.arange(first, first + recipe.global_batch)) if ends else (None, None)
        self.schedule.step(
            *([inputs] if self.has_first else []),
            target=targets if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        self.hand_all_over()
        if self.tied:
            assert self.ends is not None
            grads = [grad for parameter in self.tied if (grad := self.masters[parameter].grad) is not None]
            total = all_reduce_sum(torch.stack(grads).sum(0), self.ends)
            for grad in grads:  # both ends' where they are on one rank
                grad.copy_(total)
        loss = sum((part.detach() for part in losses), torch.zeros((), dtype=torch.float64, device=self.device))
        return all_reduce_sum(loss, self.group)

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.relay({int(i): part for i, part in self.model.items()}, inputs, targets)
