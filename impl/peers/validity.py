"""Which engines there are, whose part of one trains a run, and what each part lacks. Pure: no engine is imported."""

from typing import Literal, NamedTuple

from impl.plan import AXES
from impl.run import Run

EnginePart = Literal["native", "plain", "ddp", "fsdp", "dtensor", "pipelining", "deepspeed", "deepspeed_pipeline"]


class _Has(NamedTuple):
    """What a part can do besides GPT in fp32 on some axes of the mesh, its layers recomputed and compiled or not."""

    axes: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = (0,)
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp64")
    schedules: tuple[str, ...] = ()


PARTS: dict[EnginePart, _Has] = {
    "plain": _Has(),
    "ddp": _Has(("dp",)),
    "fsdp": _Has(("dp",), zero_stages=(1, 2, 3)),
    "dtensor": _Has(("tp",)),
    "pipelining": _Has(("pp",), schedules=("gpipe", "one_f_one_b", "interleaved", "zb_h1")),
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
    if plan.zero_stage > 0:
        return "fsdp"
    return "ddp" if plan.dp > 1 else "plain"


def why_invalid(run: Run) -> str | None:
    """Return what the run's engine cannot do of the run, in one line; None if it can train it."""
    part = part_of(run)
    if part == "native":
        return None
    lacks = [*_lacks(run, PARTS[part]), *_special(run, part)]
    whose = "" if part == run.engine else f"'s {part.removeprefix(f'{run.engine}_')}"
    return f"the {run.engine} engine{whose} has no {', '.join(lacks)}" if lacks else None


def _lacks(run: Run, has: _Has) -> list[str]:
    model, plan = run.model, run.plan
    # torch's parts pass over ZeRO where it splits nothing; DeepSpeed's pipeline does not
    splits = plan.dp > 1 or run.engine == "deepspeed"
    missing = {
        f"model.family {model.family!r}": model.family != "gpt",
        f"model.norm_placement {model.norm_placement!r}": model.norm_placement != "pre",
        f"model.dropout {model.dropout}": model.dropout > 0,
        f"precision {run.precision!r}": run.precision not in has.precisions,
        f"plan.zero_stage {plan.zero_stage} (it has {', '.join(map(str, has.zero_stages))})": splits
        and plan.zero_stage not in has.zero_stages,
        f"plan.recompute {plan.recompute!r}": plan.recompute == "selective",
        "plan.partition_activations": plan.partition_activations,
        "plan.offload_activations": plan.offload_activations,
        "plan.offload_optimizer": plan.offload_optimizer,
        "plan.overlap_grad_reduce False": plan.dp > 1 and not plan.overlap_grad_reduce,
        "plan.overlap_param_gather False": plan.dp > 1 and plan.zero_stage > 0 and not plan.overlap_param_gather,
        f"plan.schedule {plan.schedule!r} (it has {', '.join(has.schedules)})": plan.pp > 1
        and plan.schedule not in has.schedules
        and "pp" in has.axes,
    }
    missing |= {f"plan.{axis} {getattr(plan, axis)}": axis not in has.axes and getattr(plan, axis) > 1 for axis in AXES}
    return [name for name, is_missing in missing.items() if is_missing]


def _special(run: Run, part: EnginePart) -> list[str]:
    """Return the run's combinations of settings that a part does not support."""
    plan, lacks = run.plan, []
    if run.engine == "deepspeed" and run.precision == "bf16" and plan.zero_stage == 0 and plan.dp > 1:
        lacks.append("bf16 with plan.zero_stage 0: it accumulates no gradients in fp32 there, and updates otherwise")
    if part == "pipelining" and plan.schedule == "one_f_one_b" and run.microbatches < plan.pp:
        lacks.append(f"one_f_one_b with fewer microbatches, {run.microbatches}, than plan.pp {plan.pp}")
    if run.compile:
        lacks += [f"compile with {what}" for what in _not_compiled(run, part)]
    if part == "pipelining" and plan.schedule == "zb_h1" and run.precision == "bf16" and run.fp32_gradients:
        lacks.append("zb_h1 in bf16: it adds weight gradients up in the weights' precision")
    return lacks


def _not_compiled(run: Run, part: EnginePart) -> list[str]:
    plan = run.plan
    whys = {
        "plan.recompute 'full': torch.compile cannot keep a mesh for the backward pass": part == "dtensor"
        and plan.recompute == "full",
        "zb_h1: it splits the backward pass of operations, of which a compiled layer is one": part == "pipelining"
        and plan.schedule == "zb_h1",
        "plan.zero_stage 3: its hooks are between a layer's operations": part == "deepspeed" and plan.zero_stage == 3,
    }
    return [why for why, applies in whys.items() if applies]
