"""What does each norm placement cost where ranks share layers: time, memory, and what they send?

A norm multiplies no matrices, but reads and writes whole activations; tensor-parallel ranks all compute it in full,
with sequence parallelism each for its part of the tokens. A norm of what ranks have divided, as sub-LN's inside
attention and MLP, has to sum over ranks too. Each placement of `ours/norm_atlas` takes turns with the others here.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments import ours
from experiments.ours.norm_atlas import kinds
from harness.experiment.kit import (
    DEVICE, MARK, RANKS, RUNS, STEP, TP_SENT, Estimate, Experiment, ModelConfig, Point, Recipe, Record, Run, Tolerance,
    cost, each, less, mebibytes, named, of_run, points, relative_to, share, step_seconds, table_of, untested,
)  # fmt: skip

TENTH = Tolerance(1.1, "norms are free if what they take is lost among other choices; set before any run", "2026-11-27")


def name(run: Run) -> str:
    """Return the placement, and the norm if it is another than LayerNorm."""
    return f"{run.model.norm_placement}{', dynamic tanh' if run.model.norm == 'dyt' else ''}"


def beside_pre(records: Sequence[Record]) -> list[Point]:
    """Return all points, each relative to the step of pre with LayerNorm in its plan."""
    place = lambda one: (one.device, one.model, one.run.plan)
    return relative_to(points(records, step_seconds), lambda one: name(one.run) == "pre", step_seconds, place)


def others(records: Sequence[Record]) -> list[tuple[Estimate, str]]:
    return [(one.relative, name(one.run)) for one in beside_pre(records) if name(one.run) != "pre"]


def sent(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return what ranks send within layers, over what they send with pre in the same plan."""
    counted = lambda one: one.mean(lambda record: record.tp_bytes_sent)
    found = [one for one in points(records, step_seconds) if not one.is_simulated]
    first = {one.run.plan: counted(one) for one in found if name(one.run) == "pre"}
    return [(counted(one) / first[one.run.plan], name(one.run)) for one in found if name(one.run) != "pre"]


def in_parts(records: Sequence[Record]) -> list[tuple[Estimate, Estimate, str]]:
    """Return each placement's time of pre's, where ranks compute parts of its norms, and all of them."""
    found = {(one.device, name(one.run), one.run.plan.sequence_parallel): one.relative for one in beside_pre(records)}
    return [
        (found[device, which, True], all_of, which) for (device, which, is_split), all_of in found.items()
        if not is_split and which != "pre" and (device, which, True) in found
    ]  # fmt: skip


def every(models: Sequence[ModelConfig], tp: int, recipe: Recipe, repeats: int, **fields: str) -> list[Run]:
    variants = lambda run: [replace(run, model=model) for model in kinds(run.model)]
    bases = [untested(model, plan, recipe) for model in models for plan in ours.layers_shared(tp)]
    return ours.in_turn(variants, [replace(base, **fields) for base in bases], repeats)


CPU = Recipe(steps=12, global_batch=8, microbatch=8, lr=1e-4, warmup_steps=2)
SHOWN = (
    of_run("placement", "placement", name, text=True), DEVICE, RANKS,
    of_run("split", "sequence parallel", lambda run: "yes" if run.plan.sequence_parallel else "no", text=True),
    STEP, share("relative", "of pre's", lambda one: one.relative),
    mebibytes("activations", "activations", lambda one: one.mean(lambda record: record.bytes_of("activations")), 4),
    TP_SENT, RUNS, MARK,
)  # fmt: skip
EXPERIMENT = Experiment(
    source="our own; the placements are those of ours/norm_atlas",
    expectation="more norms take a few percent more; only a norm of divided features is sent anything for",
    claims=(
        ours.within(
            "no placement's step takes over a tenth longer than pre's", TENTH,
            lambda limit: each(others, lambda one, _: less(one, limit), "placements", "{:.3f} ({})", is_brief=True),
        ),
        ours.claim(
            "no placement lets ranks send more than pre",
            each(sent, lambda ratio, _: ratio <= 1, "placements", "{:.3f} ({})", is_brief=True),
        ),
        ours.claim(
            "with sequence parallelism each placement costs less, relative to pre",
            each(
                in_parts, lambda split, whole, _: less(split, whole), "placements", "{:.3f} of {:.3f} ({})",
                is_brief=True,
            ),
        ),
    ),
    table=table_of("placement_costs", "What placements cost where ranks share layers", SHOWN, beside_pre, [
        "Activations: kept by the fullest rank for one microbatch, counted. Of pre's: of the step with pre in the same "
        "plan; the mean over repeats in turn, with its 95% t-interval."
    ]),
    cost=cost("20 min", "40 min, 8 GPUs with 80 GB", smoke="2 min"),
    deviations="Models of four or six layers, as a layer decides the step.",
    runs={
        "smoke": every([named("gpt-0.5m")], 2, replace(CPU, steps=8, global_batch=4, microbatch=4), 1),
        "small": every([ours.MODEL_7M], 2, CPU, 3),
        "paper": every(
            [replace(named("gpt-8b"), num_layers=4, dropout=0.0)], 8, replace(CPU, steps=30, microbatch=4), 3,
            precision="bf16",
        ),
    },
)  # fmt: skip
