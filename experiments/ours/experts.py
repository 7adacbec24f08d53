"""Does a layer of experts take longer than an MLP by which each token is multiplied as often?

Two ranks train a model whose tokens each meet one expert as wide as the MLP, or two of half its width, and the model
with the MLP. The products are as many; experts add a router, rows that are sorted and sent, and products of fewer rows.
Where ranks share experts, each has half of their weights to update and none to sum; the one with more rows lets the
other wait, so that they are also timed with choices that a bias has balanced, and after more tokens a step.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments import ours
from harness.experiment.kit import (
    DEVICE, MARK, PARAMETERS, RANKS, RUNS, STEP, Estimate, Experiment, ModelConfig, Plan, Point, Recipe, Record, Run,
    cost, each, less, named, of_run, points, relative_to, share, step_seconds, table_of, untested,
)  # fmt: skip

BALANCING, STILL = 0.005, 1e-6
"""Change of a bias in a step, by which after eight steps the fuller half of the experts has 52 or 53% of the rows in
the mean of the layers, 58% in one; and the rate at which weights keep their initial values meanwhile."""


def way(run: Run) -> str:
    """Return in words what tokens meet, and whether ranks share it."""
    model = run.model
    if not model.experts:
        return "MLP"
    size = "" if model.expert_size is None else " of half the width"
    where = "shared" if run.plan.ep > 1 else "each rank has all"
    return f"{model.choices} of {model.experts} experts{size}, {where}{', balanced' if model.balance_bias else ''}"


def beside_mlp(records: Sequence[Record]) -> list[Point]:
    """Return all points, each relative to the step of its model with MLPs on its device, of as many tokens."""
    place = lambda one: (one.device, one.run.model.hidden_size, one.run.train.global_batch)
    return relative_to(points(records, step_seconds), lambda one: not one.run.model.experts, step_seconds, place)


def of_experts(records: Sequence[Record]) -> list[tuple[Estimate, Run]]:
    return [(one.relative, one.run) for one in beside_mlp(records) if one.run.plan.ep > 1]


def balanced(records: Sequence[Record]) -> list[tuple[Estimate, Run]]:
    """Return the ratio of a step with balanced choices to that with those of an untrained router."""
    found = {one.run: one for one in points(records, step_seconds)}
    return [
        (one.against(found.get(replace(other, model=replace(run.model, balance_bias=0.0))), step_seconds).relative, run)
        for run, one in found.items() if run.model.balance_bias
        for other in [replace(run, train=replace(run.train, lr=CPU.lr))]
    ]  # fmt: skip


def variants(run: Run) -> list[Run]:
    """Return the run with an MLP, with one expert a token, and with two of half the width.

    Ranks share them or not; those that do have as many rows each, or as many as an untrained router sends.
    """
    one = replace(run.model, experts=8, balance_loss=0.01)
    two = replace(one, experts=16, experts_per_token=2, expert_size=run.model.mlp_inner // 2)
    plans = run.plan, replace(run.plan, ep=run.plan.dp)
    found = [run, *(replace(run, model=model, plan=plan) for model in (one, two) for plan in plans)]
    still = replace(run.train, lr=STILL)
    return found + [
        replace(run, model=replace(model, balance_bias=BALANCING), plan=plans[1], train=still) for model in (one, two)
    ]


def timed(model: ModelConfig, dp: int, recipe: Recipe, repeats: int, **fields: str) -> list[Run]:
    return ours.in_turn(variants, [replace(untested(model, Plan(dp=dp), recipe), **fields)], repeats)


CPU = Recipe(steps=20, global_batch=16, microbatch=8, lr=1e-4, warmup_steps=2)
BLOCK = {"biases": False}
SHOWN = (
    of_run("way", "a token meets", way, text=True), DEVICE, RANKS,
    of_run("hidden_size", "hidden size", lambda run: run.model.hidden_size),
    of_run("tokens", "tokens a step", lambda run: run.train.global_batch * run.model.seq_len),
    PARAMETERS, STEP, share("relative", "of the MLP's", lambda one: one.relative), RUNS, MARK,
)  # fmt: skip
EXPERIMENT = Experiment(
    source="our own; Switch Transformer, Fedus et al. 2021 (2101.03961), compares at as many FLOPs a token",
    expectation="a step with shared experts takes as long as with an MLP: rows are sent, gradients are not",
    claims=(
        ours.claim(
            "a step with shared experts takes at most as long as with an MLP",
            each(of_experts, lambda relative, _: less(relative, 1.0), "ways", "{:.3f}"),
        ),
        ours.claim(
            "with balanced choices a step with shared experts takes less time than with an untrained router's",
            each(balanced, lambda relative, _: less(relative, 1.0), "ways", "{:.3f}"),
        ),
    ),
    table=table_of("experts", "Experts beside an MLP of as many FLOPs a token", SHOWN, beside_mlp, [
        "Shared: every rank has an equal part of the experts, and sends rows to the others' and back. The mean over "
        "repeats in turn, with its 95% t-interval. Balanced: a bias has moved choices until experts had as many rows."
    ]),
    cost=cost("25 min", "20 min, 8 GPUs with 80 GB"),
    deviations="Tokens choose as an untrained router has them, unless a bias balances their choices.",
    runs={
        "smoke": timed(replace(named("gpt-0.5m"), **BLOCK), 2, CPU, 1),
        "small": [
            *timed(replace(ours.MODEL_7M, **BLOCK), 2, CPU, 3),
            *(
                run for run in timed(replace(ours.MODEL_7M, **BLOCK), 2, replace(CPU, global_batch=64, steps=16), 3)
                if run.model.experts < 16 and (run.plan.ep == 1 or run.model.balance_bias)
            ),
        ],
        "paper": timed(replace(named("llama-8b"), num_layers=4), 8, replace(CPU, global_batch=64, microbatch=4), 3,
                       precision="bf16"),
    },
)  # fmt: skip
