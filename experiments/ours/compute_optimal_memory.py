"""From which compute budget on does the best model for it no longer fit a node?

Hoffmann et al. 2022 find the model that a budget of FLOPs trains best: by their rule one with 20 tokens a parameter, so
70B for Chinchilla's budget, whose weights alone take 140 GB in 16 bits; by their fitted law, or by its second fit
(Besiroglu et al. 2024), other ones. Training takes 16 bytes a parameter, which eight GPUs divide by ZeRO's stages or by
tensor parallelism. Models are trained and simulated to see whether these bytes decide what fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from experiments.ours import claim
from experiments.zero2019 import PREDICTED, STAGES, N, T, for_memory, predicted_bytes
from harness.analysis.scaling_law import Law
from harness.experiment.kit import (
    GB, GIB, MODEL, ZERO_STAGE, Column, Evidence, Experiment, ModelConfig, Plan, Point, Record, Run, Tolerance, cost,
    named, points, printed, published_number, table_of, tally,
)  # fmt: skip
from impl.cost.memory import model_state_bytes

GPUS, MEMORIES = 8, (16 * GIB, 32 * GIB, 80 * GIB)
"""Number of GPUs of a node, and the memory of one in bytes, for three kinds of GPU."""
number = partial(published_number, "chinchilla2022")
UNDIVIDED = Tolerance(0.02, "norms, biases and positions, which tensor-parallel ranks do not divide", "2026-11-24")
SHAPE = ModelConfig(num_layers=4, hidden_size=128, num_heads=4, seq_len=64, vocab_size=512)
NOTES = (
    "Formula: 16 bytes a parameter, divided by ZeRO's stage or tensor parallelism. Largest model: whose states fill "
    "eight such GPUs; tensor parallelism is as stage 3 there. Its budget: the FLOPs for which it is the best model.",
)


def by_law(prefix: str, parameters: float) -> float:
    """Return the FLOPs for which a law's best model has so many parameters, a power of them."""
    law = Law(*(number(f"{prefix}_{name}") for name in Law._fields))
    return float((parameters / law.optimum(1.0)[0]) ** (1 + law.alpha / law.beta))


BUDGETS: dict[str, Callable[[float], float]] = {
    "20 tokens a parameter": lambda size: 6 * number("tokens_per_parameter") * size**2,
    "Chinchilla's fit": lambda size: by_law("fit", size),
    "second fit": lambda size: by_law("refit", size),
}
"""FLOPs for which a model of so many parameters is best."""


def on_gpu(one: Point, parameters: float) -> float:
    """Return the bytes of states of so many parameters on one GPU, by formula."""
    return model_state_bytes(one.run, parameters / one.run.plan.tp)


def answers() -> list[Point]:
    """Return the largest model that fits a node, and its budgets, by memory of a GPU and ZeRO stage."""
    found = []
    for memory, stage in product(MEMORIES, STAGES):
        one = Point(for_memory(SHAPE, Plan(dp=GPUS, zero_stage=stage), batch=1))
        size = memory / on_gpu(one, 1)
        budgets = {name: of(size) for name, of in BUDGETS.items()}
        found.append(replace(one, printed={"memory": memory, "largest": size, **budgets}))
    return found


def each(one: Point) -> float:
    """Return the counted bytes of a GPU's states over the model's parameters."""
    return one.mean(lambda record: record.states_bytes / record.parameters)


of_answer = partial(printed, digits=4)
COLUMNS = (
    MODEL, T, N, ZERO_STAGE,
    Column(key="formula", header="a parameter, on a GPU, formula", unit="B", si="B", of=lambda one: on_gpu(one, 1)),
    Column(key="each", header="a parameter, counted", unit="B", si="B", of=each), PREDICTED,
    of_answer("memory", "memory of a GPU", "GiB", GIB, "B"), of_answer("largest", "largest model", "billion", 1e9),
    *(of_answer(name, f"its budget, {name}", "ZFLOP", 1e21, "FLOP") for name in BUDGETS),
)  # fmt: skip


def ours(records: Sequence[Record]) -> list[Point]:
    return points(records, lambda record: record.peak_memory_bytes, failed=True)


def no_more_than_formula(records: Sequence[Record]) -> Evidence | None:
    """Judge whether counted states of a parameter take at most the formula's bytes."""
    shares = [each(one) / on_gpu(one, 1) for one in ours(records) if not one.is_simulated]
    numbers = f"{min(shares):.3f} to {max(shares):.3f} times the formula" if shares else ""
    return tally([share <= 1 + UNDIVIDED for share in shares], "points", numbers)


def states_decide(records: Sequence[Record]) -> Evidence | None:
    """Judge whether a model fits the largest GPUs with all that a step takes where its states alone do."""
    known = [one for one in ours(records) if one.is_simulated]
    sizes = [(on_gpu(one, one.parameters), predicted_bytes(one), one.model) for one in known]
    numbers = (f"{whole / GB:.1f} GB, states {states / GB:.1f} ({model})" for states, whole, model in sizes)
    held = [(states <= MEMORIES[-1]) == (whole <= MEMORIES[-1]) for states, whole, _ in sizes]
    return tally(held, "models", ", ".join(numbers))


def too_large_for_a_node(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the best model for Chinchilla's budget fits no node; None without simulated runs."""
    most = {name: max(one.printed[name] for one in answers()) for name in BUDGETS}
    numbers = ", ".join(f"{flops:.2g} FLOPs ({name})" for name, flops in most.items())
    held = [flops < number("compute") for flops in most.values()]
    return tally(held, "laws", f"fits up to {numbers}") if any(one.is_simulated for one in records) else None


def runs(models: Sequence[ModelConfig], *plans: Plan) -> list[Run]:
    return [for_memory(model, plan, batch=plan.tp) for model in models for plan in plans]


DEEPER = replace(SHAPE, num_layers=8, hidden_size=256)
ON_TWO = (Plan(dp=2, zero_stage=3, bucket_bytes=2**18), Plan(tp=2, bucket_bytes=2**18))
ON_A_NODE = (Plan(dp=GPUS, zero_stage=3, recompute="full"), Plan(tp=GPUS, recompute="full"))

EXPERIMENT = Experiment(
    source="our own; Chinchilla 2022, equation 10",
    expectation="80 GB a GPU hold 43B parameters, which 20 tokens a parameter make the best model for 2.2e23 FLOPs",
    claims=(
        claim(
            "states take no more bytes a parameter than the formula, within 2%", no_more_than_formula,
            kind="self-consistency", tolerance=UNDIVIDED,
        ),
        claim("states alone decide which models fit eight GPUs of 80 GB", states_decide, kind="self-consistency"),
        claim(
            "the best model for Chinchilla's budget is too large to train on a node", too_large_for_a_node,
            published="5.76e23 FLOPs, 70B parameters", kind="arithmetic",
        ),
    ),
    table=table_of(
        "compute_optimal_memory", "Best models and nodes", COLUMNS, lambda records: [*ours(records), *answers()],
        NOTES, is_timed=False,
    ),
    cost=cost("1 min", "10 min, 8 GPUs with 80 GB"),
    deviations="What is trained is tiny and on two ranks, for two steps. Simulated models are PTD-P's, with one "
    "microbatch. A budget is 6 FLOPs a parameter and token. Offloading and several nodes move the limit.",
    runs={
        "smoke": runs([SHAPE], *ON_TWO),
        "small": runs([SHAPE, DEEPER], *ON_TWO),
        "paper": runs([named(f"ptdp-{size}") for size in ("7.5b", "18.4b", "39.1b", "76.1b")], *ON_A_NODE),
    },
)  # fmt: skip
