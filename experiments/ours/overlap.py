"""What does each overlap of communication with computation buy?

Three are built in. Gradients are reduced while the backward pass goes on; with ZeRO, parameters are gathered ahead of
their use; and input gradients of layers that ranks share are reduced while weight gradients are computed. Each is
switched off alone, next to the run that has all of them, and the two take turns: their ratio is what it buys.
"""

from dataclasses import replace

from experiments import ours
from harness.experiment.contests import OVERLAPS, SETUP, by_overlap, no_slower_with, same_without
from harness.experiment.kit import (
    MARK, RUNS, Column, Experiment, Plan, Recipe, Run, cost, milliseconds, named, ratio, step_seconds, table_of,
    untested,
)  # fmt: skip


def one_by_one(run: Run) -> list[Run]:
    """Return a run with all of its overlaps, then without each of those that have an effect on its plan."""
    plan = run.plan
    has_effect = dict(zip(OVERLAPS, (plan.dp > 1, plan.zero_stage > 0, plan.tp > 1), strict=True))
    return [run, *(replace(run, plan=replace(plan, **{name: False})) for name in OVERLAPS if has_effect[name])]


OVERLAPPED = Column(key="overlapped", header="overlapped", text=True, of=lambda cell: OVERLAPS[cell.other])
WITH = milliseconds("with", "step", lambda cell: cell.of("").estimate(step_seconds))
WITHOUT = milliseconds("without", "step without it", lambda cell: cell.of(cell.other).estimate(step_seconds))
SHOWN = (*SETUP, OVERLAPPED, WITH, WITHOUT, ratio("ratio", "with / without", lambda cell: cell.relative), RUNS, MARK)


NOTE = (
    "Step: the median of a run's steps, mean over repeats; with all overlaps of the plan, and without the one of "
    "the row. With / without: mean over the pairs of repeats, with its 95% t-interval; below 1 it pays."
)
table = table_of("overlap", "What overlaps buy", SHOWN, by_overlap, [NOTE], apart=True)


CPU = Recipe(steps=13, global_batch=16, microbatch=4, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=30, global_batch=128, microbatch=2, lr=1.5e-4, warmup_steps=5)
SMOKE = [untested(named("gpt-0.5m"), plan, replace(CPU, steps=10)) for plan in (Plan(dp=2, zero_stage=3), Plan(tp=2))]
SMALL = ours.in_both(ours.MODEL_7M, [*ours.data_parallel(2), *ours.layers_shared(2)], CPU)
PAPER = [
    untested(replace(named("gpt-1.2b"), dropout=0.0), plan, recipe, "bf16")
    for plans, recipe in (
        (ours.data_parallel(64, bucket_bytes=2**27), GPU),
        (ours.layers_shared(8), replace(GPU, global_batch=32, microbatch=4)),
    )
    for plan in plans
]

EXPERIMENT = Experiment(
    source="our own; ZeRO 2019, section 7, and Megatron-LM 2019, section 3, say what is sent when",
    expectation="where ranks compute while others' bytes arrive, a step is shorter by up to what it communicates; two "
    "ranks on two cores share these with the threads that send, and gain little",
    claims=(
        ours.claim(
            "reducing gradients during the backward pass makes no step over 2% slower",
            no_slower_with("overlap_grad_reduce", ours.SLOWER), tolerance=ours.SLOWER,
        ),
        ours.claim(
            "gathering parameters ahead makes no step over 2% slower",
            no_slower_with("overlap_param_gather", ours.SLOWER), tolerance=ours.SLOWER,
        ),
        ours.claim(
            "reducing input gradients beside weight gradients makes no step over 2% slower",
            no_slower_with("overlap_input_grad_reduce", ours.SLOWER), tolerance=ours.SLOWER,
        ),
        ours.claim("overlaps change no loss, to the bit", same_without),
    ),
    table=table,
    cost=cost("30 min", "40 min, 64 GPUs with 80 GB"),
    deviations="At `smoke` and `small` collectives go through the memory of one machine, by threads that take turns "
    "with the ranks' own computation.",
    runs={
        "smoke": ours.in_turn(one_by_one, SMOKE, 1),
        "small": ours.in_turn(one_by_one, SMALL, 3),
        "paper": ours.in_turn(one_by_one, PAPER, 3),
    },
)  # fmt: skip
