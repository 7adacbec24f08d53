"""The verb `timeline`: a pipeline schedule, or a run that followed one, drawn."""

from fractions import Fraction
from pathlib import Path

from harness.figures import timeline
from harness.records.store import read_record
from harness.terminal import Flag, print_json
from impl.errors import InputError, in_one_line
from impl.pipeline.bound import Problem, lower_bound
from impl.pipeline.schedule import Schedule
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Number, Timeline, simulate, uniform
from impl.pipeline.written import written
from impl.plan import Plan

MOST = 1e9
"""Largest time that can be drawn; its inverse is the smallest."""
MOST_PASSES = 2**16
"""Most passes of microbatches that can be drawn."""


def draw_timeline(
    *,
    plan: Plan = Plan(pp=4),  # noqa: B008 - frozen
    microbatches: int = 8,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    transfer: float = 0.0,
    search: float = 0.0,
    record: Path | None = None,
    out: Path | None = None,
    json: Flag = False,
) -> int:
    """Draw a pipeline schedule: which rank computes what when, the bubble, what is held, and how near it is to a bound.

    Args:
        plan: The plan; pp, schedule and chunks matter.
        microbatches: Microbatches of a step.
        forward: Time of a forward pass of all of a rank's layers.
        input_gradient: Time of the gradients of inputs.
        weight_gradient: Time of the gradients of weights.
        transfer: Time from one rank to the next.
        search: Seconds to search for a shorter table in as much memory, on the same ranks, which is drawn instead.
        record: A record of a run with a pipeline: draws its last step under the prediction from its own times.
        out: Write the figure as OUT.png and OUT.svg, or at the width of a paper's column if OUT ends in .pdf.
        json: Print the rows of actions, spans, bubble and activations in flight.
    """
    if out is not None and not out.name:
        raise InputError(f"--out {out} names no file; valid: a path to which .png and .svg are added")
    if record is not None:
        drawn, unit, schedule, bound = _recorded_timelines(record), "s", None, 0
    else:
        times = {"forward": forward, "input-gradient": input_gradient, "weight-gradient": weight_gradient}
        for name, seconds in times.items():
            if not 1 / MOST <= seconds <= MOST:
                raise InputError(f"--{name} {seconds}: must be more than 0; valid: {1 / MOST:g} to {MOST:g}")
        if not 0 <= transfer <= MOST:
            raise InputError(f"--transfer {transfer}: must not be negative; valid: 0 to {MOST:g}")
        if (passes := plan.pp * plan.chunks * microbatches) > MOST_PASSES:
            what = f"--plan.pp {plan.pp} x --plan.chunks {plan.chunks} x --microbatches {microbatches}"
            raise InputError(f"{what}: {passes} passes cannot be drawn; valid: up to {MOST_PASSES}")
        schedule = build(plan.schedule, plan.pp, microbatches, plan.chunks)
        cost = uniform(*(Fraction(str(time)) for time in times.values()), chunks=plan.chunks)
        schedule, bound = _shortest(schedule, Problem.of(schedule, cost, Fraction(str(transfer))), search)
        drawn, unit = {schedule.name: simulate(schedule, cost, Fraction(str(transfer)))}, "forward passes"
    files = [str(path) for path in timeline.write(drawn, out, unit)] if out else []
    if json:
        shown = {name: timeline.document(one) for name, one in drawn.items()}
        if schedule:
            rows = {"schedule": schedule.name, "rows": timeline.actions(schedule), "bound": float(bound)}
            shown = rows | shown[schedule.name]
        return print_json({**shown, "files": files})
    for name, one in drawn.items():
        print(timeline.text(name, one, unit))
        if schedule:
            longer = float(one.step_time / bound) - 1
            print(f"no table in this memory is shorter than {float(bound):.4g} {unit}: this one is {longer:.1%} longer")
            print(f"as a plan's: --plan.schedule {table}\n" if search and (table := written(schedule)) else "", end="")
    print("".join(f"{file}\n" for file in files), end="")
    return 0


def _shortest(schedule: Schedule, problem: Problem, seconds: float) -> tuple[Schedule, Number]:
    """Return the schedule, or the shortest table that is found in the seconds, and a bound on every table's step."""
    if not 0 <= seconds <= MOST:
        raise InputError(f"--search {seconds}: must not be negative; valid: 0 to {MOST:g}")
    if not seconds:
        return schedule, lower_bound(problem)
    from impl.pipeline import optimum  # SciPy's solver takes long to import

    found = optimum.search(problem, seconds)
    return found.schedule, found.bound


def _recorded_timelines(path: Path) -> dict[str, Timeline]:
    try:
        record = read_record(path)
        if record.timeline:
            return {"predicted": record.simulated_timeline(), "measured": record.timeline}
        why = "is no record of a run with a pipeline that ended well"
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no file, or of another kind
        why = in_one_line(error)
    raise InputError(f"{path}: {why}; valid: a file of a folder `records`, of a run with --plan.pp 2 or more")
