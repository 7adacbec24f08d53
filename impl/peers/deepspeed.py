"""GPT trained by DeepSpeed's ZeRO, stages 0 to 3, as its documentation does it, at its fastest settings.

DeepSpeed reads LOCAL_RANK, and DS_ACCELERATOR=cpu where there is no GPU, from the environment, which the launcher of
the ranks sets. LOCAL_SIZE, their number, saves stage 3 a look at the machine at every reduction.
"""

import importlib
import json
import logging
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.collectives import all_reduce_sum
from impl.peers.gpt import whole_model
from impl.peers.training import Peer, adamw
from impl.pipeline.engine import Watch
from impl.run import Run
from impl.train import Step


def configuration(run: Run, vocab_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run.

    Its sizes are in elements. Buckets have our bytes, as its defaults would put all of a small model in one. Stage 3
    keeps vectors whole on every rank, as its default does in a model of common size, and fetches one layer ahead; what
    is not used again within a layer is freed.
    """
    model, layer, stage = run.model, run.model.layer_weights, zero_stage(run)
    gradients = "fp32" if run.precision == "fp32" or run.fp32_gradients else "bf16"
    bucket = run.plan.bucket_bytes // {"fp32": 4, "bf16": 2}[gradients]
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
            "stage3_param_persistence_threshold": max(sum(model.qkv_sizes), model.mlp_inner),
            "stage3_max_live_parameters": 2 * layer + vocab_size * model.hidden_size,
            "stage3_max_reuse_distance": layer,
            "memory_efficient_linear": False,  # it would replace every engine's; see save_no_weights
        },
    }


def zero_stage(run: Run) -> int:
    """Return DeepSpeed's ZeRO stage for a run.

    In bf16 on one data-parallel rank it is at least 1, which splits nothing there, and alone adds gradients up in fp32.
    """
    return max(run.plan.zero_stage, 1) if run.precision == "bf16" and run.plan.dp == 1 else run.plan.zero_stage


def prepare() -> None:
    """Let DeepSpeed use the existing process group, and silence its log."""
    deepspeed.logger.setLevel(logging.WARNING)
    # without this it looks for compilers, and compiles collectives of its own for a minute
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})
    # it imports Muon, which we do not use and which imports PyTorch's compiler: seconds of every rank's start
    compile, compiler.compile = compiler.compile, lambda: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    compiler.compile = compile
    groups.mpu = None  # a pipeline before this engine leaves its own here
    deepspeed.init_distributed(dist_init_required=False)


def resolved(engine: Any) -> dict[str, Any]:
    """Return DeepSpeed's resolved configuration, ready for JSON."""
    config = engine._config
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    names += ("grad_accum_dtype", "communication_data_type", "prescale_gradients", "pipeline")
    settings = {
        **{name: getattr(config, name) for name in names},
        "bf16": config.bfloat16_config.model_dump(),
        "zero_optimization": config.zero_config.model_dump(),
        "version": deepspeed.__version__,
        "optimizer_class": type(engine.optimizer).__name__,
        "clipped_by": "DeepSpeed" if engine.zero_optimization_stage() else "this suite, before AdamW's step",
    }
    return json.loads(json.dumps(settings, default=str))


def save_no_weights(model: nn.Module) -> None:
    """Let this model's linear layers alone be DeepSpeed's for stage 3, which free their weights after the forward pass.

    PyTorch's saves a view of them.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda input, module=module: zero3_linear_wrap(input, module.weight, module.bias)


class DeepSpeedPeer(Peer):
    """DeepSpeed's engine around PyTorch's fused AdamW."""

    engine: Any

    def start(self, **zero: Any) -> bool:
        """Wrap the model; return True if gradients have to be reduced.

        On one rank that only copies them, unless ZeRO needs the copies.

        Args:
            zero: changes to `configuration` of ZeRO.
        """
        config = configuration(self.run, self.vocab_size)
        config["zero_optimization"] |= zero
        self.adam = adamw(self.model.parameters(), self.run.train)
        with redirect_stdout(StringIO()):
            self.engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=self.adam, config=config, dist_init_required=False
            )
        self.stage = config["zero_optimization"]["stage"]
        assert self.engine.zero_optimization_stage() == self.stage  # it passes over keys that it does not know
        return self.run.plan.dp > 1 or (self.stage > 0 and not isinstance(self.engine.optimizer, BF16_Optimizer))

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"torch": torch.__version__} | resolved(self.engine)

    def clip_own(self) -> Tensor:
        """Clip the gradients that are in the model's parameters."""
        return self.clip([p.grad for p in self.model.parameters() if p.grad is not None])


class DeepSpeedTrainer(DeepSpeedPeer):
    """Engine over the ranks of a mesh's data-parallel axis."""

    def build(self, mesh: DeviceMesh) -> None:
        self.model = whole_model(self.run, self.vocab_size, mesh).to(self.device)
        if self.run.plan.zero_stage == 3:
            save_no_weights(self.model)
        prepare()
        self.engine.enable_backward_allreduce = self.start()

    def step(self, i: int, watch: Watch | None = None) -> Step:
        lr = self.set_learning_rate(i)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: Tensor | None = None
        for inputs, targets in self.share(i, self.dp_group.rank()):
            part = self.mean(self.engine(inputs), targets)
            self.engine.backward(part, scale_wrt_gas=False)
            loss += part.detach()
            if self.stage == 0 and self.engine.is_gradient_accumulation_boundary():
                norm = self.clip_own()  # DeepSpeed clips at stage 0 too, but does not return the norm
            self.engine.step()
        loss = all_reduce_sum(loss, self.dp_group) / self.dp_group.size()
        return Step(loss, torch.as_tensor(self.engine.get_global_grad_norm()) if norm is None else norm, lr)

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.scores(self.engine(inputs), targets)
