"""Which engines there are, whose part of one trains a run, and what each part lacks. Pure: no engine is imported."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from impl.plan import AXES
from impl.run import Run

EnginePart = Literal[
    "native", "plain", "ddp", "fsdp", "dtensor", "context", "pipelining", "deepspeed", "deepspeed_pipeline"
]


class _Has(NamedTuple):
    """Abilities of an engine's part besides GPT in fp32 on some axes, with layers recomputed and compiled or not.

    Norms may stand wherever they are over all features of a token, and be LayerNorm or RMSNorm.
    """

    axes: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = (0,)
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp64")
    schedules: tuple[str, ...] = ()


SPLIT = ("zb_h1", "zbv", "dualpipe_v")
"""Schedules of torch that split backward passes."""
PARTS: dict[EnginePart, _Has] = {
    "plain": _Has(),
    "ddp": _Has(("dp",)),
    "fsdp": _Has(("dp",), zero_stages=(1, 2, 3)),
    "dtensor": _Has(("tp",)),
    "context": _Has(("cp",)),
    "pipelining": _Has(("pp",), schedules=("gpipe", "one_f_one_b", "interleaved", *SPLIT)),
    "deepspeed": _Has(("dp",), zero_stages=(0, 1, 2, 3), precisions=("fp32", "bf16")),
    "deepspeed_pipeline": _Has(
        ("pp", "dp"), zero_stages=(0, 1), precisions=("fp32", "bf16"), schedules=("one_f_one_b",)
    ),
}


def part_of(run: Run) -> EnginePart:
    """Return the part of the engine that trains the run."""
    plan = run.plan
    if run.engine == "native":
        return "native"
    if run.engine == "deepspeed":
        return "deepspeed_pipeline" if plan.pp > 1 else "deepspeed"
    if plan.pp > 1:
        return "pipelining"
    if plan.tp > 1:
        return "dtensor"
    if plan.cp > 1:
        return "context"
    if plan.zero_stage > 0:
        return "fsdp"
    return "ddp" if plan.dp > 1 else "plain"


def missing(run: Run) -> Iterator[str]:
    """Yield what the run's engine, another than ours, cannot do of it, in lines of `Run.problems`."""
    for field in ("start", "keep_end"):
        if value := getattr(run, field):
            yield f"{field} {value}: the {run.engine} engine has no checkpoints; valid: native"
    part = part_of(run)
    if lacks := ", ".join(what for is_missing, what in _checks(run, part, PARTS[part]) if is_missing):
        whose = "" if part == run.engine else f"'s {part.removeprefix(f'{run.engine}_')}"
        yield f"the {run.engine} engine{whose} has no {lacks}"


def _checks(run: Run, part: EnginePart, has: _Has) -> Iterator[tuple[bool, str]]:
    """Yield settings and combinations of settings of the run, each with whether the part lacks it."""
    model, plan, is_bf16 = run.model, run.plan, run.precision == "bf16"
    yield model.family != "gpt", f"model.family {model.family!r}"
    norms = model.norms
    of_parts = norms.attention.inner or norms.mlp.inner or norms.attention.heads
    yield bool(of_parts), f"model.norm_placement {model.norm_placement!r}: norms of heads and within blocks"
    yield model.norm == "dyt", f"model.norm {model.norm!r}"
    yield model.shared_layers, "model.shared_layers"
    yield model.sharing(plan.tp) > 1, f"plan.tp {plan.tp} above model.kv_heads {model.groups}"
    yield model.experts > 0, f"model.experts {model.experts}"
    yield model.dropout > 0, f"model.dropout {model.dropout}"
    yield model.scores_dropout > model.dropout, f"model.attention_dropout {model.attention_dropout}"
    yield run.train.parametrization != "standard", f"train.parametrization {run.train.parametrization!r}"
    precisions = f"precision {run.precision!r} (it has {', '.join(has.precisions)})"
    yield run.precision not in has.precisions, precisions
    # torch's parts pass over ZeRO where it splits nothing; DeepSpeed's pipeline does not
    divides = plan.dp_cp > 1 or run.engine == "deepspeed"
    stages = f"plan.zero_stage {plan.zero_stage} (it has {', '.join(map(str, has.zero_stages))})"
    yield divides and plan.zero_stage not in has.zero_stages, stages
    yield plan.exchanges_heads, f"plan.cp_attention {plan.cp_attention!r}"
    yield plan.zero_group is not None and part != "fsdp", f"plan.zero_group {plan.zero_group}"
    yield plan.recompute == "selective", f"plan.recompute {plan.recompute!r}"
    for field in ("partition_activations", "offload_activations", "offload_optimizer"):
        yield getattr(plan, field), f"plan.{field}"
    yield plan.dp_cp > 1 and not plan.overlap_grad_reduce, "plan.overlap_grad_reduce False"
    is_gathered = plan.dp_cp > 1 and plan.zero_stage > 0
    yield is_gathered and not plan.overlap_param_gather, "plan.overlap_param_gather False"
    schedules = f"plan.schedule {plan.schedule!r} (it has {', '.join(has.schedules)})"
    yield plan.pp > 1 and "pp" in has.axes and plan.schedule not in has.schedules, schedules
    for axis in AXES:
        yield axis not in has.axes and getattr(plan, axis) > 1, f"plan.{axis} {getattr(plan, axis)}"
    is_reduced_in_bf16 = run.engine == "deepspeed" and is_bf16 and plan.dp > 1 and plan.zero_stage == 0
    why = "it accumulates no gradients in fp32 there, and updates otherwise"
    yield is_reduced_in_bf16, f"bf16 with plan.zero_stage 0: {why}"
    schedule = plan.schedule if part == "pipelining" else ""
    too_few = schedule == "one_f_one_b" and run.microbatches < plan.pp
    yield too_few, f"one_f_one_b with fewer microbatches, {run.microbatches}, than plan.pp {plan.pp}"
    rounds = max(1, run.microbatches // plan.pp)
    uneven = schedule == "zb_h1" and run.microbatches % rounds > 0
    yield uneven, f"zb_h1 with {run.microbatches} microbatches: it takes them in {rounds} rounds of equally many"
    if run.compile:
        why = "torch.compile cannot keep a mesh for the backward pass"
        yield part == "dtensor" and plan.recompute == "full", f"compile with plan.recompute 'full': {why}"
        why = "it splits the backward pass of operations, of which a compiled layer is one"
        yield schedule in SPLIT, f"compile with {schedule}: {why}"
        why = "its hooks are between a layer's operations"
        yield part == "deepspeed" and plan.zero_stage == 3, f"compile with plan.zero_stage 3: {why}"
    why = "it adds weight gradients up in the weights' precision"
    yield schedule in SPLIT and is_bf16 and run.fp32_gradients, f"{schedule} in bf16: {why}"
