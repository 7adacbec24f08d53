"""Pipeline rank of a run with its stages, schedule, and the buckets of its parameters."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES, named_parameters
from impl.model.config import padded_vocabulary
from impl.pipeline.schedule import Schedule
from impl.pipeline.schedules import SCHEDULES, build
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.zero.partition import BucketLayout, divisions, lay_out, owners


class ParameterBytes(NamedTuple):
    """Bytes that one parameter takes where nothing is divided."""

    weight: int
    gradient: int
    optimizer: int
    """Bytes of two moments, and the master weight where it is another tensor than the weight: ZeRO's K."""


def parameter_bytes(run: Run) -> ParameterBytes:
    """Return 2 + 2 + 12 bytes in mixed precision, 2 + 4 + 12 with gradients in fp32, 4 + 4 + 8 in fp32.

    Source: ZeRO (1910.02054), section 3.1.
    """
    element, master = ELEMENT_BYTES[run.precision], MASTER_BYTES[run.precision]
    is_apart = element < master or run.plan.offload_optimizer
    return ParameterBytes(element, master if run.fp32_gradients else element, (2 + is_apart) * master)


@dataclass(frozen=True)
class Place:
    """Pipeline rank of a run."""

    run: Run
    vocab_size: int
    pp_rank: int = 0
    parts: tuple[Stage, ...] | None = None
    """Stages of the model, of all ranks; None: as `impl.pipeline.stage.split` has them."""

    @cached_property
    def schedule(self) -> Schedule:
        plan = self.run.plan
        return _built(plan.schedule, plan.pp, self.run.microbatches, plan.chunks)

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages that the rank owns."""
        plan = self.run.plan
        every = self.parts or _split(self.run.model, self.vocab_size, plan.pp * plan.chunks)
        if plan.schedule in SCHEDULES:  # their stages are dealt to the ranks in turn; the table may be large
            return list(every[self.pp_rank :: plan.pp])
        return [every[i] for i in self.schedule.stages_of(self.pp_rank)]

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        """Buckets of all of the rank's parameters, in which their gradients are reduced."""
        plan, found = self.run.plan, list[BucketLayout]()
        named = named_parameters(self.run.model, self.vocab_size, plan.tp, self.stages)
        sizes = {parameter.name: parameter.size for parameter in named}
        elements = plan.bucket_bytes // parameter_bytes(self.run).gradient
        is_tied = self.is_first != self.is_last
        for division, names in divisions([(p.name, p.is_split) for p in named], plan, is_tied=is_tied).items():
            ranks = owners(division.kind, plan)
            found += lay_out([(name, sizes[name]) for name in names], ranks, elements, plan.zero_stage, division)
        return found

    @property
    def is_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    @property
    def activations(self) -> int:
        """Bytes of a microbatch's [b s, h]."""
        model = self.run.model
        return self.run.train.microbatch * model.seq_len * model.hidden_size * ELEMENT_BYTES[self.run.precision]

    @property
    def own(self) -> int:
        """Bytes of the rank's activations between split blocks: [n, h], sequence parallel [n / t, h]."""
        return self.activations // (self.run.plan.tp if self.run.plan.sequence_parallel else 1)

    @property
    def features(self) -> int:
        """Bytes of [n, h / t]."""
        return self.activations // self.run.plan.tp

    @property
    def rows(self) -> int:
        """Rows of the rank's part of the embedding, padding included."""
        return padded_vocabulary(self.vocab_size, self.run.plan.tp) // self.run.plan.tp

    @property
    def transferred(self) -> int:
        """Bytes that a tensor-parallel rank sends to the next stage: its part if activations are split or scattered."""
        return self.activations // (self.run.plan.tp if self.run.plan.sequence_parallel or self.run.scatters else 1)


_split = lru_cache(maxsize=16)(split)  # once for all ranks


@lru_cache(maxsize=16)
def _built(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule, cached for all of its ranks."""
    return build(name, ranks, microbatches, chunks)
