"""Bytes that a rank needs for a training step, by category, before anything is launched."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from impl.cost.buffers import gathered_elements, gradient_elements, received_at_once
from impl.cost.moments import fullest, offloaded, update_moment
from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES, named_parameters
from impl.cost.place import Place, parameter_bytes
from impl.model.config import ModelConfig
from impl.pipeline.schedules import SCHEDULES
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.zero.partition import BucketLayout

STEADY = 4
"""Microbatches per pipeline rank after which a step only repeats itself."""


def model_state_bytes(run: Run, parameters: float) -> float:
    """Return the bytes of weights, gradients and optimizer states on one of d devices that divide `parameters`.

    Source: ZeRO (1910.02054), figure 1: 16 P, 4 P + 12 P / d, 2 P + 14 P / d, 16 P / d for the stages 0 to 3.
    """
    each, stage, ranks = parameter_bytes(run), run.plan.zero_stage, run.plan.zero
    divided = [size / (ranks if stage >= first else 1) for size, first in zip(each, (3, 2, 1), strict=True)]
    return parameters * sum(divided)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the fullest moment of a step; all but `host` are the device's."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes that forward passes keep for the backward passes, of all microbatches in flight."""
    buffers: int
    """Bytes of gradients being reduced, of gathered parameters, and of tensors received along the pipeline."""
    rest: int
    """Bytes of what is computed at that moment."""
    host: int = 0
    """Bytes of optimizer states and activations in host memory."""

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.states + self.activations + self.buffers + self.rest

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def memory(
    run: Run,
    vocab_size: int,
    pp_rank: int,
    head_positions: int,
    device: str = "cuda",
    parts: tuple[Stage, ...] | None = None,
    live: int | None = None,
) -> Memory:
    """Return the memory of a pipeline rank: of its data- and tensor-parallel ranks, which hardly differ, the first.

    Padding is counted; stage 3 has no rounded weights in addition to master weights. What the framework and its
    libraries allocate for themselves is not counted.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.
        device: cuda or cpu, whose own memory is the host's; the loss takes parts of the logits to suit it.
        parts: the model's stages; None: as the engine has them.
        live: as `gathered_elements` has it.
    """
    run = _shortened(run)
    place, each, has_host = Place(run, vocab_size, pp_rank, parts), parameter_bytes(run), device != "cpu"
    divided, row = place.buckets, place.schedule.rows[pp_rank]
    parameters, gradients, optimizer = state_parts(run, divided, device)
    moment = max(fullest(place, row, head_positions, device), update_moment(run, divided), key=sum)
    moved = sum(bucket.updated for bucket in divided) * each.optimizer if run.plan.offload_optimizer else 0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=moment.kept,
        buffers=gathered_elements(place, divided, live) * each.weight
        + gradient_elements(place, divided, row) * each.gradient
        + received_at_once(place.schedule.lowered[pp_rank]) * place.transferred,
        rest=moment.computed,
        host=has_host * (moved + offloaded(place, row, head_positions)),
    )


def state_parts(run: Run, buckets: Sequence[BucketLayout], device: str) -> tuple[int, int, int]:
    """Return the bytes of the buckets' weights, gradients and optimizer states on the device."""
    each, is_elsewhere = parameter_bytes(run), run.plan.offload_optimizer and device != "cpu"
    are_masters = each.weight < MASTER_BYTES[run.precision] and not run.plan.offload_optimizer
    return (
        sum(b.weights for b in buckets if not (are_masters and b.zero_stage == 3)) * each.weight,
        sum(bucket.gradients for bucket in buckets) * each.gradient,
        0 if is_elsewhere else sum(bucket.updated for bucket in buckets) * each.optimizer,
    )


def _shortened(run: Run) -> Run:
    """Return the run with the fewest microbatches that show all of a step; GPipe keeps all, since it holds them."""
    plan, steady = run.plan, STEADY * run.plan.pp
    if plan.schedule == "gpipe" or plan.schedule not in SCHEDULES or run.microbatches <= steady:
        return run
    batch = steady * run.train.microbatch * plan.dp
    return replace(run, train=replace(run.train, global_batch=batch))


def memory_of_ranks(
    run: Run,
    vocab_size: int,
    head_positions: int,
    device: str = "cuda",
    parts: tuple[Stage, ...] | None = None,
    live: int | None = None,
) -> list[Memory]:
    """Return `memory` of every pipeline rank, in order."""
    return [memory(run, vocab_size, rank, head_positions, device, parts, live) for rank in range(run.plan.pp)]


class StateBytes(NamedTuple):
    """Bytes of weights, gradients, master weights and moments of one rank."""

    split: int
    """Bytes of parameters split over tensor-parallel ranks, padding included: these fall as 1/t."""
    whole: int
    """Bytes of parameters that every tensor-parallel rank has."""


def state_bytes(
    config: ModelConfig, vocab_size: int, *, tp: int, precision: str, stages: Sequence[Stage] | None = None, ep: int = 1
) -> StateBytes:
    """Return the bytes of weight, gradient, master weight where there is one, and two moments, of a rank's parameters.

    Args:
        stages: the pipeline stages that the rank owns; None: all of a model in one.
        ep: ranks that share experts.
    """
    element, master = ELEMENT_BYTES[precision], MASTER_BYTES[precision]
    each = element + (4 if element < master else 3) * master
    named = named_parameters(config, vocab_size, tp, stages, ep)
    split = sum(parameter.size for parameter in named if parameter.is_split)
    return StateBytes(split * each, sum(parameter.size for parameter in named) * each - split * each)
