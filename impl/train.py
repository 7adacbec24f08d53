"""One rank of a training run: model, plan and data put together. The only place that holds the mesh."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl import evaluate
from impl.activations import kept_for_backward
from impl.collectives import all_gather, all_reduce_sum, broadcast, own_start
from impl.cost.memory import StateBytes
from impl.data.batches import Batch, causal_batch, masked_batch
from impl.data.tokens import TokenFolder
from impl.mesh import ends_group, joint_group
from impl.model.bert import BERT
from impl.model.gpt import GPT
from impl.model.initialise import build_model
from impl.model.layers import DropoutKey
from impl.optim import MasterAdamW, learning_rate
from impl.pipeline.engine import Engine, Links, Watch, WeightGradients
from impl.pipeline.schedule import forward_only
from impl.pipeline.schedules import build
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.tensor_parallel.deferred import Deferred
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.linear import put_off
from impl.tensor_parallel.shards import shards_of
from impl.zero.gradients import Gradients, Reduced

WEIGHTS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MASTERS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


class Step(NamedTuple):
    """What one optimizer step reports, equal on every rank."""

    loss: Tensor
    """Mean over the global batch, in nats, before the update."""
    grad_norm: Tensor
    lr: float


class ActivationBytes(NamedTuple):
    """What the forward pass keeps for the backward pass: the whole model, and its last transformer layer."""

    model: int
    layer: int


class Trainer:
    """Trains one run; `step(i)` does the i-th optimizer step, and calling it with i = 0, 1, ... trains the model.

    A step depends on weights, moments and i only: data, dropout and learning rate are functions of i.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        self.run, self.data, self.device = run, data, device
        self.group, self.pp_group = mesh.get_group("dp"), mesh.get_group("pp")
        self.vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        self.schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
        deferred = Deferred() if self.schedule.is_split else None
        self.tp = TensorParallel(
            mesh.get_group("tp"), run.plan.sequence_parallel, run.plan.overlap_input_grad_reduce, deferred
        )
        self.stages = split(run.model, self.vocab_size, run.plan.pp * run.plan.chunks)
        self.own = {i: self.stages[i] for i in self.schedule.stages_of(self.pp_group.rank())}
        dtype = WEIGHTS[run.precision]
        self.model = build_model(run.model, self.vocab_size, run.seed, dtype, self.tp, list(self.own.values())).to(
            device
        )
        if run.compile:
            for layer in self.model.trunk.layers.values():
                layer.compile()
        self.gradients = Gradients(
            self._reduced(mesh),
            self.tp.group,
            self.pp_group,
            dtype=MASTERS[run.precision],
            bucket_bytes=run.plan.bucket_bytes,
            overlap=run.plan.overlap_grad_reduce,
            arrivals=self._arrivals(),
            put_off=put_off(self.model) if deferred else (),
        )
        links = self._links()
        weights = WeightGradients((deferred or Deferred()).collecting, self.gradients.add)
        self.engine = Engine(self.schedule, links, weights)
        self.scorer = Engine(forward_only(self.schedule, 1), links, weights)
        self.optimizer = MasterAdamW(dict(self.model.named_parameters()), self.gradients.of, run.train)
        self.tokens = data.tokens("train")

    def _reduced(self, mesh: DeviceMesh) -> list[Reduced]:
        """Split parameters, whole ones, those whole ones that met only this rank's tokens, and the tied embedding.

        The tied embedding is apart where its two ends are on different pipeline ranks.
        """
        shards = shards_of(self.model) if self.tp.degree > 1 else {}
        named = dict(self.model.named_parameters())
        ends = {self.schedule.rank_of[0], self.schedule.rank_of[len(self.stages) - 1]}
        both_ends = ends_group(mesh, ends) if len(ends) > 1 else None
        tied = [named.pop("trunk.tokens.weight")] if both_ends is not None else []
        is_partial = lambda name: self.run.plan.sequence_parallel and name.startswith("trunk.")
        whole = [p for name, p in named.items() if name not in shards and not is_partial(name)]
        partial = [p for name, p in named.items() if name not in shards and is_partial(name)]
        is_split = self.tp.degree > 1
        kinds = [
            Reduced([p for name, p in named.items() if name in shards], self.group, is_split=True),
            Reduced(whole, self.group, is_split=False),
            Reduced(partial, joint_group(mesh, "dp", "tp") if partial else self.group, is_split=False),
        ]
        if both_ends is not None:
            kinds.append(Reduced(tied, both_ends, is_split, is_counted=0 in self.own, is_late=True))
        return kinds

    def _arrivals(self) -> dict[nn.Parameter, int]:
        """The embedding's gradient comes from both its ends, together only where they are one stage."""
        if self.model.trunk.tokens is None:
            return {}
        ends = sum(stage.is_first + stage.is_last for stage in self.own.values())
        return {self.model.trunk.tokens.weight: 1 if len(self.stages) == 1 else ends}

    def _links(self) -> Links:
        group = self.tp.group
        if not self.run.scatters:
            return Links(self.pp_group, lambda tensor: tensor, lambda tensor: tensor)
        return Links(
            self.pp_group, lambda tensor: own_start(tensor, group).wait(), lambda part: all_gather(part, group)
        )

    def step(self, i: int, watch: Watch | None = None) -> Step:
        """Forward and backward over this rank's share of the i-th global batch, then the update.

        Communication: the layers', the pipeline's, the gradients' all-reduce over the data-parallel group, and those of
        a scalar: two over the pipeline, one over each other axis.
        """
        self.model.train()
        loss = self.backward(i, watch)
        norm = self.gradients.clip(self.run.train.clip_norm)
        lr = learning_rate(self.run.train, i)
        self.optimizer.step(lr)
        return Step(loss, norm, lr)

    def backward(self, i: int, watch: Watch | None = None) -> Tensor:
        """The gradient of the i-th global batch's mean loss, left in `gradients`; returns that loss."""
        count, size = self.run.microbatches, self.run.train.microbatch
        share = 1.0 / (count * self.group.size())
        loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(stage: int, k: int, x: Tensor | None) -> Tensor:
            microbatch = self.group.rank() * count + k
            first = i * self.run.train.global_batch + microbatch * size
            key = DropoutKey(self.run.seed, i, microbatch)
            out = self._stage(self.stages[stage], np.arange(first, first + size), x, key)
            if self.stages[stage].is_last:
                out = out * share
                loss.add_(out.detach())
            return out

        with self.gradients.accumulated(count):
            self.engine.run(forward, self._activations(size, self.run.model.seq_len), watch)
        return all_reduce_sum(all_reduce_sum(loss, self.group), self.pp_group)

    def _stage(self, stage: Stage, samples: np.ndarray, x: Tensor | None, key: DropoutKey) -> Tensor:
        """What the stage makes of x and, at the ends of the pipeline, of these samples: activations, or the loss."""
        batch = self._batch(samples) if stage.is_first or stage.is_last else None
        tokens = self._tokens(batch.inputs, batch.token_types) if batch and stage.is_first else None
        out = self.model.trunk(stage, x, tokens, self.run.model.seq_len, key)
        if batch is None or not stage.is_last:
            return out
        targets = self._to_device(batch.targets)
        if isinstance(self.model, GPT):
            return self.model.loss(out, targets)
        return self.model.loss(out, targets, self._to_device(batch.positions), self._to_device(batch.is_next))

    def _activations(self, sequences: int, length: int) -> Tensor:
        """A tensor like what stages hand over; its memory is not touched."""
        tokens = sequences * length // self.tp.tokens.of
        hidden, dtype = self.run.model.hidden_size, WEIGHTS[self.run.precision]
        return torch.empty(tokens, hidden, dtype=dtype, device=self.device)

    def evaluate(self, *, final: bool) -> list[evaluate.Evaluation]:
        """Validation, and after the last step the run's other evaluations; equal on every rank."""
        self.model.eval()
        with torch.no_grad():
            return evaluate.evaluate(
                self.run, self.data, self, self.group, final=final, batch=self.run.train.microbatch
            )

    def state_bytes(self) -> StateBytes:
        """Bytes of weights, gradients, master weights and moments on this rank; moments exist after the first step."""
        shards, states = shards_of(self.model), self.optimizer.states()
        held = {True: 0, False: 0}
        for name, parameter in self.model.named_parameters():
            held[name in shards] += sum(t.nbytes for t in (parameter, self.gradients.of[parameter], *states[parameter]))
        return StateBytes(split=held[True], whole=held[False])

    def activation_bytes(self) -> ActivationBytes:
        """Bytes that the forward passes of one microbatch keep for the backward passes, which are not taken."""
        self.model.train()
        size = self.run.train.microbatch
        with kept_for_backward(self.model.parameters()) as kept:
            layer = list(self.model.trunk.layers.values())[-1]
            before = layer.register_forward_pre_hook(lambda *_: kept.mark())
            after = layer.register_forward_hook(lambda *_: kept.mark())
            outputs = []
            for stage in self.own.values():
                x = None if stage.is_first else self._activations(size, self.run.model.seq_len).requires_grad_()
                outputs.append(self._stage(stage, np.arange(size), x, DropoutKey(self.run.seed, 0, 0)))
        before.remove()
        after.remove()
        start, end = kept.marks
        return ActivationBytes(kept.bytes, end - start)

    @property
    def head_positions(self) -> int:
        """Positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's."""
        first = self._batch(np.arange(1))
        return first.targets.shape[1]

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """-log p of every target and whether it is the likeliest token. Shapes: [b, s] -> [b, s], [b, s]."""
        length = inputs.shape[1]
        model = self.model
        assert isinstance(model, GPT)
        # tokens that are split need a length to split; behind the end they change nothing
        parts = self.tp.degree if self.run.scatters else self.tp.tokens.of
        padding = ((0, 0), (0, -length % parts))
        inputs, goal = np.pad(inputs, padding), self._to_device(np.pad(targets, padding))
        nats, is_likeliest = self._score(inputs, None, goal.shape, 2, lambda x: model.score(x, goal))
        return nats[:, :length], is_likeliest[:, :length] > 0

    def masked(self, batch: Batch) -> Tensor:
        """-log p of every masked token. Shapes: [b, k]."""
        model = self.model
        assert isinstance(model, BERT)
        goal, positions = self._to_device(batch.targets), self._to_device(batch.positions)
        score = lambda x: (model.score(x, goal, positions),)
        return self._score(batch.inputs, batch.token_types, goal.shape, 1, score)[0]

    def _score(
        self,
        inputs: np.ndarray,
        types: np.ndarray | None,
        shape: Sequence[int],
        count: int,
        score: Callable[[Tensor], Sequence[Tensor]],
    ) -> Tensor:
        """`count` float32 tensors of a shape that the last stage computes, on the CPU of every rank of the pipeline."""
        scores = torch.zeros(count, *shape, dtype=torch.float32, device=self.device)

        def forward(index: int, _: int, x: Tensor | None) -> Tensor:
            stage = self.stages[index]
            tokens = self._tokens(inputs, types) if stage.is_first else None
            out = self.model.trunk(stage, x, tokens, inputs.shape[1], None)
            if stage.is_last:
                scores.copy_(torch.stack([part.float() for part in score(out)]))
            return out

        self.scorer.run(forward, self._activations(*inputs.shape))
        return broadcast(scores, self.schedule.rank_of[len(self.stages) - 1], self.pp_group).cpu()

    def _batch(self, samples: np.ndarray) -> Batch:
        seq_len, seed = self.run.model.seq_len, self.run.seed
        if self.run.model.family == "gpt":
            return causal_batch(self.tokens, samples, seq_len=seq_len, seed=seed)
        vocab_size = self.data.manifest.vocab_size
        return masked_batch(self.tokens, samples, seq_len=seq_len, seed=seed, vocab_size=vocab_size)

    def _tokens(self, inputs: np.ndarray, types: np.ndarray | None) -> tuple[Tensor, Tensor | None]:
        return self._to_device(inputs), None if types is None else self._to_device(types)

    def _to_device(self, array: np.ndarray | None) -> Tensor:
        assert array is not None
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
