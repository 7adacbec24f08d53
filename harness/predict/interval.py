"""Seconds between which a step should be, given its prediction, and what makes that prediction doubtful."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.predict.simulation import Done, Simulated, predicted_seconds
from harness.records.statistics import NINE_TENTHS
from impl.run import Run, with_fields
from impl.simulator.seconds import is_aligned
from impl.simulator.system import Calibration, System

UNCALIBRATED = 0.15
"""Standard deviation of log seconds from priors alone."""
OTHER_STACK = 0.10
"""Standard deviation added for other software: PTD-P's constants miss Korthikanti et al. 2022 by 10 to 14 %."""
OCTAVE = 0.05
"""Standard deviation added for every doubling beyond the fitted sizes."""
PRIORS = "is not calibrated: its constants are priors"
"""End of the doubt about a system without a calibration."""
EXTRAPOLATES = "extrapolates:"
"""Start of a doubt about extrapolation; the name of the size or feature follows, then its value."""
BASELINE = {
    **{"precision": "fp32", "recompute": "none", "sequence_parallel": "false", "tp_over_nodes": "false"},
    **{"zero_stage": "0", "zero_group": "false", "schedule": "one_f_one_b", "partition_activations": "false"},
    **{"offload_activations": "false", "offload_optimizer": "false", "block": "gpt", "cp_attention": "none"},
}
"""Features of a run that a calibration may cover, each with its value where it has no effect.

An example is ZeRO's stage without data parallelism.
"""


class Interval(NamedTuple):
    """Interval that holds nine of ten steps."""

    low: float
    high: float
    warnings: list[str]
    """Doubts about the prediction."""


def interval(system: System, asked: Simulated, seconds: float, stack: str | None = None) -> Interval:
    """Return seconds between which nine tenths of such steps should be, and what makes that doubtful.

    From residuals of rows that were not fitted; wider for other software, and beyond the sizes that were fitted on. How
    far off a feature is that no fitted row had is not known: it is a doubt, and leaves the interval as it is.
    """
    known, doubts, other, run = system.calibration, list[str](), 0.0, asked.done
    if known is None:
        doubts.append(f"system {system.name} {PRIORS}")
    if stack is not None and stack != system.stack:
        doubts.append(f"constants are those of {system.stack}, not of {stack}")
        other = OTHER_STACK
    seen = known.features if known is not None else dict[str, list[str]]()
    for name, octaves in octaves_beyond(run, known).items():
        if known is not None and octaves >= 1:
            least, most = known.ranges[name]
            doubts.append(f"{EXTRAPOLATES} {name} {sizes(run)[name]:g}, calibrated on {least:g} to {most:g}")
    for name, value in uncalibrated(run, system).items():
        doubts.append(f"{EXTRAPOLATES} {name} {value}, calibrated on {' and '.join(seen.get(name, [BASELINE[name]]))}")
    if system.habits.stages == "even" and system.habits.stages_of(run) is None:
        count = run.plan.pp * run.plan.chunks
        doubts.append(f"{EXTRAPOLATES} stages {run.model.num_layers} layers on {count}, calibrated on equal ones")
    doubts += unaligned(run, system)
    low, high = factors(known, run, other)
    return Interval(seconds * low, seconds * high, [*doubts, *asked.differences])


def factors(known: Calibration | None, run: Run, other: float = 0.0) -> tuple[float, float]:
    """Return the bounds of nine tenths of such steps over predicted seconds, wider beyond the fitted sizes.

    `other` is a standard deviation of log seconds to add.
    """
    beyond = (OCTAVE * octaves for octaves in octaves_beyond(run, known).values())
    more = NINE_TENTHS * math.hypot(other, *beyond)
    below, above = (math.hypot(side, more) for side in log_bounds(known, run))
    return math.exp(-below), math.exp(above)


def octaves_beyond(run: Run, known: Calibration | None) -> dict[str, float]:
    """Return by how many doublings each size of a run is beyond those that were fitted on; 0 is left out."""
    ranges, own = known.ranges if known is not None else {}, sizes(run)
    each = {
        name: max(math.log2(least / own[name]), math.log2(own[name] / most)) for name, (least, most) in ranges.items()
    }
    return {name: by for name, by in each.items() if by > 0}


def log_bounds(known: Calibration | None, run: Run) -> tuple[float, float]:
    """Return the logarithms of the bounds over predicted seconds."""
    if known is not None and known.residuals is not None:
        wide = known.residuals.width * known.residuals.log_sd(run)
        return -wide, wide
    if known is not None and known.interval is not None:
        return math.log(known.interval[0]), math.log(known.interval[1])
    return -NINE_TENTHS * UNCALIBRATED, NINE_TENTHS * UNCALIBRATED


def unaligned(run: Done, system: System) -> list[str]:
    """Return a doubt about heads that tensor cores cannot take: what they cost, and the nearest that can be taken."""
    model, tp = run.model, run.plan.tp
    fits = lambda heads: is_aligned(system, run.precision, model.hidden_size // heads)
    if fits(model.num_heads):
        return []
    text = f"{model.num_heads} heads of {model.hidden_size // model.num_heads} are computed without tensor cores"
    shared = math.lcm(tp, model.groups) if model.groups != model.num_heads else tp
    others = [n for n in range(shared, model.hidden_size + 1, shared) if model.hidden_size % n == 0 and fits(n)]
    if not others:
        return [text]
    near = min(others, key=lambda heads: abs(math.log(heads / model.num_heads)))
    groups = model.kv_heads if model.groups != model.num_heads else None
    other = Done(with_fields(run, {"model.num_heads": near, "model.kv_heads": groups}))
    more = predicted_seconds(run, system) / predicted_seconds(other, system) - 1
    return [f"{text}: about {more:.0%} slower than {near} of {model.hidden_size // near}"]


def is_beyond(doubt: str) -> bool:
    """Return True if a doubt is about sizes or features, or a whole system, without a calibration."""
    return doubt.startswith(EXTRAPOLATES) or doubt.endswith(PRIORS)


def uncalibrated(run: Done, system: System) -> dict[str, str]:
    """Return the run's features that no step had to which a calibrated system's constants were fitted."""
    seen = system.calibration.features if system.calibration is not None else {}
    usual = lambda name, value: BASELINE[name] if seen else value  # a feature that is newer than the calibration
    own = features(run, system).items()
    return {name: value for name, value in own if value not in seen.get(name, [usual(name, value)])}


def sizes(run: Run) -> dict[str, float]:
    """Return the sizes of a run that a calibration has ranges of."""
    model, plan = run.model, run.plan
    of_model = {"hidden_size": model.hidden_size, "layers": model.num_layers}
    tokens = {"tokens": run.train.microbatch * model.seq_len // plan.cp, "seq_len": model.seq_len}
    return {"gpus": plan.world_size, **of_model, **tokens, "tp": plan.tp, "pp": plan.pp, "dp": plan.dp}


def features(run: Done, system: System) -> dict[str, str]:
    """Return the run's features that have an effect.

    fp16 and bf16 are one precision: they are predicted to take the same time.
    """
    plan = run.plan
    found = {name: str(getattr(plan, name)).lower() for name in BASELINE if hasattr(plan, name)}
    found["precision"] = "16-bit" if run.precision in ("fp16", "bf16") else run.precision
    found["zero_group"] = str(plan.replicas > 1).lower()
    found["tp_over_nodes"] = str(plan.tp > system.node.size.value).lower()
    of_axes = {
        **dict.fromkeys(("sequence_parallel", "tp_over_nodes", "partition_activations"), plan.tp),
        **{"zero_stage": plan.dp_cp, "schedule": plan.pp, "cp_attention": plan.cp},
    }
    model = run.model
    parts = {
        **{model.norm: model.norm != "layernorm", "rotary": model.positions == "rotary"},
        **{model.mlp: model.mlp != "gelu", "grouped queries": model.groups != model.num_heads},
        **{"shared heads": model.sharing(plan.x) > 1, "parallel residual": model.parallel_residual},
        **{"untied": not model.tied, "shared layers": model.shared_layers},
        **{"experts": model.experts > 0, "divided features": plan.y > 1},
    }
    if block := " ".join(name for name, is_other in parts.items() if is_other):
        found["block"] = block
    return {name: value for name, value in found.items() if of_axes.get(name) != 1}


def reach(runs: Sequence[Done], system: System) -> tuple[dict[str, tuple[float, float]], dict[str, list[str]]]:
    """Return what fitted runs cover: the ranges of their sizes, and the values of their features."""
    every = [sizes(run) for run in runs]
    own = [BASELINE | features(run, system) for run in runs]
    ranges = {name: (min(one[name] for one in every), max(one[name] for one in every)) for name in every[0]}
    return ranges, {name: sorted({one[name] for one in own}) for name in BASELINE}
