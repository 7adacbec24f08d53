"""Does a step's time grow as the FLOPs of the model?

One rank trains GPT models of 8M to 400M parameters, with as many tokens a step: were time proportional to the model
FLOPs, then each would have the same rate. What stands against it is what a small model spends between its products, and
what a large one has to fetch from memory. Beside that, 1, 2, 4 and 8 data-parallel ranks with as many sequences each:
more ranks than cores take turns, and say nothing of scaling but that.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.ours import claim
from harness.experiment.kit import (
    FLOP_RATE, MARK, MODEL, PARAMETERS, RUNS, TERA, Column, Experiment, ModelConfig, Plan, Precision, Recipe, Run, cost,
    milliseconds, named, of_run, repeated, share, step_seconds, table_of, untested,
)  # fmt: skip
from harness.experiment.rates import LINEAR, NO_FASTER, flops, is_linear, name, sizes, turns_add_nothing


def one_rank(models: Sequence[ModelConfig], recipe: Recipe, repeats: int, precision: Precision = "fp32") -> list[Run]:
    return repeated([untested(model, Plan(), recipe, precision) for model in models], repeats)


def in_ranks(degrees: Sequence[int], runs: Sequence[Run]) -> list[Run]:
    """Return runs of one rank on data-parallel ranks, each with the batch of the one."""
    batch = lambda run, dp: replace(run.train, global_batch=run.train.global_batch * dp)
    return [replace(run, plan=Plan(dp=dp), train=batch(run, dp)) for run in runs for dp in degrees]


SHOWN = (
    MODEL, PARAMETERS,
    of_run("tokens_per_step", "tokens a step", lambda run: run.tokens_per_step),
    Column(key="flops", header="model FLOPs a step", unit="TFLOP", si="FLOP", scale=TERA, digits=3, of=flops),
    milliseconds("step_seconds", "step, median", lambda one: one.estimate(step_seconds)), FLOP_RATE,
    share("over", "over proportional", lambda one: one.relative.mean - 1), RUNS, MARK,
)  # fmt: skip
LINE = of_run("line", "line", lambda run: f"{run.tokens_per_step:,} tokens a step")
AT = Column(key="at", header="at", of=name)
UNPUBLISHED = Column(key="published_rate", header="published", of=lambda _: math.nan)
NOTES = (
    "Model FLOPs: palm_12, 6 N + 12 L h s a token, where N counts what a token is multiplied by: 12 L h^2 and the "
    "output head. Over proportional: step time over c times these, less 1; c is the geometric mean over the sizes.",
)


table = table_of(
    "cost_scaling", "Cost of a step by model size", SHOWN, lambda records: [one for of in sizes(records) for one in of],
    NOTES, line=LINE, at=AT, published_rate=UNPUBLISHED,
)  # fmt: skip


CPU = Recipe(steps=9, global_batch=2, microbatch=2, lr=1e-4, warmup_steps=2)
FOUR = replace(CPU, global_batch=4)
GPU = Recipe(steps=15, global_batch=32, microbatch=4, lr=1.5e-4, warmup_steps=2)
SMALL = [
    named("gpt-8m"), named("gpt-25m"),
    *(
        ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, seq_len=256)
        for layers, hidden in ((12, 768), (16, 1024), (20, 1280))
    ),
]  # fmt: skip
"""Models of `impl.model.sizes`, then on to 85M, 200M and 400M with as many hidden units a head."""
PAPER = [replace(named(f"gpt-{size}"), dropout=0.0) for size in ("355m", "1.2b", "2.5b", "4.2b")]

EXPERIMENT = Experiment(
    source="our own; Kaplan et al. 2020 (2001.08361), section 2.1, take a step's cost as 6 N a token",
    expectation="proportional within 15%; with more ranks than cores, no more tokens a second",
    claims=(
        claim(
            "from 8M parameters to 20 times as many or more, time is proportional to model FLOPs within 15%", is_linear,
            tolerance=LINEAR,
        ),
        claim("ranks that share cores are no faster together, but for 5%", turns_add_nothing, tolerance=NO_FASTER),
    ),
    table=table,
    cost=cost("8 min", "30 min, 8 GPUs with 141 GB"),
    deviations="At `small` in fp32, whose products take most of a step, and with 512 tokens a step: 400M parameters "
    "take a core seconds for each. Vocabularies are those of bytes, so that N is what the layers have.",
    runs={
        "smoke": [
            *one_rank([replace(named(f"gpt-{size}"), seq_len=256) for size in ("0.5m", "2m", "8m")], CPU, 1),
            *in_ranks((1, 2, 4), one_rank([replace(named("gpt-0.5m"), seq_len=256)], FOUR, 1)),
        ],
        "small": [*one_rank(SMALL, CPU, 2), *in_ranks((1, 2, 4, 8), one_rank([named("gpt-8m")], FOUR, 2))],
        "paper": [*one_rank(PAPER, GPU, 3, "bf16"), *in_ranks((2, 4, 8), one_rank(PAPER[1:2], GPU, 3, "bf16"))],
    },
)  # fmt: skip
