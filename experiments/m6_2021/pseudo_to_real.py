"""Is a model trained faster if its layers share their weights at first, and get their own later?

M6-10T trains a "pseudo" model, whose layers all have one layer's weights, and then a "real" one, whose layers begin as
copies of it: what shares weights has less to keep, to sum and to update. Here a model is trained from the start, as a
pseudo model to the end, and as a pseudo model that is delinked halfway: who is ahead after as many steps, and after as
much time?
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from experiments.m6_2021 import LAST_LOSS, BySeed, at_most, by_seed, in_abstract, last_loss, place
from experiments.megatron2019 import scaled
from experiments.ours import claim
from harness.experiment.kit import (
    DEVICE, MARK, NEEDS_TEXT, PARAMETERS, RUNS, STEP, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan,
    Point, Recipe, Record, Run, cost, of_run, points, step_seconds, table_of,
)  # fmt: skip
from impl.grouping import by_key

REAL, PSEUDO, BOTH = "real", "pseudo", "pseudo to real"
HALF = "pseudo, first half"


def way(run: Run) -> str:
    if run.start:
        return BOTH
    return HALF if run.keep_end else PSEUDO if run.model.shared_layers else REAL


def by_way(records: Sequence[Record]) -> dict[str, dict[tuple[str, int], Record]]:
    found = dict[str, dict[tuple[str, int], Record]]()
    for record in records:
        if not math.isnan(last_loss(record)):
            found.setdefault(way(record.run), {})[place(record)] = record
    return found


losses, seconds = by_seed(way, last_loss), by_seed(way, step_seconds)


def losses_at_equal_time(records: Sequence[Record]) -> dict[str, BySeed]:
    """Return the losses of the delinked models, and of real ones when these have trained for as long.

    Steps take their median time; between evaluations the loss is a straight line.
    """
    found, of = by_way(records), dict[str, BySeed]({REAL: {}, BOTH: {}})
    for at, last in found.get(BOTH, {}).items():
        first, real = found.get(HALF, {}).get(at), found.get(REAL, {}).get(at)
        if first is None or real is None:
            continue
        taken = sum(one.step_seconds * one.run.train.steps for one in (first, last))
        of[BOTH][at], of[REAL][at] = last_loss(last), loss_after(real, taken / real.step_seconds)
    return of


def loss_after(record: Record, steps: float) -> float:
    """Return the loss after so many steps; NaN outside of what was evaluated."""
    [course] = record.courses.values()
    for before, after in pairwise(course):
        if before.step <= steps <= after.step:
            share = (steps - before.step) / (after.step - before.step)
            return before.per("tokens") * (1 - share) + after.per("tokens") * share
    return course[-1].per("tokens") if steps >= course[-1].step else math.nan


def runs(model: ModelConfig, recipe: Recipe, seeds: int, run: Run) -> list[Run]:
    """Return a real model, a pseudo one, one that is delinked halfway, and its first half."""
    found = []
    for seed in range(seeds):
        real = replace(run, model=model, train=recipe, seed=seed)
        pseudo = replace(real, model=replace(model, shared_layers=True))
        half = replace(recipe, steps=recipe.steps // 2)
        first = replace(pseudo, train=half, keep_end=True)
        found += [real, pseudo, first, replace(real, train=half, start=first.id)]
    return found


def joined(records: Sequence[Record]) -> list[Point]:
    """Return the points, as one those that differ in nothing but the seed of the run that they start from."""
    found = (((way(one.run), one.device, replace(one.run, start=None)), one) for one in points(records, last_loss))
    return [replace(alike[0], records=sum((one.records for one in alike), ())) for alike in by_key(found).values()]


SHOWN = (
    of_run("way", "layers' weights", way, text=True), DEVICE, of_run("steps", "steps", lambda run: run.train.steps),
    PARAMETERS, LAST_LOSS, STEP, RUNS, MARK,
)  # fmt: skip
LOSS = "loss"
EXPERIMENT = Experiment(
    source="M6-10T, Lin et al. 2021 (2110.03888), abstract",
    expectation="pseudo steps take less time; delinked models are ahead of pseudo ones, and of real ones after as long",
    claims=(
        in_abstract("a step of the pseudo model takes less time", at_most(seconds, PSEUDO, REAL, "step time")),
        in_abstract(
            "after as much time the delinked model is ahead of the real one",
            at_most(losses_at_equal_time, BOTH, REAL, "loss after as much time"),
        ),
        claim(
            "after as many steps the delinked model is ahead of the real one",
            at_most(losses, BOTH, REAL, "loss after as many steps"),
        ),
        in_abstract("the delinked model is ahead of the pseudo one", at_most(losses, BOTH, PSEUDO, LOSS)),
    ),
    table=table_of("pseudo_to_real", "Layers that share weights at first", SHOWN, joined, [
        "real: every layer has weights of its own; pseudo: all have the first one's; pseudo to real: they do for half "
        "of the steps, and then begin with copies of them."
    ]),
    cost=cost("15 min", "days, 64 GPUs with 32 GB", note=NEEDS_TEXT),
    deviations="M6-10T has ten trillion parameters, most of them of experts, and lacks memory for them; here a GPT "
    "without experts fits in any case, so that only the time of a step can differ. The rate is constant, as a second "
    "stage would begin a schedule again.",
    runs={
        "smoke": runs(
            scaled(2, 32), Recipe(steps=40, global_batch=8, microbatch=8, warmup_steps=4, decay="constant"), 1,
            Run(evaluation=EvaluationConfig(every=10, sequences=32)),
        ),
        "small": runs(
            scaled(8, 64),
            Recipe(steps=800, global_batch=8, microbatch=4, lr=1e-3, warmup_steps=40, decay="constant"), 3,
            Run(
                plan=Plan(dp=2), data=DataConfig(dataset="data/books-byte"),
                evaluation=EvaluationConfig(every=50, sequences=128),
            ),
        ),
        "paper": runs(
            ModelConfig(num_layers=24, hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=51200),
            Recipe(steps=30_000, global_batch=1024, microbatch=8, lr=1.5e-4, warmup_steps=500, decay="constant"), 3,
            Run(
                plan=Plan(dp=64), precision="bf16", data=DataConfig(dataset="data/openwebtext-gpt2"),
                evaluation=EvaluationConfig(every=1000, sequences=1024),
            ),
        ),
    },
)  # fmt: skip
