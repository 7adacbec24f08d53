"""One rank of a training run: model, plan and data put together. The only place that holds the mesh."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl import evaluate
from impl.activations import kept_for_backward
from impl.collectives import all_reduce_sum
from impl.cost.memory import StateBytes
from impl.data.batches import Batch, causal_batch, masked_batch
from impl.data.tokens import TokenFolder
from impl.mesh import joint_group
from impl.model.bert import BERT
from impl.model.gpt import GPT
from impl.model.initialise import build_model
from impl.model.layers import DropoutKey
from impl.optim import MasterAdamW, learning_rate
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
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
        self.group = mesh.get_group("dp")
        self.tp = TensorParallel(
            mesh.get_group("tp"), run.plan.sequence_parallel, overlap=run.plan.overlap_input_grad_reduce
        )
        self.vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        self.model = build_model(run.model, self.vocab_size, run.seed, WEIGHTS[run.precision], self.tp).to(device)
        if run.compile:
            for layer in self.model.trunk.layers:
                layer.compile()
        self.gradients = Gradients(
            self._reduced(mesh),
            self.tp.group,
            dtype=MASTERS[run.precision],
            bucket_bytes=run.plan.bucket_bytes,
            overlap=run.plan.overlap_grad_reduce,
        )
        self.optimizer = MasterAdamW(dict(self.model.named_parameters()), self.gradients.of, run.train)
        self.tokens = data.tokens("train")

    def _reduced(self, mesh: DeviceMesh) -> list[Reduced]:
        """Split parameters, whole ones, and those whole ones that met only this rank's tokens."""
        shards = shards_of(self.model) if self.tp.degree > 1 else {}
        named = list(self.model.named_parameters())
        split = [p for name, p in named if name in shards]
        is_partial = lambda name: self.run.plan.sequence_parallel and name.startswith("trunk.")
        partial = [p for name, p in named if name not in shards and is_partial(name)]
        whole = [p for name, p in named if name not in shards and not is_partial(name)]
        return [
            Reduced(split, self.group, is_split=True),
            Reduced(whole, self.group, is_split=False),
            Reduced(partial, joint_group(mesh, "dp", "tp"), is_split=False),
        ]

    def step(self, i: int) -> Step:
        """Forward and backward over this rank's share of the i-th global batch, then the update.

        Communication: the layers', the gradients' all-reduce over the data-parallel group, and two of a scalar.
        """
        self.model.train()
        self.gradients.zero()
        loss = self.backward(i)
        norm = self.gradients.clip(self.run.train.clip_norm)
        lr = learning_rate(self.run.train, i)
        self.optimizer.step(lr)
        return Step(loss, norm, lr)

    def backward(self, i: int) -> Tensor:
        """Accumulate the gradient of the i-th global batch's mean loss; returns that loss, summed over the ranks."""
        count, size = self.run.microbatches, self.run.train.microbatch
        share = 1.0 / (count * self.group.size())
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for k in range(count):
            microbatch = self.group.rank() * count + k
            first = i * self.run.train.global_batch + microbatch * size
            batch = self._batch(np.arange(first, first + size))
            part = self._loss(batch, DropoutKey(self.run.seed, i, microbatch)) * share
            if k < count - 1:
                part.backward()
            else:
                with self.gradients.last_backward():
                    part.backward()
            loss += part.detach()
        return all_reduce_sum(loss, self.group)

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
        """Bytes that the forward pass of one microbatch keeps for the backward pass, which is not taken."""
        self.model.train()
        batch = self._batch(np.arange(self.run.train.microbatch))
        with kept_for_backward(self.model.parameters()) as kept:
            layer = self.model.trunk.layers[-1]
            before = layer.register_forward_pre_hook(lambda *_: kept.mark())
            after = layer.register_forward_hook(lambda *_: kept.mark())
            self._loss(batch, DropoutKey(self.run.seed, 0, 0))
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
        device, length = self._to_device, inputs.shape[1]
        assert isinstance(self.model, GPT)
        # tokens that are split need a length to split; behind the end they change nothing
        padding = ((0, 0), (0, -length % self.tp.tokens.of))
        nats, is_likeliest = self.model.score(device(np.pad(inputs, padding)), device(np.pad(targets, padding)))
        return nats[:, :length].float().cpu(), is_likeliest[:, :length].cpu()

    def masked(self, batch: Batch) -> Tensor:
        """-log p of every masked token. Shapes: [b, k]."""
        device = self._to_device
        assert isinstance(self.model, BERT)
        parts = map(device, (batch.inputs, batch.token_types, batch.positions, batch.targets))
        return self.model.score(*parts).float().cpu()

    def _batch(self, samples: np.ndarray) -> Batch:
        seq_len, seed = self.run.model.seq_len, self.run.seed
        if self.run.model.family == "gpt":
            return causal_batch(self.tokens, samples, seq_len=seq_len, seed=seed)
        vocab_size = self.data.manifest.vocab_size
        return masked_batch(self.tokens, samples, seq_len=seq_len, seed=seed, vocab_size=vocab_size)

    def _loss(self, batch: Batch, key: DropoutKey) -> Tensor:
        device = self._to_device
        if isinstance(self.model, BERT):
            return self.model.loss(
                device(batch.inputs),
                device(batch.targets),
                key,
                types=device(batch.token_types),
                positions=device(batch.positions),
                is_next=device(batch.is_next),
            )
        return self.model.loss(device(batch.inputs), device(batch.targets), key)

    def _to_device(self, array: np.ndarray | None) -> Tensor:
        assert array is not None
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
