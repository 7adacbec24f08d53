"""What would moving LayerNorm change in a larger model than we can train, and how certain is that?

A family of small GPTs is trained for each norm placement, with several seeds, and validated along the way. The
learning rate is constant after its warm-up, so that each validation is what a run of that length would end with. To
every placement's losses Chinchilla's law L(N, D) = E + A / N^alpha + B / D^beta is fitted (Hoffmann et al. 2022,
section 3.3), many times with other draws of the runs, and extrapolated: what the placements differ by in models 10, 100
and 1000 times the largest, and in how many of the draws they differ in that direction.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.megatron2019 import scaled
from experiments.megatron2019.layernorm_placement import NORMS
from experiments.ours import claim
from harness.analysis.placement_laws import BASELINE, SURE, ends, fits, table, targets
from harness.analysis.scaling_law import difference
from harness.experiment.kit import (
    Check, Claim, DataConfig, EvaluationConfig, Evidence, Experiment, ModelConfig, Plan, Recipe, Record, Run,
    Tolerance, about, estimate, published, size_name, tally,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLOSE = Tolerance(0.02, "assumed", "2026-11-22")
"""Largest root mean square of log loss over the law's that counts as described by it."""


def figure(records: Sequence[Record]) -> "Figure | None":
    """Draw loss against tokens of every model, a panel a placement, with its law; None without a law."""
    from harness.figures.style import COLOURS, panels

    laws = fits(records)
    if not laws:
        return None
    every = [point.loss for one in laws.values() for point in one.points]
    limits = 0.98 * min(every), 1.02 * max(every)
    made, axes = panels(len(laws))
    for ax, (norm, one) in zip(axes, laws.items(), strict=True):
        sizes = sorted({point.parameters for point in one.points})
        for colour, size in zip(COLOURS, sizes, strict=False):
            own = [point for point in one.points if point.parameters == size]
            tokens = np.geomspace(min(point.tokens for point in own), max(point.tokens for point in own))
            ax.plot([p.tokens for p in own], [p.loss for p in own], "o", markersize=3, alpha=0.6, color=colour)
            ax.plot(tokens, one.law.loss(size, tokens), color=colour, label=size_name(round(size)))
        ax.set(title=norm, xlabel="tokens", ylabel="loss (nats per token)", xscale="log", ylim=limits)
        ax.legend(title="parameters", fontsize=8)
    made.suptitle(f"Losses, and the law through them{about(records)}")
    return made


def described(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the law is close to the losses of every placement."""
    laws = fits(records)
    numbers = ", ".join(f"{one.off:.2%} ({norm})" for norm, one in laws.items())
    return tally([one.off <= CLOSE for one in laws.values()], "placements", numbers)


def higher_here(other: str) -> Check:
    """Return a check that the other placement ends higher than the baseline at every size that was trained."""

    def check(records: Sequence[Record]) -> Evidence | None:
        ours, theirs = ends(records, BASELINE), ends(records, other)
        mean = lambda end: estimate(end.losses)
        over = {name: mean(theirs[name]) - mean(end) for name, end in ours.items() if name in theirs}
        numbers = ", ".join(f"{one:+.3f} ({name})" for name, one in over.items())
        return tally(list(over.values()), "sizes", f"{numbers} nats")

    return check


def higher_beyond(records: Sequence[Record]) -> Evidence | None:
    """Judge whether SURE of the draws have post above the baseline at every larger size; None if a law fails."""
    laws = fits(records)
    if any(norm not in laws or laws[norm].off > CLOSE for norm in (BASELINE, "post")):
        return None
    found = [(size, difference(laws["post"], laws[BASELINE], size, tokens)) for size, tokens in targets(laws)]
    found = [(size, one) for size, one in found if not math.isnan(one.above)]
    numbers = ", ".join(
        f"{one.mean:+.2f}, {one.low:+.2f} to {one.high:+.2f}, in {one.above:.0%} of the draws "
        f"({size_name(round(size))})"
        for size, one in found
    )
    return tally([one.above >= SURE for _, one in found], "sizes", numbers)


def as_chinchilla(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the baseline's exponents are Chinchilla's, within the interval of the draws."""
    one = fits(records).get(BASELINE)
    if one is None:
        return None
    held, parts = [], []
    for name in ("alpha", "beta"):
        (printed,) = published("chinchilla2022", f"fit_{name}")["value"]
        low, high = one.interval(lambda law, name=name: getattr(law, name))
        if math.isnan(low):
            return None
        held.append(low <= printed <= high)
        parts.append(f"{name} {getattr(one.law, name):.2f}, {low:.2f} to {high:.2f}")
    return tally(held, "exponents", "; ".join(parts))


def family(
    sizes: Sequence[tuple[int, int]], norms: Sequence[str], seeds: int, recipe: Recipe, every: int, dataset: str
) -> list[Run]:
    """Return models of these layers and hidden units, each placement of a seed in turn."""
    return [
        Run(
            model=scaled(layers, hidden, norm_placement=norm),
            train=recipe,
            data=DataConfig(dataset=dataset),
            evaluation=EvaluationConfig(every=every, sequences=128),
            seed=seed,
        )
        for seed in range(seeds)
        for layers, hidden in sizes
        for norm in norms
    ]


CPU = Recipe(steps=480, global_batch=8, microbatch=8, lr=2e-3, warmup_steps=40, decay="constant")
GPU = Recipe(steps=20_000, global_batch=256, microbatch=8, lr=3e-4, warmup_steps=500, decay="constant")
LARGE = ((6, 384), (8, 512), (12, 768), (16, 1024), (24, 1024))
"""Layers and hidden size of models from 30M to 360M parameters, with the embedding's."""

EXPERIMENT = Experiment(
    source="our own; the law and its fit: Hoffmann et al. 2022 (2203.15556), section 3.3; the question: Megatron-LM "
    "2019, figure 7",
    expectation="the law describes all placements; post-layernorm is worse at every size, by more than what the seeds "
    "differ by, and an extrapolation over a factor of ten is the last one that says anything",
    claims=(
        claim(
            "pre-layernorm reaches a lower loss than post-layernorm at every size that was trained",
            higher_here("post"),
        ),
        claim(
            "so it does in models 10, 100 and 1000 times as large, by 95% of the draws",
            higher_beyond,
        ),
        claim(
            "and than sandwich-layernorm at every size that was trained",
            higher_here("sandwich"),
        ),
        claim("every placement's losses are within 2% of its law (root mean square)", described, tolerance=CLOSE),
        Claim(
            "pre-layernorm's exponents are Chinchilla's, within the interval of the draws",
            "Hoffmann et al. 2022, equation 10", as_chinchilla, published="alpha 0.34, beta 0.28",
            kind="quantitative",
        ),
    ),
    table=table,
    figure=figure,
    cost={
        "smoke": "1 min, 2 CPU cores",
        "small": "12 min, 2 CPU cores with `--jobs 2` (needs text, see docs/texts.md)",
        "paper": "2 days, 64 GPUs with 80 GB",
    },
    deviations="Hoffmann et al. have a cosine of each run's own length; here the rate is constant, and one run gives "
    "the losses of all shorter ones. At `small` models have 37 thousand to 0.8M parameters, and a vocabulary of bytes; "
    "initial weights are scaled with the width, so that what a block adds is as in the papers' models.",
    runs={
        "smoke": family(
            ((1, 32), (2, 32), (2, 64)), ("pre", "post"), 1, Recipe(
                steps=120, global_batch=8, microbatch=8, lr=4e-3, warmup_steps=12, decay="constant"
            ), 20, DataConfig().dataset,
        ),
        "small": family(((2, 32), (2, 64), (3, 96), (4, 128)), NORMS, 3, CPU, 48, "data/books-byte"),
        "paper": [
            Run(
                model=ModelConfig(
                    num_layers=layers,
                    hidden_size=hidden,
                    num_heads=hidden // 64,
                    seq_len=1024,
                    vocab_size=51200,
                    norm_placement=norm,
                ),
                plan=Plan(dp=8),
                train=GPU,
                data=DataConfig(dataset="data/openwebtext-gpt2"),
                evaluation=EvaluationConfig(every=1000, sequences=1024),
                precision="bf16",
                seed=seed,
            )
            for seed in range(3)
            for layers, hidden in LARGE
            for norm in NORMS
        ],
    },
)  # fmt: skip
