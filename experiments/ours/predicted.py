"""How well is a step's time predicted on the machine that trains it?

`calibrate` measures a machine: its products, its links, and a few small runs. Here are other runs, of shapes and plans
that it has not seen: every way to share a model over two ranks, each simulated for the machine's file and trained on
the machine. What counts is how far the two are apart, and whether they put the runs in the same order, which is what a
search for the fastest plan lives on.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.ours import claim
from harness.experiment.kit import (
    MARK, MODEL, RANKS, RUNS, Experiment, ModelConfig, Plan, Recipe, Record, Table, about, cost, milliseconds, named,
    of_run, repeated, share, step_seconds, tabulate, untested,
)  # fmt: skip
from harness.experiment.simulated_steps import OFF, SAME_ORDER, close, compared, in_order, name, off, predicted, systems

SHOWN = (
    MODEL, RANKS, of_run("plan", "plan", name, text=True),
    of_run("microbatches", "microbatches", lambda run: run.microbatches),
    milliseconds("predicted", "step, simulated", predicted),
    milliseconds("step", "step, measured", lambda one: one.estimate(step_seconds)),
    share("off", "simulated / measured - 1", off, digits=2), RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate the step of every point that was trained and simulated, and the error of the prediction."""
    found = compared(records)
    numbers = "; ".join(judged.numbers for judged in (close(records), in_order(records)) if judged)
    notes = (
        f"Simulated for {systems(records)}. Measured: the median of a run's steps, mean over repeats.",
        f"{len(found)} points: {numbers}.",
    )
    return tabulate("predicted", f"Predicted and measured{about(records)}", SHOWN, found, notes)


CPU = Recipe(steps=15, lr=1e-4, warmup_steps=2)
GPU = replace(CPU, steps=30, global_batch=64, microbatch=2)
SMALL = [
    untested(
        ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_len=seq_len), plan,
        replace(CPU, global_batch=size * count * plan.dp, microbatch=size),
    )
    for (layers, hidden, heads, seq_len), plan, size, count in (
        ((2, 384, 6, 128), Plan(tp=2), 4, 2),
        ((3, 192, 6, 192), Plan(tp=2, sequence_parallel=True), 4, 2),
        ((4, 320, 10, 96), Plan(tp=2, recompute="full"), 2, 4),
        ((6, 192, 6, 128), Plan(pp=2), 4, 8),
        ((4, 320, 5, 128), Plan(pp=2, schedule="gpipe"), 2, 6),
        ((8, 160, 5, 192), Plan(pp=2, schedule="interleaved", chunks=2), 2, 4),
        ((6, 256, 8, 96), Plan(pp=2, schedule="zb_h1"), 4, 6),
        ((3, 384, 6, 160), Plan(dp=2), 4, 2),
        ((6, 192, 3, 256), Plan(dp=2, zero_stage=1), 2, 3),
        ((4, 320, 5, 96), Plan(dp=2, zero_stage=2), 4, 2),
        ((5, 256, 4, 192), Plan(dp=2, zero_stage=3), 4, 2),
        ((2, 512, 8, 64), Plan(dp=2, recompute="selective"), 8, 1),
    )
]  # fmt: skip
"""Models, their plans, and the size and number of a rank's microbatches in a step."""
PAPER = (
    Plan(dp=8), Plan(dp=8, zero_stage=1), Plan(dp=8, zero_stage=3), Plan(dp=4, tp=2), Plan(tp=8),
    Plan(tp=8, sequence_parallel=True), Plan(pp=8), Plan(pp=8, schedule="interleaved", chunks=5),
    Plan(pp=8, schedule="zb_h1"), Plan(pp=4, tp=2), Plan(dp=2, tp=2, pp=2), Plan(dp=8, recompute="full"),
)  # fmt: skip
ON_8 = replace(named("gpt-1.2b"), dropout=0.0)

EXPERIMENT = Experiment(
    source="our own",
    expectation="errors of 10% on average, as constants fitted to small runs carry to shapes that differ by a factor "
    "of two; the same order but for points whose steps take about as long",
    claims=(
        claim("predicted steps are off by 10% on average, or less", close, compares=True, tolerance=OFF),
        claim(
            "predicted and measured steps are in the same order: Kendall's tau 0.85 or more", in_order, compares=True,
            tolerance=SAME_ORDER,
        ),
    ),
    table=table,
    cost=cost("8 min", "20 min, 8 GPUs with 80 GB"),
    deviations="The machine's file is measured by `lmscale calibrate` just before, the points are simulated "
    "for it by `lmscale predict`.",
    runs={
        "smoke": [SMALL[0], SMALL[4], SMALL[10]],
        "small": repeated(SMALL, 3),
        "paper": [untested(ON_8, replace(plan, bucket_bytes=2**27), GPU, "bf16") for plan in PAPER],
    },
)  # fmt: skip
