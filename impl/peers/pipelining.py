"""GPT trained by PyTorch's own pipelining, as its documentation does it, at its fastest settings.

The loss is divided by the number of microbatches, so that no gradient is scaled afterwards; shapes are static, so that
ranks exchange none; outputs of the microbatches are not kept.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from impl.collectives import all_reduce_sum
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.mesh import ends_group
from impl.peers.gpt import GPT, initial_weights, places, why_model_is_invalid
from impl.peers.training import PeerTrainer
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.train import MASTERS, WEIGHTS

ONE_STAGE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}
"""By our names: torch's schedules with one stage a rank."""
STAGES: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
}
"""Those that take several stages a rank; zb_h1 is the zero-bubble one with one."""


def why_invalid(run: Run) -> str | None:
    """What this engine cannot do of a run, in one line; None: it can train it."""
    plan, lacks = run.plan, why_model_is_invalid(run, "pp")
    if plan.pp == 1:
        lacks.append("plan.pp 1")
    if plan.schedule not in {*ONE_STAGE, *STAGES}:
        lacks.append(f"plan.schedule {plan.schedule!r} (it has {', '.join([*ONE_STAGE, *STAGES])})")
    if plan.schedule == "one_f_one_b" and run.microbatches < plan.pp:
        lacks.append(f"one_f_one_b with fewer microbatches, {run.microbatches}, than plan.pp {plan.pp}")
    if plan.schedule == "zb_h1" and run.precision == "bf16":
        lacks.append("zb_h1 in bf16: it adds weight gradients up in the weights' precision")
    return f"the pipelining engine has no {'; '.join(lacks)}" if lacks else None


class PipeliningTrainer(PeerTrainer):
    """`PeerTrainer` over the ranks of a mesh's pipeline axis, with the same layers on each as ours has.

    Raises:
        InputError: the run needs something that this engine lacks.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        if reason := why_invalid(run):
            raise InputError(reason)
        super().__init__(run, data, device)
        self.group, count = mesh.get_group("pp"), run.plan.pp * run.plan.chunks
        vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        parts = split(run.model, vocab_size, count)
        here = {i: parts[i] for i in range(self.group.rank(), count, run.plan.pp)}
        weights = initial_weights(run, vocab_size, mesh)
        self.model = torch.nn.ModuleDict()
        for i, part in here.items():
            module = GPT(run.model, vocab_size, part, places(run)).to(WEIGHTS[run.precision])
            module.load_state_dict({name: weights[name] for name in module.state_dict()})
            self.model[str(i)] = module.to(device)
        self.keep(self.model)
        if run.precision == "bf16":
            for parameter in self.masters:
                parameter.register_post_accumulate_grad_hook(self.hand_over)
        self.is_first, self.is_last = 0 in here, count - 1 in here
        self.ends = ends_group(mesh, {0, run.plan.pp - 1})
        tied = {"0.trunk.tokens.weight", f"{count - 1}.head.weight"}
        self.tied = [p for name, p in self.model.named_parameters() if name in tied]
        self.schedule = self._schedule([self._stage(i, part, vocab_size, count) for i, part in here.items()])

    def _stage(self, i: int, part: Stage, vocab_size: int, count: int) -> PipelineStage:
        size, model = self.run.train.microbatch, self.run.model
        like = lambda width: torch.empty(
            size * model.seq_len, width, dtype=WEIGHTS[self.run.precision], device="meta", requires_grad=True
        )
        tokens = torch.empty(size, model.seq_len, dtype=torch.int64, device="meta")
        return PipelineStage(
            self.model[str(i)],
            i,
            count,
            self.device,
            input_args=tokens if part.is_first else like(model.hidden_size),
            output_args=like(vocab_size if part.is_last else model.hidden_size),
            group=self.group,
        )

    def _schedule(self, stages: list[PipelineStage]) -> PipelineScheduleSingle | PipelineScheduleMulti:
        name, count = self.run.plan.schedule, self.run.microbatches
        if name in ONE_STAGE:
            (stage,) = stages
            return ONE_STAGE[name](stage, count, loss_fn=self._loss, scale_grads=False)
        return STAGES[name](list(stages), count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(MASTERS[self.run.precision])
        return F.cross_entropy(wide, targets.flatten()) / self.run.microbatches

    def backward(self, i: int) -> Tensor:
        recipe, losses = self.run.train, []
        self.forget()
        first = i * recipe.global_batch
        ends = self.is_first or self.is_last
        inputs, targets = self.batch(np.arange(first, first + recipe.global_batch)) if ends else (None, None)
        self.schedule.step(
            *([inputs] if self.is_first else []),
            target=targets if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        for parameter in self.masters:
            if parameter.grad is not None:
                self.hand_over(parameter)
        self._sum_ends()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in losses:
            loss += part.detach()
        return all_reduce_sum(loss, self.group)

    def _sum_ends(self) -> None:
        """Sum the tied embedding's gradients over first and last rank. Communication: one all-reduce."""
        for parameter in self.tied:
            grad = self.masters[parameter].grad
            assert grad is not None
            assert self.ends is not None
            all_reduce_sum(grad, self.ends)

    def norm(self, squares: Tensor) -> Tensor:
        """The tied embedding counts where the first stage is."""
        elsewhere = [] if self.is_first else self.tied
        is_counted = torch.tensor([all(p is not q for q in elsewhere) for p in self.masters], device=self.device)
        return all_reduce_sum(squares[is_counted].sum(), self.group).sqrt()
