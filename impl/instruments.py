"""Memory of a trainer, counted and not estimated: what it holds, what a forward pass keeps, what a step needs."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from impl.cost.memory import StateBytes
from impl.model.dropout import DropoutKey
from impl.model.layers import Block, Layer
from impl.plan import AXES
from impl.tensor_parallel.shards import shards_of
from impl.train import WEIGHTS, Trainer


class ActivationBytes(NamedTuple):
    """Bytes kept from the forward pass for the backward pass: whole model, and last transformer layer."""

    model: int
    layer: int
    host: int = 0
    """Bytes of the whole model's activations in host memory, in addition to `model` on the device."""


def state_bytes(trainer: Trainer) -> StateBytes:
    """Return the bytes of weights, gradients, master weights and moments on this rank."""
    shards, held = shards_of(trainer.model), {True: 0, False: 0}
    for bucket, master in zip(trainer.buckets[::-1], trainer.optimizer.masters, strict=True):
        is_apart = master.data_ptr() != bucket.own_weights.data_ptr()
        owned = {piece.name: piece.stop - piece.start for piece in bucket.places()}
        for slot in bucket.layout.slots:
            own = owned.get(slot.name, 0)
            weights = (own if bucket.stage == 3 else slot.size) * bucket.weights_kept.itemsize
            gradient = (own if bucket.stage >= 2 else slot.size) * bucket.gradient.itemsize
            held[slot.name in shards and shards[slot.name].over_heads] += (
                weights + gradient + own * (2 + is_apart) * master.itemsize
            )
    return StateBytes(split=held[True], whole=held[False])


def activation_bytes(trainer: Trainer) -> ActivationBytes:
    """Return the bytes that one microbatch's forward passes keep for the backward passes, which are not run."""
    trainer.model.train()
    size, run, of_layers = trainer.run.train.microbatch, trainer.run, list[int]()

    def counted(name: str, block: Callable[[Any], Tensor]) -> Block:
        def count(x: Any) -> Tensor:
            before = memory.kept + memory.kept_elsewhere
            out = block(x)
            if name.startswith("layers."):
                of_layers.append(memory.kept + memory.kept_elsewhere - before)
            return out

        return Block(name, count)

    with tracked({"weights": [bucket.weights for bucket in trainer.buckets]}, trainer.device) as memory:
        outputs = []  # the graph stays alive
        for stage in trainer.own.values():
            x = None if stage.is_first else trainer.activations(size, run.model.seq_len).requires_grad_()
            blocks = trainer.stage_blocks(stage, np.arange(size), DropoutKey(run.seed, 0, 0))
            outputs.append(trainer.parameters.run([counted(*block) for block in blocks], x))
    return ActivationBytes(memory.kept, of_layers[-1], memory.kept_elsewhere)


def attention_kernel(trainer: Trainer) -> str:
    """Return the name of attention's kernel that PyTorch chooses for these sizes on this device, or `products`."""
    run, layer = trainer.run, next(iter(trainer.model.trunk.layers.values()))
    assert isinstance(layer, Layer)
    attention = layer.attention
    if attention.dropout.rate:
        return "products"
    how: Any = {"dtype": WEIGHTS[run.precision], "device": trainer.device, "requires_grad": True}
    empty = lambda heads: torch.empty(1, heads, run.model.seq_len, attention.head_size, **how)
    q, kv = empty(attention.heads), empty(attention.groups)
    if run.plan.cp > 1 and run.plan.is_ring:
        from impl.context_parallel import has_flash  # for few runs

        return "flash_attention" if has_flash(q) else "products"
    is_shared = attention.heads != attention.groups
    chosen = torch._fused_sdp_choice(q, kv, kv, is_causal=attention.causal, enable_gqa=is_shared)
    return SDPBackend(chosen).name.lower()


def named_groups(trainer: Trainer) -> dict[str, str]:
    """Return the axes of the mesh of every group of the trainer, as `impl.cost.traffic.step_traffic` names them."""
    plan, tp = trainer.run.plan, trainer.tp
    joined = lambda *axes: "_".join(axis for axis in axes if getattr(plan, axis) > 1)
    data = ("zero",) if plan.replicas > 1 else ("dp", "cp")
    of_size = {plan.zero * plan.x: joined(*data, "tp"), plan.zero: joined(*data)}
    groups = [(trainer.group, "dp"), (tp.group, "tp"), (trainer.pp_group, "pp")]
    for reduction in (bucket.reduction for bucket in trainer.buckets):
        others = (reduction.ends, "ends"), (reduction.replicas, "replicas")
        groups += [(group, name) for group, name in others if group is not None]
        of_experts = tp.experts is not None and reduction.group is tp.experts.owners
        groups.append((reduction.group, "owners" if of_experts else of_size[reduction.group.size()]))
    groups += [(trainer.gradients.every_rank, joined(*AXES)), (trainer.sharers, joined("dp", "cp"))]
    groups += [(group, "pp") for group in trainer.engine.links.over.values()]
    groups += [(tp.context.group, "cp")] if tp.context is not None else []
    groups += [(tp.features, "features")] if tp.features is not None else []
    groups += [(tp.neighbours, "heads")] if tp.neighbours is not None else []
    groups += [(tp.experts.group, "ep")] if tp.experts is not None and tp.experts.group is not None else []
    return {str(group.group_name): name for group, name in groups[::-1]}  # of one group's names the first


Held = Mapping[str, Collection[Tensor]]
"""Tensors by what they are for; views are as good as what they are views of."""
HOST = "host"
"""What is not on the tracked device."""


@dataclass(eq=False)
class _Memory:
    """A storage, from the operation that made it to the one before which it was freed."""

    size: int
    born: int
    watch: weakref.ref[torch.UntypedStorage]
    died: int | None = None
    is_kept: bool = False
    """Whether autograd kept it for the backward pass."""
    is_buffer: bool = False
    """Whether it was part of a transfer."""


class Tracked(TorchDispatchMode):
    """The memory of every operation's results, for as long as they live."""

    def __init__(self, held: Held, device: torch.device, passing: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self.device, self.peak, self.passing = device, 0, passing
        self._all: list[_Memory] = []
        self._alive: dict[int, _Memory] = {}
        self.kept = self.kept_elsewhere = 0
        """Bytes that autograd kept without what was declared, on the device and on others."""
        self._elsewhere: set[int] = set()
        self._time = self._total = self._fullest = 0
        self._sizes: dict[_Memory, int] = {}
        self._resizable: set[_Memory] = set()
        for tensor in (tensor for tensors in held.values() for tensor in tensors):
            self._see(tensor)
        # memory that was declared may be released and taken again while its tensor lives
        self._resizable, self._total = set(self._all), 0
        self._sample()

    @property
    def alive(self) -> int:
        """Bytes on the device now, without what was declared."""
        return self._total

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and to say so to the compiler would import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self._sample()
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps the tensor; without its graph, which an operation's own result would keep alive."""
        memory, storage = self._see(tensor), tensor.untyped_storage()
        if memory is None:
            self.kept_elsewhere += 0 if storage._cdata in self._elsewhere else storage.nbytes()
            self._elsewhere.add(storage._cdata)
        elif not memory.is_kept:
            memory.is_kept = True
            self.kept += 0 if memory in self._resizable else memory.size
        return tensor if tensor.is_leaf else tensor.detach()

    def _see(self, tensor: Tensor) -> _Memory | None:
        if tensor.device != self.device:
            return None
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name not in self._alive:
            memory = _Memory(storage.nbytes(), self._time, weakref.ref(storage, lambda _: self._gone(name)))
            self._alive[name] = memory
            self._all.append(memory)
            self._total += memory.size
        return self._alive[name]

    def _gone(self, name: int) -> None:
        memory = self._alive.pop(name)
        memory.died = self._time
        if memory in self._resizable:
            self._resizable.remove(memory)
        else:
            self._total -= memory.size

    def _sample(self) -> None:
        for tensor in self.passing():
            if (memory := self._see(tensor)) is not None:
                memory.is_buffer = True
        resizable = [storage.nbytes() for memory in self._resizable if (storage := memory.watch()) is not None]
        total = self._total + sum(resizable)
        if total > self.peak:
            sizes = dict(zip(self._resizable, resizable, strict=True))
            self.peak, self._fullest, self._sizes = total, self._time, sizes
        self._time += 1

    def parts(self, held: Held) -> dict[str, int]:
        """Return bytes at the fullest moment: of declared tensors, of activations that autograd kept, and of the rest.

        What was declared and lies elsewhere than on the device is `host`, where there is any.
        """
        parts = {**dict.fromkeys(held, 0), "activations": 0, "rest": 0}
        at_peak = [m for m in self._all if m.born <= self._fullest and (m.died is None or m.died > self._fullest)]
        category: dict[_Memory, str] = {}
        for name, tensors in held.items():
            for tensor in tensors:
                if tensor.device != self.device:
                    parts[HOST] = parts.get(HOST, 0) + tensor.untyped_storage().nbytes()
                elif (memory := self._alive.get(tensor.untyped_storage()._cdata)) is not None:
                    category[memory] = name
        for memory in at_peak:
            rest = "buffers" if memory.is_buffer else "activations" if memory.is_kept else "rest"
            name = category.get(memory, rest)
            parts[name] += self._sizes.get(memory, memory.size)
        return parts


def gradients_under_way(trainer: Trainer) -> list[Tensor]:
    """Return what holds gradients until they are summed; that of a parameter larger than a buffer lives no longer."""
    return [bucket.flat for bucket in trainer.buckets if bucket.stage >= 2 and bucket.flat is not None]


@contextmanager
def tracked(
    held: Held, device: torch.device, passing: Callable[[], Iterable[Tensor]] = lambda: ()
) -> Iterator[Tracked]:
    """Count the memory on the device while operations inside run; they become slower.

    What was there before is counted if it was declared; what an operation needs within itself is not counted.

    Args:
        held: what there is already; memory that changes its size has to be declared here.
        passing: returns the buffers of the moment, for those that are made and freed meanwhile.
    """
    tracker = Tracked(held, device, passing)
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, lambda tensor: tensor), tracker:
        yield tracker
