"""How fast should protein models grow with compute, and do masked ones have to grow faster than causal ones?

Cheng et al. 2024 train causal and masked protein models for equally many FLOPs at many sizes: the best size grows with
compute to the power 0.58 for causal models, and faster for masked ones. Serrano et al. 2024 find 0.27 for masked ones.
Here tiny models of both kinds learn synthetic families of sequences in an alphabet of 25 letters, whose floor is known:
for each of four budgets five sizes are trained, a parabola of their losses gives the best, and a line its growth.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from experiments.m6_2021 import LAST_LOSS, last_loss
from harness.analysis.isoflop import Profile, budget, exponent, profiles
from harness.experiment.kit import (
    AT_ONCE, RUNS, Claim, Column, DataConfig, Estimate, EvaluationConfig, Evidence, Experiment, ModelConfig, Plan,
    Point, Recipe, Record, Run, Tolerance, about, cost, near, of_run, points, published, published_number, size_name,
    table_of, tally, with_interval,
)  # fmt: skip
from harness.experiment.loss_by_size import tokens
from harness.figures.isoflop import isoflop
from impl.data.batches import MASKED_SHARE
from impl.data.config import PROTEINS

NEAR = Tolerance(
    0.1, "two ways to find the best sizes among the authors' own losses differ by 0.06, their noise by more",
    "2026-11-27",
)  # fmt: skip
"""Difference of exponents that counts as none."""


KINDS = {"gpt": "causal", "bert": "masked"}
MORE, BATCHES, RATES = {"gpt": 1, "bert": 8}, {"gpt": 1, "bert": 4}, {"gpt": 0.5, "bert": 0.15}
"""Times the budget, as masked models predict an eighth of the tokens; times the batch; learning rate times width."""
number = partial(published_number, "proteins2024")


def kind(run: Run) -> str:
    return KINDS[run.model.family]


def by_kind(records: Sequence[Record]) -> dict[str, list[Profile]]:
    return {one: profiles((r for r in records if kind(r.run) == one), last_loss) for one in KINDS.values()}


def grown(records: Sequence[Record]) -> dict[str, Estimate]:
    """Return the exponent of the best size over compute of each kind of model; NaN if it is unknown."""
    return {one: exponent(of) for one, of in by_kind(records).items()}


def said(records: Sequence[Record], *kinds: str) -> str:
    """Return the exponents of these kinds in words, each with the sizes that it rests on."""
    parts = []
    for one in kinds:
        found, best = grown(records)[one], [of.best for of in by_kind(records)[one] if not math.isnan(of.best)]
        sizes = f", {size_name(round(min(best)))} to {size_name(round(max(best)))}" if best else ""
        parts.append(f"{one} {with_interval(found, '.2f', '.2f')} ({len(best)} best sizes{sizes})")
    return ", ".join(parts)


def masked_grow_faster(records: Sequence[Record]) -> Evidence | None:
    found = grown(records)
    return tally([found["masked"] - found["causal"]], "", said(records, "masked", "causal"))


def as_published(one: str, quantity: str) -> Claim:
    """Return the claim that a kind's exponent is the published one."""

    def check(records: Sequence[Record]) -> Evidence | None:
        return tally([near(grown(records)[one], number(quantity), NEAR)], "", said(records, one))

    text = f"the best size of {one} models grows with compute to the published power, to 0.1"
    where, printed = published("proteins2024", quantity)[["where", "value"]].iloc[0]
    return Claim(text, f"{where}", check, f"{printed:.2f}", kind="quantitative", tolerance=NEAR)


def nearer_to_cheng(records: Sequence[Record]) -> Evidence | None:
    """Judge whether masked models' exponent is above the middle of the two papers' numbers."""
    found = grown(records)["masked"]
    border = (number("parabola_exponent_masked") + number("serrano_exponent")) / 2
    return tally([found - border], "", f"{said(records, 'masked')}, middle {border:.2f}")


def none_below_floor(records: Sequence[Record]) -> Evidence | None:
    """Judge whether losses are above the validation text's code length, or, with masks, that of known families.

    Two standard errors below count as above; the masked tokens are a share of the text.
    """
    over = dict[str, list[float]]()
    for one in records:
        data, loss = one.resolved.data, last_loss(one)
        if data and data.entropy and data.entropy.valid and math.isfinite(loss):
            causal, error = kind(one.run) == "causal", data.entropy.valid.standard_error or 0.0
            floor = data.entropy.floor if causal else data.entropy.nats_per_token
            over.setdefault(kind(one.run), []).append((loss - floor) / (error if causal else error / MASKED_SHARE**0.5))
    numbers = ", ".join(f"{name} {min(of):+.0f}" for name, of in over.items())
    held = [one > -2 for of in over.values() for one in of]
    return tally(held, "runs", f"lowest, in standard errors above: {numbers}")


def trained(run: Run, family: str, flops: float, hidden: int, seed: int) -> Run:
    """Return a run of so many FLOPs, 6 for each weight of the layers and token; its rate falls with the width."""
    model, times = replace(run.model, family=family, hidden_size=hidden), BATCHES[family]
    batch, own, lr = run.train.global_batch * times, run.train.microbatch * times, RATES[family] / hidden
    steps = round(flops * MORE[family] / (6 * model.active_weights * batch * model.seq_len))
    recipe = replace(
        run.train, steps=steps, global_batch=batch, microbatch=own, lr=lr, min_lr=lr / 10,
        warmup_steps=steps // (20 if family == "gpt" else 10),
    )  # fmt: skip
    return replace(run, model=model, train=recipe, seed=seed)


def sweep(run: Run, least: float, widths: Sequence[Sequence[int]], seeds: int) -> list[Run]:
    """Return runs of both kinds, whose widths are given for each budget; a budget is twice the one before."""
    return [
        trained(run, family, least * 2**i, hidden, seed)
        for seed in range(seeds)
        for i, own in enumerate(widths)
        for family in KINDS
        for hidden in own
    ]


SMALL, LARGE = (8, 12, 16, 20, 28), (12, 16, 20, 28, 36)
"""Hidden sizes for the two smaller budgets and for the two larger ones."""
TINY = Run(
    model=ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=32, positions="rotary"),
    data=DataConfig(dataset=PROTEINS), train=Recipe(global_batch=16, microbatch=16),
    evaluation=EvaluationConfig(sequences=0),
)  # fmt: skip
GPU = replace(
    TINY, model=ModelConfig(num_layers=24, hidden_size=512, num_heads=8, seq_len=1024, positions="rotary"),
    plan=Plan(dp=8), precision="bf16", data=DataConfig(dataset="data/uniref50-amino"),
    train=Recipe(global_batch=512, microbatch=16, weight_decay=0.1),
)  # fmt: skip


def by_budget(records: Sequence[Record]) -> list[Point]:
    place = lambda one: (kind(one.run), budget(one.records[0]), one.run.model.active_weights)
    return sorted(points(records, last_loss), key=place)


SHOWN = (
    of_run("kind", "model", kind, text=True),
    Column(key="flops", header="FLOPs", of=lambda one: f"{budget(one.records[0]):.1e}", text=True),
    Column(key="weights", header="weights", of=lambda one: one.run.model.active_weights),
    Column(key="tokens", header="tokens", of=lambda one: size_name(tokens(one.records[0])), text=True),
    LAST_LOSS, RUNS,
)  # fmt: skip
EXPERIMENT = Experiment(
    source="Cheng et al. 2024 (2411.02142), section on IsoFLOP profiles; Serrano et al. 2024 (2406.07249), abstract",
    expectation="both kinds' best sizes grow with about 0.6 and 0.75 as power of compute, masked ones' faster",
    claims=(
        Claim(
            "the best size of masked models grows faster with compute than that of causal ones",
            "section on IsoFLOP profiles", masked_grow_faster, "0.76 and 0.64", kind="direction",
        ),
        as_published("causal", "parabola_exponent_causal"),
        as_published("masked", "parabola_exponent_masked"),
        Claim(
            "masked models' power is nearer to Cheng's than to Serrano's", "our own", nearer_to_cheng, "0.76 and 0.27"
        ),
        Claim(
            "no loss is below the floor of the synthetic sequences", "our own", none_below_floor,
            kind="self-consistency",
        ),
    ),
    table=table_of(
        "compute_optimal", "Losses at equal FLOPs", SHOWN, by_budget, [
            "Weights: those of the layers' matrices, N; FLOPs: 6 N D for D tokens. The exponents of best sizes are in "
            "the claims, with the 95% t-interval of a line through the budgets' means over seeds; ± of a loss is that "
            "over the seeds."
        ], is_timed=False,
    ),
    figure=lambda records: isoflop(by_kind(records), f"Loss by size at equal FLOPs{about(records)}"),
    cost=cost("30 min", "weeks, 8 GPUs with 80 GB", note=AT_ONCE),
    deviations="Sequences are synthetic, of 512 families, 24 amino acids each; models have two layers and a thousandth "
    "of Cheng's weights or fewer. Heads and attention's products, a large part of what such models do, are not counted "
    "in FLOPs, as the authors do not count them. Masked models have eight times the budgets, as they "
    "predict an eighth of the tokens; they also learn whether their two halves belong together, as BERT does. Rates "
    "follow the width: the causal ones are those of ours/perplexity_by_size, 8e-3 at 64; at these few masked models "
    "learned anything, so that theirs were tried.",
    runs={
        "smoke": sweep(TINY, 1e9, [SMALL[:3]] * 2, 1),
        "small": sweep(TINY, 5e9, [SMALL, SMALL, LARGE, LARGE], 2),
        "paper": sweep(GPU, 1e19, [(256, 384, 512, 640, 768)] * 2 + [(384, 512, 640, 768, 1024)] * 2, 2),
    },
)  # fmt: skip
