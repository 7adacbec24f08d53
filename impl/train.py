"""One rank of a training run: builds model, plan and data together. The only module that holds the mesh."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl import evaluate
from impl.collectives import all_gather, all_reduce_sum, broadcast, own_start
from impl.data.batches import Batch, causal_batch, head_positions, masked_batch
from impl.data.config import OPTIONS
from impl.data.tokens import TokenFolder
from impl.grouping import by_key
from impl.mesh import ends_group, expert_groups, joint_group, neighbours, transfer_groups, zero_groups
from impl.model.bert import BERT, MultipleChoice
from impl.model.config import padded_vocabulary
from impl.model.dropout import DropoutKey
from impl.model.gpt import GPT
from impl.model.initialise import InitialWeights, build_structure
from impl.model.layers import Block
from impl.model.parametrization import scale
from impl.optim import MasterAdamW, Rate, Share, learning_rate
from impl.pipeline.engine import Engine, Links, Watch
from impl.pipeline.schedule import forward_only
from impl.pipeline.schedules import build
from impl.pipeline.stage import Stage, split
from impl.plan import AXES
from impl.precision import LossScale, name_of
from impl.recompute import kept_by, recompute
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import shards_of
from impl.tensor_parallel.vocabulary import added_weights
from impl.tensor_parallel.weight_gradients import WeightGradients
from impl.untraced import compile_in_place
from impl.zero.buckets import Bucket, ReductionGroup, divide
from impl.zero.gradients import Gradients
from impl.zero.parameters import Parameters
from impl.zero.partition import Kind, divisions, unit_of, units_of_block

if TYPE_CHECKING:
    from impl.context_parallel import ContextParallel
    from impl.device import Device
    from impl.expert_parallel import ExpertParallel

WEIGHTS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASTERS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}


class Step(NamedTuple):
    """Results of one optimizer step, equal on every rank."""

    loss: Tensor
    """Mean loss over the global batch, in nats, before the update."""
    grad_norm: Tensor
    lr: float
    is_skipped: bool = False
    """True if fp16 gradients overflowed and nothing was updated."""


class Trainer:
    """Trainer of one run: `step(i)` does the i-th optimizer step; calls with i = 0, 1, ... train the model.

    A step depends on weights, moments and i only: data, dropout and learning rate are functions of i.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        from impl.device import Device  # with what only GPUs need

        self.run, self.data, self.device, self.there = run, data, device, Device.of(device)
        self.group, self.pp_group = mesh.get_group("dp"), mesh.get_group("pp")
        self.sharers = joint_group(mesh, "dp", "cp")
        self.vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        self.schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
        weight_gradients = WeightGradients()
        self.tp = TensorParallel(
            (neighbours(mesh, run.plan.x) if run.plan.y > 1 else None) or mesh.get_group("tp"),
            run.plan.sequence_parallel,
            run.plan.overlap_input_grad_reduce,
            weight_gradients if self.schedule.is_split or not run.compile else None,  # it breaks a compiled graph
            neighbours(mesh, sharing) if (sharing := run.model.sharing(run.plan.x)) > 1 else None,
            neighbours(mesh, run.plan.y, run.plan.x) if run.plan.y > 1 else None,
            self._context(mesh),
            self._experts(mesh),
        )
        self.stages = split(run.model, self.vocab_size, run.plan.pp * run.plan.chunks)
        self.own = {i: self.stages[i] for i in self.schedule.stages_of(self.pp_group.rank())}
        self.model = self._structure()
        offload = self.there if run.plan.offload_activations else None
        self.kept = kept_by(self.tp.group, partition=run.plan.partition_activations, offload=offload)
        if run.compile:
            for layer in self.model.trunk.layers.values():
                compile_in_place(layer)
        self.buckets = divide(
            self._reduction_groups(mesh),
            stage=run.plan.zero_stage,
            dtype=MASTERS[run.precision] if run.fp32_gradients else WEIGHTS[run.precision],
            bucket_bytes=run.plan.bucket_bytes,
            kept=(WEIGHTS if run.plan.offload_optimizer else MASTERS)[run.precision],
            device=device,
            initial=InitialWeights(self.model, run.model, run.seed, self.tp, run.train),
        )
        self.gradients = Gradients(
            self.buckets,
            joint_group(mesh, *AXES),
            overlap=run.plan.overlap_grad_reduce,
            arrivals=self._arrivals(),
            added=added_weights(self.model) if self.tp.weight_gradients else (),
        )
        weight_gradients.sums = self.gradients
        self.parameters = Parameters(self._buckets_of_blocks(), overlap=run.plan.overlap_param_gather)
        links = self._links(mesh)
        self.engine = Engine(self.schedule, links, weight_gradients.collecting)
        self.scorer = Engine(forward_only(self.schedule), links, weight_gradients.collecting)
        forward = self.buckets[::-1]  # order in which the forward pass needs them
        self.optimizer = MasterAdamW(
            [Share(b.own_weights, b.gradient, b.places(), b.is_first_copy) for b in forward],
            self._rates(),
            run.train,
            dtype=MASTERS[run.precision],
            offload=self.there if run.plan.offload_optimizer else None,
            publish=lambda i: self.parameters.publish(forward[i]),
        )
        self.loss_scale, self.batch = LossScale(run.train, run.precision), self._batches()
        self.on_gradient: Callable[[], object] = lambda: None  # in each step, when its gradient is complete

    def _context(self, mesh: DeviceMesh) -> "ContextParallel | None":
        if self.run.plan.cp == 1:
            return None
        from impl.context_parallel import ContextParallel  # for few runs

        return ContextParallel.of(self.run.plan, mesh.get_group("cp"), self.run.model.seq_len)

    def _experts(self, mesh: DeviceMesh) -> "ExpertParallel | None":
        if not self.run.model.experts:
            return None
        from impl.expert_parallel import ExpertParallel  # for few runs

        plan = self.run.plan
        return ExpertParallel(*expert_groups(mesh, plan.ep, plan.zero)) if plan.ep > 1 else ExpertParallel()

    def _structure(self) -> GPT | BERT | MultipleChoice:
        """Return this rank's part of the model; its parameters get their memory as parts of buckets."""
        model = build_structure(
            self.run.model,
            self.vocab_size,
            WEIGHTS[self.run.precision],
            self.tp,
            list(self.own.values()),
            recompute_core=self.run.plan.recompute == "selective",
            answers_choices=self.run.data.race is not None,
        )
        if self.tp.features is not None:
            from impl.grid import divide_features  # for few runs

            divide_features(model.trunk, self.run.model, self.tp)
        return model

    def _rates(self) -> dict[str, Rate]:
        decay, factor = self.run.train.weight_decay, lambda name: scale(self.run.model, self.run.train, name).rate
        named = ((name, p, factor(name)) for name, p in self.model.named_parameters())
        fixed = lambda name: self.run.model.balance_bias if name.endswith(".router.bias") else None
        return {name: Rate(by, decay / by if p.dim() > 1 else 0.0, fixed(name)) for name, p, by in named}

    def _reduction_groups(self, mesh: DeviceMesh) -> list[ReductionGroup]:
        """Group the parameters by the ranks over which their gradients are summed first.

        They are those of `impl.zero.partition.Kind`; at stage 3 each gathered unit has groups of its own.
        """
        shards, named, plan = shards_of(self.model), dict(self.model.named_parameters()), self.run.plan
        ends = {self.schedule.rank_of[0], self.schedule.rank_of[len(self.stages) - 1 if self.run.model.tied else 0]}
        both_ends = ends_group(mesh, ends) if len(ends) > 1 else None
        every, every_token, replicas = zero_groups(mesh, plan)
        split = [(name, name in shards and shards[name].over_heads) for name in named]
        found = divisions(split, plan, is_tied=both_ends is not None)
        copies = {"whole": (self.tp.group,), "copied": (self.tp.features,), "partial": (self.tp.features,)}
        over = dict.fromkeys(get_args(Kind), (every, replicas)) | {"partial": (every_token, replicas)}
        if self.tp.experts is not None and self.tp.experts.owners is not None:
            over["expert"] = self.tp.experts.owners, self.tp.experts.replicas
        return [
            ReductionGroup(
                {name: named[name] for name in names},
                over[kind][0],
                [group for group in copies.get(kind, ()) if group is not None],
                over[kind][1],
                both_ends if kind == "tied" else None,
            )
            for (_, kind), names in found.items()
        ]

    def _buckets_of_blocks(self) -> dict[str, list[Bucket]]:
        """Return the buckets that hold a block's parameters, by the block's name."""
        parts = ((bucket, {unit_of(slot.name) for slot in bucket.layout.slots}) for bucket in self.buckets)
        units = by_key((unit, bucket) for bucket, own in parts for unit in own)
        tied = self.run.model.tied
        blocks = ["embedding", "embedding_norm", "head", *(f"layers.{i}" for i in range(self.run.model.num_layers))]
        return {
            block: list(dict.fromkeys(b for unit in units_of_block(block, tied) for b in units.get(unit, ())))
            for block in blocks
        }

    def _arrivals(self) -> dict[nn.Parameter, int]:
        """Return the gradients that a parameter receives in a backward pass: the embedding one of each end.

        Autograd adds both up where they are one stage.
        """
        found, adds = dict[nn.Parameter, int](), self.tp.weight_gradients is not None
        if self.run.model.shared_layers:
            from impl.model.shared_layers import arrivals  # for few runs

            layers, is_again = self.model.trunk.layers, self.run.plan.recompute == "full"
            found = arrivals(layers["0"], len(layers), recomputed=is_again, adds=adds)
        if self.model.trunk.tokens is None or not self.run.model.tied:
            return found
        ends = sum(stage.is_first + (stage.is_last and not self.run.data.race) for stage in self.own.values())
        are_one = len(self.stages) == 1 and not adds
        return {**found, self.model.trunk.tokens.weight: 1 if are_one else ends}

    def _links(self, mesh: DeviceMesh) -> Links:
        group, over = self.tp.group, transfer_groups(mesh, self.schedule.ways) if self.there.queues_transfers else {}
        if not self.run.scatters:
            return Links(self.pp_group, over=over)
        pack, unpack = lambda tensor: own_start(tensor, group).wait(), lambda part: all_gather(part, group)
        return Links(self.pp_group, pack, unpack, over)

    def step(self, i: int, watch: Watch | None = None) -> Step:
        """Run forward and backward over this rank's share of the i-th global batch, then update.

        Communication: the layers', the pipeline's, the gradients' and the parameters', and all-reduces of a scalar: the
        loss over all of dp and cp and the pipeline, the gradient norm over all ranks.
        """
        self.model.train()
        loss = self.backward(i, watch)
        self.on_gradient()
        scale, limit, lr = self.loss_scale.scale, self.run.train.clip_norm, learning_rate(self.run.train, i)
        norm = self.gradients.norm() / scale
        overflowed = self.loss_scale.is_dynamic and not norm.isfinite().item()
        self.loss_scale.update(overflowed=overflowed)
        if overflowed:
            return Step(loss, norm, lr, is_skipped=True)
        clipped = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
        self.optimizer.step(lr, clipped / scale if limit or self.loss_scale.is_dynamic else None)
        return Step(loss, norm, lr)

    def backward(self, i: int, watch: Watch | None = None) -> Tensor:
        """Accumulate the gradient of the i-th global batch's mean loss times the loss scale, and return that loss."""
        count, size = self.run.microbatches, self.run.train.microbatch
        share = 1.0 / (count * self.sharers.size())
        if self.tp.experts is not None:
            self.tp.experts.loss_share = share * self.loss_scale.scale
        loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(stage: int, k: int, x: Tensor | None) -> Tensor:
            self.gradients.settle()
            microbatch = self.group.rank() * count + k
            first = i * self.run.train.global_batch + microbatch * size
            key = DropoutKey(self.run.seed, i, microbatch)
            blocks = self.stage_blocks(self.stages[stage], np.arange(first, first + size), key)
            out = self.parameters.run(blocks, x)
            if self.stages[stage].is_last:
                out = out * share
                loss.add_(out.detach())
                out = out * self.loss_scale.scale if self.loss_scale.is_dynamic else out
            return out

        with self.gradients.accumulated(count):
            self.engine.run(forward, self.activations(size, self.run.model.seq_len), watch)
        return all_reduce_sum(all_reduce_sum(loss, self.sharers), self.pp_group)

    def stage_blocks(self, stage: Stage, samples: np.ndarray, key: DropoutKey) -> list[Block]:
        """Return the stage's blocks for these samples; the last stage ends in the loss."""
        batch = self.batch(samples) if stage.is_first or stage.is_last else None
        return self._blocks(stage, batch, self.run.model.seq_len, key, self.model.loss)

    def _blocks(
        self, stage: Stage, batch: Batch | None, seq_len: int, key: DropoutKey | None, head: Callable[..., Tensor]
    ) -> list[Block]:
        """Return a stage's blocks, with layers recomputed if the plan asks for it; those of the last end in the head.

        Args:
            batch: the first and the last stage's, of whole sequences; the others need none.
        """
        if batch and self.tp.context:
            batch = self.tp.context.part_of(batch)
        tokens = None
        if batch and stage.is_first:
            types = None if batch.token_types is None else to_device(batch.token_types, self.there)
            tokens = to_device(batch.inputs, self.there), types
        blocks = list(self.model.trunk.blocks(stage, tokens, seq_len // self.run.plan.cp, key))
        if self.run.plan.recompute == "full":
            again = lambda block: Block(block.name, partial(recompute, block.run, kept=self.kept))
            blocks = [again(block) if block.name.startswith("layers.") else block for block in blocks]
        if batch and stage.is_last:
            goals = [to_device(goal, self.there) for goal in batch.goals]
            blocks.append(Block("head", lambda x: head(x, *goals)))
        return blocks

    def activations(self, sequences: int, length: int) -> Tensor:
        """Return a tensor shaped like what stages send each other; its memory is not touched."""
        tokens = sequences * length // self.run.plan.cp // self.tp.tokens.of
        hidden, dtype = self.run.model.hidden_size // self.run.plan.y, WEIGHTS[self.run.precision]
        return torch.empty(tokens, hidden, dtype=dtype, device=self.device)

    def evaluate(self, *, final: bool) -> list[evaluate.Evaluation]:
        """Run validation, and after the last step the run's other evaluations; results are equal on every rank."""
        self.model.eval()
        with torch.no_grad():
            return evaluate.evaluate(
                self.run, self.data, self, self.group, final=final, batch=self.run.train.microbatch
            )

    def settings(self) -> dict[str, Any]:
        """Return PyTorch's version, types, the padded vocabulary, and the sizes of this rank's gradient buckets."""
        return {
            "torch": torch.__version__,
            "weights": name_of(WEIGHTS[self.run.precision]),
            "accumulates": name_of(self.buckets[0].dtype),
            "optimizer": {"name": "AdamW", "weights": name_of(MASTERS[self.run.precision])},
            "padded_vocab_size": padded_vocabulary(self.vocab_size, self.run.plan.x),
            "bucket_bytes": [bucket.layout.size * bucket.dtype.itemsize for bucket in self.buckets],
        }

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank holds between steps, by category; no two share memory."""
        gathered = [bucket.weights for bucket in self.buckets if bucket.stage == 3]  # empty between steps
        is_master = lambda bucket: bucket.weights_kept.dtype != bucket.weights_dtype
        return {
            "parameters": [bucket.weights_kept for bucket in self.buckets if not is_master(bucket)],
            "gradients": [bucket.gradient_kept for bucket in self.buckets],
            "optimizer": [*self.optimizer.tensors(), *(b.weights_kept for b in self.buckets if is_master(b))],
            "buffers": [*gathered, *self.gradients.buffers, *self.engine.buffers, *self.scorer.buffers],
        }

    @property
    def head_positions(self) -> int:
        """Positions of a sequence whose token is predicted; none of RACE's."""
        return 0 if self.run.data.race else head_positions(self.run.model)

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return -log p of every target and whether it is the likeliest token. Shapes: [b, s] -> [b, s], [b, s]."""
        length, model = inputs.shape[1], self.model
        assert isinstance(model, GPT)
        # tokens that are split need a divisible length; padding after the end changes nothing
        parts, plan = self.tp.degree if self.run.scatters else self.tp.tokens.of, self.run.plan
        parts = math.lcm(plan.cp_chunks, plan.cp * parts)
        padding = ((0, 0), (0, -length % parts))
        batch = Batch(np.pad(inputs, padding), np.pad(targets, padding))
        whole = self.tp.context.whole if self.tp.context else lambda scores: scores
        score = lambda x, goal: torch.stack([whole(part.float()) for part in model.score(x, goal)])
        nats, is_likeliest = self._score(batch, (2, *batch.targets.shape), score)
        return nats[:, :length], is_likeliest[:, :length] > 0

    def nats(self, batch: Batch) -> Tensor:
        """Return -log p of each masked token, or of each option of each question. Shapes: [b, k], or [b / 4, 4]."""
        model = self.model
        assert not isinstance(model, GPT)
        return self._score(batch, batch.targets.shape, model.nats)

    def _score(self, batch: Batch, shape: Sequence[int], score: Callable[..., Tensor]) -> Tensor:
        """Return the last stage's output on the CPU of every pipeline rank; the other stages need its shape."""
        scores = torch.empty(shape, dtype=torch.float32, device=self.device)

        def forward(stage: int, _: int, x: Tensor | None) -> Tensor:
            nonlocal scores
            blocks = self._blocks(self.stages[stage], batch, batch.inputs.shape[1], None, score)
            out = self.parameters.run(blocks, x)
            if self.stages[stage].is_last:
                scores = out.float()
            return out

        self.scorer.run(forward, self.activations(*batch.inputs.shape))
        return broadcast(scores, self.schedule.rank_of[len(self.stages) - 1], self.pp_group).cpu()

    def _batches(self) -> Callable[[np.ndarray], Batch]:
        """Return the function from indices of training sequences to their batch."""
        run, tokens = self.run, self.data.tokens("train")
        if run.model.family == "gpt":
            return partial(causal_batch, tokens, seq_len=run.model.seq_len, seed=run.seed)
        of = {"seq_len": run.model.seq_len, "seed": run.seed, "vocab_size": self.data.manifest.vocab_size}
        if run.data.race is None:
            return partial(masked_batch, tokens, **of)
        from impl.data.race import choice_batch, race_part  # with the readers of its sources, for few runs

        questions = partial(race_part, run.data.race, "train", self.data.tokenizer)
        return lambda samples: choice_batch(questions(), samples[::OPTIONS] // OPTIONS, **of)


def to_device(array: np.ndarray, device: "Device") -> Tensor:
    """Return the array as a tensor on the device; the copy to a GPU is asynchronous."""
    return device.put(torch.from_numpy(np.ascontiguousarray(array)))
