"""GPT trained by DeepSpeed's 1F1B pipeline, as its documentation does it, at its fastest settings.

The layers of a rank are one of DeepSpeed's, the same as in this project's engine. Its environment variables are
described in `impl.peers.deepspeed`.
"""

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.peers.deepspeed import DeepSpeedPeer, prepare
from impl.peers.gpt import Trunk, initial_weights, places
from impl.pipeline.engine import Watch
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.train import MASTERS, WEIGHTS, Step


class Body(Trunk):
    """Stage without the token embedding, which is a separate layer that DeepSpeed ties.

    Shapes: tokens embedded [b, s, h], or the previous stage's output [b s, h] -> [b s, h].
    """

    def __init__(self, run: Run, vocab_size: int, stage: Stage, places: Tensor) -> None:
        super().__init__(run, vocab_size, stage, places)
        self.tokens = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2))


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """Return the logits. Shapes: [b s, h] -> [b s, V]."""
    return F.linear(x, embedding.weight)


def pipeline(run: Run, vocab_size: int, mesh: DeviceMesh) -> PipelineModule:
    """Build this rank's part of the model with its initial weights; call it within `no_grad`."""
    stages, hidden = split(run.model, vocab_size, run.plan.pp), run.model.hidden_size
    tokens = nn.Embedding, vocab_size, hidden
    if run.model.tied:
        ends = TiedLayerSpec("tokens", *tokens), TiedLayerSpec("tokens", *tokens, forward_fn=logits)
    else:
        ends = LayerSpec(*tokens), LayerSpec(nn.Linear, hidden, vocab_size, bias=False)
    bodies = [LayerSpec(Body, run, vocab_size, stage, places(run)) for stage in stages]
    model = PipelineModule(
        layers=[ends[0], *bodies, ends[1]],
        num_stages=run.plan.pp,
        loss_fn=lambda out, targets: F.cross_entropy(out.to(MASTERS[run.precision]), targets.flatten()),
        partition_method=f"type:{Body.__name__}",
    ).to(WEIGHTS[run.precision])
    weights = initial_weights(run, vocab_size, mesh)
    of_ends = {"tied_modules": "trunk.tokens.weight", "0": "trunk.tokens.weight", f"{len(bodies) + 1}": "head.weight"}
    for name, parameter in model.named_parameters():
        layer, _, rest = name.partition(".")
        parameter.copy_(weights[of_ends.get(layer, f"trunk.{rest}")])
    return model


class DeepSpeedPipelineTrainer(DeepSpeedPeer):
    """Engine over a mesh's pipeline and data-parallel axes.

    In fp32 without ZeRO, DeepSpeed clips by the first stage's norm; here clipping is done just before AdamW's step.
    """

    model: PipelineModule
    norm: Tensor

    def build(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group("pp")
        prepare()
        # with gradients its broadcast of the tied weights would warn in every backward pass
        with torch.no_grad(), redirect_stdout(StringIO()):
            self.model = pipeline(self.run, self.vocab_size, mesh)
        self.engine.pipeline_enable_backward_allreduce = self.start(overlap_comm=False)  # which it does not have
        # the tied embedding's norm counts where the first stage is
        elsewhere = [getattr(p, "ds_pipe_replicated", False) for p in self.model.parameters()]
        self.counted = ~torch.tensor(elsewhere, device=self.device)
        if self.stage == 0:
            self.adam.register_step_pre_hook(lambda *_: setattr(self, "norm", self.clip_own()))

    def settings(self) -> dict[str, Any]:
        parts = [int(part) for part in self.model.parts]
        return super().settings() | {"schedule": "TrainSchedule (1F1B)", "parts": parts}

    def step(self, i: int, watch: Watch | None = None) -> Step:
        lr = self.set_learning_rate(i)
        loss = self.engine.train_batch(self.share(i, self.dp_group.rank()))
        norm = self.norm if self.stage == 0 else self.engine.get_global_grad_norm()
        return Step(loss.double(), torch.as_tensor(norm), lr)

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.relay({self.group.rank(): self.model}, inputs, targets)
