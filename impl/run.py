"""One training run: model, plan, recipe, data, evaluation and seed."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt, TypeAdapter
from pydantic.dataclasses import dataclass

from impl.data.config import OPTIONS, DataConfig
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.fields import CHECKED, Count, Threads, divisors
from impl.model.config import ModelConfig
from impl.pipeline.schedules import why_invalid
from impl.pipeline.stage import partition
from impl.plan import Plan
from impl.recipe import Recipe

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
EngineName = Literal["native", "deepspeed", "torch"]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Run:
    """What is trained and how. Equal runs give equal losses; `repeat` distinguishes measurements of one run."""

    model: ModelConfig = ModelConfig()
    plan: Plan = Plan()
    train: Recipe = Recipe()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    precision: Precision = "fp32"
    """bf16, fp16: weights and activations of that type, fp32 master weights and moments; fp16 scales the loss."""
    fp32_gradients: bool = True
    """Accumulate and reduce the gradients of bf16 and fp16 weights in fp32; False: in the weights' type."""
    engine: EngineName = "native"
    """Whose implementation trains: ours, DeepSpeed's, or PyTorch's own parts."""
    compile: bool = False
    """torch.compile on each transformer block."""
    threads: Threads = 1
    """CPU threads of one rank."""
    seed: NonNegativeInt = 0
    repeat: Count = 0
    start: str | None = None
    """Whose weights training starts from: the newest checkpoint in a folder, or of a run that `keep_end` kept, given by
    its id, of the same experiment and tier; None: initial weights."""
    keep_end: bool = False
    """Keep a checkpoint of the last step, for other runs to start from."""

    @property
    def id(self) -> str:
        """12 hex digits of the SHA-256 of the fields that differ from their defaults: a new field orphans no record."""
        return hashlib.sha256(json.dumps(non_defaults(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def microbatches(self) -> int:
        """Forward and backward passes of one rank in one step."""
        return self.train.global_batch // (self.train.microbatch * self.plan.dp)

    @property
    def scatters(self) -> bool:
        """True if each tensor-parallel rank sends the next stage one part of what all of them have.

        With sequence parallelism each has its part only, and sends that.
        """
        plan = self.plan
        return plan.scatter_gather and plan.pp > 1 and not plan.sequence_parallel and self.model.seq_len % plan.tp == 0

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.model.seq_len

    def why_invalid(self) -> str | None:
        """Return the constraint between model, plan and recipe that this run breaks, in one line; None: it can run."""
        batch, share = self.train.global_batch, self.train.microbatch * self.plan.dp
        if batch % share:
            valid = [] if batch % self.plan.dp else divisors(batch // self.plan.dp)
            hint = f"valid microbatches: {', '.join(map(str, valid))}" if valid else f"plan.dp must divide {batch}"
            return (
                f"train.global_batch {batch} is not divisible by train.microbatch {self.train.microbatch} "
                f"x plan.dp {self.plan.dp}; {hint}"
            )
        reasons = (
            *(self._why_tensor_parallel_is_invalid, self._why_pipeline_is_invalid, self._why_memory_is_invalid),
            *(self._why_race_is_invalid, self._why_checkpoints_are_invalid, self._why_dimensions_are_invalid),
        )
        for why in reasons:
            if reason := why():
                return reason
        if self.model.family == "bert" and (self.evaluation.texts or self.evaluation.lambada):
            return "evaluation.texts and evaluation.lambada need left-to-right prediction; valid for model.family gpt"
        if self.evaluation.overlap >= self.model.seq_len:
            return f"evaluation.overlap {self.evaluation.overlap} must be below model.seq_len {self.model.seq_len}"
        return None

    def _why_race_is_invalid(self) -> str | None:
        if self.data.race is None:
            return None
        if self.model.family != "bert":
            return f"data.race is for models that see both sides, not {self.model.family}; valid: model.family bert"
        if self.plan.pp > 1 or self.plan.chunks > 1:
            return f"data.race with plan.pp {self.plan.pp}, plan.chunks {self.plan.chunks} is not built; valid: 1 and 1"
        if self.train.microbatch % OPTIONS:
            what = f"train.microbatch {self.train.microbatch} is no number of whole questions"
            return f"data.race: {what}, each option is a sequence; valid: multiples of {OPTIONS}"
        return None

    def _why_checkpoints_are_invalid(self) -> str | None:
        for field in ("start", "keep_end"):
            if getattr(self, field) and self.engine != "native":
                return f"{field} {getattr(self, field)}: the {self.engine} engine has no checkpoints; valid: native"
        return None

    def _why_dimensions_are_invalid(self) -> str | None:
        given = {
            "plan.pp above 1": self.plan.pp > 1,
            "plan.sequence_parallel": self.plan.sequence_parallel,
            "compile": self.compile,
            f"engine {self.engine}": self.engine != "native",
            "data.race": self.data.race is not None,
            "evaluation.sequences None": self.evaluation.sequences is None,
        }
        others = ", ".join(name for name, is_given in given.items() if is_given)
        if not self.evaluation.dimensions or not others:
            return None
        return f"evaluation.dimensions looks at whole layers of our own trainer, not with {others}; valid: without"

    def _why_pipeline_is_invalid(self) -> str | None:
        plan = self.plan
        try:
            partition(self.model.num_layers, plan.pp * plan.chunks)
        except InputError as error:
            return str(error)
        return why_invalid(plan.schedule, plan.pp, self.microbatches, plan.chunks)

    def _why_memory_is_invalid(self) -> str | None:
        plan = self.plan
        if not self.fp32_gradients and self.precision not in ("bf16", "fp16"):
            return f"fp32_gradients False is for smaller weights than fp32, precision is {self.precision}; valid: True"
        for field in ("partition_activations", "offload_activations"):
            if getattr(plan, field) and plan.recompute != "full":
                return f"plan.{field} is about the inputs of recomputed layers; valid with plan.recompute full"
        if not plan.partition_activations:
            return None
        if plan.tp == 1 or plan.sequence_parallel:
            why = "plan.sequence_parallel has split them" if plan.sequence_parallel else "plan.tp is 1"
            return f"plan.partition_activations: {why}; valid with plan.tp above 1 and no plan.sequence_parallel"
        if self.model.seq_len % plan.tp:
            return f"plan.partition_activations needs model.seq_len {self.model.seq_len} divisible by plan.tp {plan.tp}"
        return None

    def _why_tensor_parallel_is_invalid(self) -> str | None:
        heads, seq_len, tp = self.model.num_heads, self.model.seq_len, self.plan.tp
        tokens = seq_len if self.plan.sequence_parallel else 0
        if heads % tp == tokens % tp == 0:
            return None
        what = f"model.seq_len {seq_len}, which plan.sequence_parallel splits" if heads % tp == 0 else "model.num_heads"
        what += f" {heads}" if heads % tp else ""
        valid = ", ".join(map(str, divisors(math.gcd(heads, tokens))))
        return f"plan.tp {tp} does not divide {what}; valid degrees: {valid}"


def to_dict(run: Run) -> dict[str, Any]:
    """Return all fields, defaults included, ready for JSON."""
    return dataclasses.asdict(run)


def from_dict(fields: dict[str, Any]) -> Run:
    """Return the run with these fields; the inverse of `to_dict`.

    Raises:
        pydantic.ValidationError: a field is unknown or its value is not valid.
    """
    return _RUN.validate_python(fields)


_RUN = TypeAdapter(Run)


def with_fields(run: Run, changes: Mapping[str, Any]) -> Run:
    """Return the run with other values for some fields, by dotted name: `plan.tp`, `precision`.

    Raises:
        pydantic.ValidationError: a field is unknown or its value is not valid.
    """
    nested = to_dict(run)
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        if group:
            others = nested.get(group)
            nested[group] = {**(others if isinstance(others, dict) else {}), field: value}
        else:
            nested[field] = value
    return from_dict(nested)


def non_defaults(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults, nested ones too."""
    out: dict[str, Any] = {}
    for name, default in _defaults(type(config)):
        value = getattr(config, name)
        if hasattr(value, "__dataclass_fields__"):
            if nested := non_defaults(value):
                out[name] = nested
        elif value != default:
            out[name] = value
    return out


@functools.cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return name and default of every field, cached since it is needed for every run."""
    return tuple((field.name, field.default) for field in dataclasses.fields(kind))
