"""Pipeline rank of a run with its stages, schedule, and the buckets of its parameters."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES, named_parameters
from impl.model.config import padded_vocabulary
from impl.pipeline.schedule import Schedule
from impl.pipeline.schedules import SCHEDULES, build, ranks_of
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.zero.partition import BucketLayout, divisions, lay_out, owners

HEAD = "head"
"""Name of the token embedding's matrix where it is the output head."""


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
class Sizes:
    """Bytes of a microbatch's activations on one rank: b sequences of s tokens, hidden size h, t ranks share a layer.

    n is b s, or of c ranks that share every sequence b s / c.
    """

    run: Run
    of_experts: bool = field(default=False, kw_only=True)
    """True for a layer with experts, each of which is assumed to get the same number of rows."""

    @property
    def e(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.run.precision]

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, n."""
        return self.run.train.microbatch * self.run.model.seq_len // self.run.plan.cp

    def scored(self, head_positions: int) -> int:
        """Return the tokens of a microbatch that the rank's output head scores: of BERT's whole sequences, all."""
        is_split = self.run.model.family == "gpt"
        return self.run.train.microbatch * head_positions // (self.run.plan.cp if is_split else 1)

    @property
    def heads(self) -> int:
        """Attention heads of a rank."""
        return self.run.model.num_heads // self.run.plan.x

    @property
    def core_heads(self) -> int:
        """Heads of which the rank computes attention's core."""
        return self.heads // (self.run.plan.cp if self.run.plan.exchanges_heads else 1)

    @property
    def groups(self) -> int:
        """Heads of keys and values of a rank, shared ones included."""
        return self.run.model.groups_of(self.run.plan.x)

    @property
    def parts(self) -> int:
        """Parts into which tokens between split blocks are divided: t with sequence parallelism."""
        return self.run.plan.x if self.run.plan.sequence_parallel else 1

    @cached_property
    def activations(self) -> int:
        """Bytes of [n, h], of a grid [n, h / y]."""
        return self.tokens * self.run.model.hidden_size // self.run.plan.y * self.e

    @cached_property
    def own(self) -> int:
        """Bytes of the rank's activations between split blocks: [n, h], sequence parallel [n / t, h]."""
        return self.activations // self.parts

    @cached_property
    def features(self) -> int:
        """Bytes of [n, h / t]."""
        return self.tokens * self.run.model.hidden_size // self.run.plan.x * self.e

    @cached_property
    def qkv(self) -> int:
        """Bytes of a rank's queries, keys and values: [n, 3 h / t] of a GPT."""
        return self.features + 2 * self.groups * self.features // self.heads

    @cached_property
    def projected(self) -> int:
        """Bytes of the queries, keys and values that the rank projects itself: a part only of a head that it shares."""
        return self.features * sum(self.run.model.qkv_sizes) // self.run.model.hidden_size

    @cached_property
    def inner(self) -> int:
        """Bytes of [n, f / t], what an MLP's last product takes: [n, 4 h / t] of a GPT; or of all experts' rows."""
        model = self.run.model
        met = model.choices * model.expert_inner + model.shared_expert_size
        return self.features * (met if self.of_experts else model.mlp_inner) // model.hidden_size

    @property
    def widened(self) -> int:
        """Bytes of the output of an MLP's first product: with a gate [n, 2 f / t]."""
        return self.inner * len(self.run.model.mlp_outputs)

    @property
    def before_function(self) -> int:
        """Bytes that the MLP's function keeps: none of its own if its backward pass needs only its result."""
        return 0 if self.run.model.mlp == "relu" else self.widened

    @property
    def transferred(self) -> int:
        """Bytes that a rank sends to the next pipeline stage: its part if activations are split or scattered."""
        return self.activations // self.run.plan.x if self.run.scatters else self.own


@dataclass(frozen=True)
class Place(Sizes):
    """Pipeline rank of a run."""

    vocab_size: int
    pp_rank: int = 0
    split_into: tuple[Stage, ...] | None = None
    """Stages of the model, of all ranks; None: those of `impl.pipeline.stage.split`."""

    @cached_property
    def schedule(self) -> Schedule:
        plan = self.run.plan
        return build(plan.schedule, plan.pp, self.run.microbatches, plan.chunks)

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages that the rank owns."""
        plan = self.run.plan
        every = self.split_into or split(self.run.model, self.vocab_size, plan.pp * plan.chunks)
        return [stage for stage, owner in zip(every, ranks_of_stages(self.run), strict=True) if owner == self.pp_rank]

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        """Buckets of all of the rank's parameters, in which their gradients are reduced."""
        plan, found = self.run.plan, list[BucketLayout]()
        named = named_parameters(self.run.model, self.vocab_size, plan.x, self.stages, plan.ep, plan.y)
        sizes = {parameter.name: parameter.size for parameter in named}
        elements = plan.bucket_bytes // parameter_bytes(self.run).gradient
        is_tied = self.run.model.tied and self.is_first != self.is_last
        for division, names in divisions([(p.name, p.is_split) for p in named], plan, is_tied=is_tied).items():
            ranks = owners(division.kind, plan)
            found += lay_out([(name, sizes[name]) for name in names], ranks, elements, plan.zero_stage, division)
        return found

    @cached_property
    def is_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @cached_property
    def is_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    @cached_property
    def rows(self) -> int:
        """Rows of the rank's part of the embedding, padding included."""
        return padded_vocabulary(self.vocab_size, self.run.plan.x) // self.run.plan.x


def ranks_of_stages(run: Run) -> tuple[int, ...]:
    """Return the pipeline rank of every stage."""
    plan, few = run.plan, run.microbatches
    if plan.schedule in SCHEDULES:
        few = min(few, 2 * plan.pp)  # which all of them take; the whole table may be large
    return ranks_of(plan.schedule, plan.pp, few, plan.chunks)
