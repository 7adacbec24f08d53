"""GPT trained by DeepSpeed's ZeRO, stages 0 to 3, as its documentation does it, at its fastest settings.

DeepSpeed reads LOCAL_RANK, and DS_ACCELERATOR=cpu where there is no GPU, from the environment; whoever starts the
ranks sets them. LOCAL_SIZE, their number, saves stage 3 a look at the machine at every reduction.
"""

import logging
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.collectives import all_reduce_sum
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.optim import learning_rate
from impl.peers.gpt import whole_model, why_model_is_invalid
from impl.peers.training import Peer, adamw
from impl.run import Run
from impl.train import Step


def why_invalid(run: Run) -> str | None:
    """What this engine cannot do of a run, in one line; None: it can train it."""
    lacks = why_model_is_invalid(run, "dp")
    if run.precision == "fp64":
        lacks.append("precision 'fp64'")
    if run.precision == "bf16" and run.plan.zero_stage == 0:
        lacks.append("bf16 with plan.zero_stage 0: it accumulates no gradients in fp32 there, and updates otherwise")
    return f"the deepspeed engine has no {', '.join(lacks)}" if lacks else None


def settings(run: Run, vocab_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Its sizes are elements; its own defaults would put all of a small model in one bucket.

    Buckets have our bytes. Stage 3 keeps vectors whole on every rank, as its default does in a model of common size,
    and fetches one layer ahead; what is not used again within a layer is freed.
    """
    h, stage = run.model.hidden_size, run.plan.zero_stage
    gradients = "fp32" if run.precision == "fp32" or run.fp32_gradients else "bf16"
    bucket = run.plan.bucket_bytes // {"fp32": 4, "bf16": 2}[gradients]
    layer = 12 * h * h
    return {
        "train_micro_batch_size_per_gpu": run.train.microbatch,
        "gradient_accumulation_steps": run.microbatches,
        "gradient_clipping": run.train.clip_norm if stage else 0.0,
        "bf16": {"enabled": run.precision == "bf16", "immediate_grad_update": True, "check_grad_overflow": False},
        "communication_data_type": gradients,
        "data_types": {"grad_accum_dtype": gradients},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": max(2, bucket),
            "allgather_bucket_size": max(2, bucket // 2 * 2),
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 4 * h,
            "stage3_max_live_parameters": 2 * layer + vocab_size * h,
            "stage3_max_reuse_distance": layer,
            "memory_efficient_linear": False,  # it would replace every engine's; see save_no_weights
        },
    }


def save_no_weights(model: nn.Module) -> None:
    """Let this model's linear layers alone be DeepSpeed's for stage 3, which free their weights after the forward pass.

    PyTorch's saves a view of them.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    return zero3_linear_wrap(input, module.weight, module.bias)


class DeepSpeedTrainer(Peer):
    """DeepSpeed's engine around PyTorch's fused AdamW, over the ranks of a mesh's data-parallel axis.

    Raises:
        InputError: the run needs something that this engine lacks.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        if reason := why_invalid(run):
            raise InputError(reason)
        super().__init__(run, data, device)
        self.group = mesh.get_group("dp")
        deepspeed.logger.setLevel(logging.WARNING)
        # without this it looks for compilers, and compiles collectives of its own for a minute
        deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})
        vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        self.model = whole_model(run, vocab_size, mesh).to(device)
        if run.plan.zero_stage == 3:
            save_no_weights(self.model)
        self.adam = adamw(self.model.parameters(), run.train)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.adam, config=settings(run, vocab_size), dist_init_required=False
        )
        assert self.engine.zero_optimization_stage() == run.plan.zero_stage  # it passes over keys that it does not know

    def step(self, i: int) -> Step:
        lr = learning_rate(self.run.train, i)
        for group in self.adam.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: Tensor | None = None
        for inputs, targets in self.share(i, self.group.rank()):
            part = self.mean(self.engine(inputs), targets)
            self.engine.backward(part, scale_wrt_gas=False)
            loss += part.detach()
            if self.run.plan.zero_stage == 0 and self.engine.is_gradient_accumulation_boundary():
                norm = self._clip(self.run.train.clip_norm)
            self.engine.step()
        loss = all_reduce_sum(loss, self.group) / self.group.size()
        norm = torch.as_tensor(self.engine.get_global_grad_norm()) if norm is None else norm
        return Step(loss, norm, lr)

    def _clip(self, limit: float) -> Tensor:
        """DeepSpeed clips at stage 0 too, but does not tell the norm."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit or torch.inf)

    def weights(self) -> dict[str, Tensor]:
        """All weights whole, by name. Communication: at stage 3 an all-gather."""
        named = dict(self.model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.run.plan.zero_stage == 3):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
