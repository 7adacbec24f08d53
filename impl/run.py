"""One training run: model, plan, recipe, data, evaluation and seed."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import NonNegativeInt, TypeAdapter
from pydantic.dataclasses import dataclass

from impl.data.config import OPTIONS, DataConfig
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.fields import CHECKED, Count, Threads, divisors
from impl.model.config import ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.model.parametrization import norm_before_head
from impl.pipeline.schedules import require
from impl.pipeline.stage import partition
from impl.plan import Plan
from impl.recipe import Recipe

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
EngineName = Literal["native", "deepspeed", "torch"]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Run:
    """Model, data, plan, recipe. Equal runs give equal losses; `repeat` distinguishes measurements of one run."""

    model: ModelConfig = ModelConfig()
    plan: Plan = Plan()
    train: Recipe = Recipe()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    precision: Precision = "fp32"
    """bf16, fp16: weights and activations of that type, fp32 master weights and moments; fp16 scales the loss.
    fp8: as bf16, with the matrix products of layers in 8 bits; it is simulated only."""
    fp32_gradients: bool = True
    """Accumulate and reduce the gradients of bf16 and fp16 weights in fp32; False: in the weights' type."""
    engine: EngineName = "native"
    """Implementation that trains: ours, DeepSpeed's, or PyTorch's own parts."""
    compile: bool = False
    """Whether each transformer block is compiled by torch.compile."""
    threads: Threads = 1
    """CPU threads of one rank."""
    seed: NonNegativeInt = 0
    repeat: Count = 0
    start: str | None = None
    """Initial weights: the newest checkpoint in a folder, or of a run with `keep_end` of the same experiment and tier,
    given by its id; None: random ones."""
    keep_end: bool = False
    """Keep a checkpoint of the last step, which other runs can start from."""

    @cached_property
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
        plan, divides = self.plan, self.model.seq_len // self.plan.cp % self.plan.x == 0
        return plan.scatter_gather and plan.pp > 1 and not plan.sequence_parallel and divides

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.model.seq_len

    def problems(self) -> list[str]:
        """Return all that is wrong with this run, one line each; without any it can be trained where there is room.

        The order is that in which one thing is needed to judge the next. The run's data and files are not read.
        """
        if unusable := self._of_placement():
            return unusable
        of_training = [*self._of_batch(), *self._of_splitting(), *self._of_context(), *self._of_parametrization()]
        found = [*of_training, *self._of_experts(), *self._of_memory(), *self._of_race(), *self._of_evaluation()]
        if self.plan.tp3:
            from impl.cost.grid import problems  # for few runs

            found = [*problems(self), *found]
        if self.engine != "native":
            from impl.peers.validity import missing  # only runs of other engines need to know them

            found += missing(self)
        return found

    def untrainable(self) -> list[str]:
        """Return `problems`, and what no engine here trains though it is simulated."""
        is_fp8 = self.precision == "fp8"
        return self.problems() + ["precision fp8 is simulated only; valid: fp64, fp32, bf16, fp16"] * is_fp8

    def _of_placement(self) -> list[str]:
        """Return what is wrong with a norm placement of a user's own; others are judged as the model is made."""
        try:
            return [] if self.model.norm_placement in PLACEMENTS else list(self.model.problems_of_norms())
        except InputError as error:
            return [str(error)]

    def _of_batch(self) -> Iterator[str]:
        if self.model.family == "bert" and self.model.seq_len < 5:  # a token of each text, and three that mark them
            yield f"model.seq_len {self.model.seq_len} is too short for BERT's pairs; valid: 5 and more"
        batch, share = self.train.global_batch, self.train.microbatch * self.plan.dp
        if batch % share:
            valid = [] if batch % self.plan.dp else divisors(batch // self.plan.dp)
            hint = f"valid microbatches: {', '.join(map(str, valid))}" if valid else f"plan.dp must divide {batch}"
            yield (
                f"train.global_batch {batch} is not divisible by train.microbatch {self.train.microbatch} "
                f"x plan.dp {self.plan.dp}; {hint}"
            )

    def _of_splitting(self) -> Iterator[str]:
        plan, model = self.plan, self.model
        split = {f"model.num_heads {model.num_heads}": model.num_heads}
        split[f"model.mlp_size {model.mlp_inner}"] = model.mlp_inner
        if plan.sequence_parallel:
            own, of = model.seq_len // plan.cp, f" of plan.cp {plan.cp}" if plan.cp > 1 else ""
            split[f"model.seq_len {own}{of}, which plan.sequence_parallel splits"] = own
        valid = [tp for tp in divisors(math.gcd(*split.values())) if model.divides_groups(tp)]
        if plan.x not in valid:
            heads = f"model.kv_heads {model.groups} into whole heads, or equal parts of one"
            undivided = next((name for name, size in split.items() if size % plan.x), heads)
            degree = f"plan.tp {plan.x}" if plan.y == 1 else f"plan.tp3's x, {plan.x},"
            yield f"{degree} does not divide {undivided}; valid degrees: {', '.join(map(str, valid))}"
        stages = lambda: partition(self.model.num_layers, plan.pp * plan.chunks)
        schedule = lambda: require(plan.schedule, plan.pp, self.microbatches, plan.chunks)
        for needed in (stages, schedule):
            try:
                needed()
            except InputError as error:
                yield str(error)
        if model.shared_layers and (plan.pp > 1 or plan.chunks > 1):
            yield f"model.shared_layers with plan.pp {plan.pp}, plan.chunks {plan.chunks} is not built; valid: 1 and 1"

    def _of_context(self) -> Iterator[str]:
        plan, model, is_ring = self.plan, self.model, self.plan.cp_attention == "ring"
        if plan.cp == 1:
            if not is_ring:
                yield f"plan.cp_attention {plan.cp_attention} is for several ranks; valid with plan.cp above 1"
            return
        sizes, what = [1 if model.seq_len % 2 else model.seq_len // 2], f"half of model.seq_len {model.seq_len}"
        if not is_ring:
            sizes = [model.seq_len, heads := model.num_heads // plan.x, groups := model.groups_of(plan.x)]
            what = f"model.seq_len {model.seq_len}, and a rank's {heads} heads and {groups} of keys and values"
        if (most := math.gcd(*sizes)) % plan.cp:
            valid = ", ".join(map(str, divisors(most)))
            yield f"plan.cp {plan.cp}, plan.cp_attention {plan.cp_attention} has to divide {what}; valid: {valid}"
        if self.compile:
            yield f"compile with plan.cp {plan.cp} is not built; valid: compile False"
        if is_ring and model.scores_dropout:
            what = "plan.cp_attention ring has no probabilities at once, and model.attention_dropout is of them"
            yield f"{what}; valid: model.attention_dropout 0, or plan.cp_attention ulysses"

    def _of_parametrization(self) -> Iterator[str]:
        recipe = self.train
        if recipe.parametrization == "standard":
            for field in ("base_hidden_size", "base_layers"):
                if value := getattr(recipe, field):
                    yield f"train.{field} {value} is another parametrization's base; valid: train.parametrization mup"
        elif recipe.base_hidden_size is None:
            yield "train.parametrization mup needs the hidden size whose rate it has; valid: train.base_hidden_size N"
        if recipe.base_layers and self.model.shared_layers:
            yield f"train.base_layers {recipe.base_layers} is not built for model.shared_layers; valid: None"
        if recipe.parametrization == "mup" and self.model.tied and not norm_before_head(self.model):
            what = f"a norm before a tied head alone, norm placement {self.model.norm_placement} has none"
            yield f"train.parametrization mup needs {what}; valid: model.tied False"

    def _of_experts(self) -> Iterator[str]:
        plan, model = self.plan, self.model
        if plan.ep > 1 and not model.experts:
            yield f"plan.ep {plan.ep} shares experts, of which the model has none; valid: 1, or model.experts N"
            return
        if not model.experts:
            return
        among = math.gcd(model.experts, plan.zero if plan.dp_cp % plan.zero == 0 else plan.dp_cp)
        if among % plan.ep:
            ranks = f"the {plan.zero} ranks of plan.dp and plan.cp" + " in a plan.zero_group" * bool(plan.zero_group)
            valid = ", ".join(map(str, divisors(among)))
            yield f"plan.ep {plan.ep} does not divide model.experts {model.experts} and {ranks}; valid: {valid}"
        sizes = {"model.expert_size": model.expert_inner, "model.shared_expert_size": model.shared_expert_size}
        for name, size in sizes.items():
            if size % plan.tp:
                yield f"plan.tp {plan.tp} does not divide {name} {size}; valid: {', '.join(map(str, divisors(size)))}"
        if model.expert_capacity is not None and plan.cp > 1:
            yield f"model.expert_capacity of whole sequences with plan.cp {plan.cp} is not built; valid: plan.cp 1"
        if model.balance_bias and self.precision == "fp16":
            yield "model.balance_bias with precision fp16 is not built; valid: fp64, fp32, bf16"

    def _of_memory(self) -> Iterator[str]:
        plan, seq_len = self.plan, self.model.seq_len // self.plan.cp
        if plan.dp_cp % plan.zero:
            valid = ", ".join(map(str, divisors(plan.dp_cp)))
            of = f"plan.dp {plan.dp}" + (f" x plan.cp {plan.cp}" if plan.cp > 1 else "")
            yield f"plan.zero_group {plan.zero} does not divide {of}; valid: {valid}"
        if plan.zero_group and not plan.zero_stage:
            yield f"plan.zero_group {plan.zero} divides nothing at plan.zero_stage 0; valid with stages 1, 2 and 3"
        if not self.fp32_gradients and self.precision not in ("bf16", "fp16", "fp8"):
            yield f"fp32_gradients False is for smaller weights than fp32, precision is {self.precision}; valid: True"
        for field in ("partition_activations", "offload_activations"):
            if getattr(plan, field) and plan.recompute != "full":
                yield f"plan.{field} is about the inputs of recomputed layers; valid with plan.recompute full"
        if plan.partition_activations and (plan.x == 1 or plan.sequence_parallel):
            why = "plan.sequence_parallel has split them" if plan.sequence_parallel else "plan.tp is 1"
            yield f"plan.partition_activations: {why}; valid with plan.tp above 1 and no plan.sequence_parallel"
        if plan.partition_activations and seq_len % plan.x:
            yield f"plan.partition_activations needs model.seq_len {seq_len} divisible by plan.tp {plan.x}"

    def _of_race(self) -> Iterator[str]:
        if self.data.race is None:
            return
        plan, microbatch = self.plan, self.train.microbatch
        if self.model.family != "bert":
            yield f"data.race is for models that see both sides, not {self.model.family}; valid: model.family bert"
        if plan.pp > 1 or plan.chunks > 1:
            yield f"data.race with plan.pp {plan.pp}, plan.chunks {plan.chunks} is not built; valid: 1 and 1"
        if microbatch % OPTIONS:
            what = f"train.microbatch {microbatch} is no number of whole questions, each option is a sequence"
            yield f"data.race: {what}; valid: multiples of {OPTIONS}"

    def _of_evaluation(self) -> Iterator[str]:
        evaluation, plan = self.evaluation, self.plan
        given = {
            "plan.pp above 1": plan.pp > 1,
            "plan.cp above 1": plan.cp > 1,
            "plan.sequence_parallel": plan.sequence_parallel,
            "compile": self.compile,
            f"engine {self.engine}": self.engine != "native",
            "data.race": self.data.race is not None,
            "evaluation.sequences None": evaluation.sequences is None,
        }
        others = ", ".join(name for name, is_given in given.items() if is_given)
        if evaluation.dimensions and others:
            yield f"evaluation.dimensions looks at whole layers of our own trainer, not with {others}; valid: without"
        if self.model.family == "bert" and (evaluation.texts or evaluation.lambada):
            yield "evaluation.texts and evaluation.lambada need left-to-right prediction; valid for model.family gpt"
        if evaluation.overlap >= self.model.seq_len:
            yield f"evaluation.overlap {evaluation.overlap} must be below model.seq_len {self.model.seq_len}"


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
    found: dict[str, Any] = {}
    for name, field in config.__dataclass_fields__.items():  # `dataclasses.fields` triples the time of a run's id
        if (value := getattr(config, name)) is field.default:
            continue
        if hasattr(value, "__dataclass_fields__"):
            if nested := non_defaults(value):
                found[name] = nested
        elif value != field.default:
            found[name] = value
    return found
