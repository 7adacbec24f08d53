"""What would moving LayerNorm change in a larger model than we can train, and how certain is that?

A family of small GPTs is trained for each norm placement, with several seeds, and validated along the way. The
learning rate is constant after its warm-up, so that each validation is what a run of that length would end with. To
every placement's losses Chinchilla's law L(N, D) = E + A / N^alpha + B / D^beta is fitted (Hoffmann et al. 2022,
section 3.3), many times with other draws of the runs, and extrapolated: what the placements differ by in models 10, 100
and 1000 times the largest, and in how many of the draws they differ in that direction.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.megatron2019.layernorm_placement import NORMS, scaled
from experiments.ours.engines import claimed
from harness.analysis.render import Column, Table, number, shown
from harness.analysis.scaling_law import Fitted, Law, Point, between, can_fit, fitted
from harness.experiment.claims import Claim, Evidence, Row, measured, tally
from harness.experiment.experiment import Experiment
from harness.experiment.published import published
from harness.records.measures import about, size_name
from harness.records.record import Record
from harness.records.statistics import estimate
from impl.data.config import DataConfig
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "pre"
"""Placement that the others are compared with."""
FITTED_FROM = 0.2
"""Share of the steps that come before the first validation that is fitted: earlier the law does not hold."""
TIMES, TOKENS_PER_PARAMETER = (10, 100, 1000), 20
"""Extrapolation sizes as multiples of the largest model's parameters, and tokens a parameter (Hoffmann et al.)."""
CLOSE = 0.02
"""Largest root mean square of log loss over the law's that counts as described by it; assumed."""
SURE = 0.95
"""Share of the draws that have to agree."""


def points_of(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Return validations of runs that ended well, by norm placement, from FITTED_FROM of their steps on."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for one in row["course"] if _counts(row) else ():
            if one.step >= FITTED_FROM * row["step"]:
                tokens = float(one.step * row["tokens_per_step"])
                point = Point(float(row["parameters"]), tokens, one.per("tokens"), row["id"])
                found.setdefault(row["norm_placement"], []).append(point)
    return {norm: found[norm] for norm in PLACEMENTS if norm in found}


def _counts(row: Row) -> bool:
    """Return True if a row is the validation of a run that ended well."""
    return row.get("kind") == "causal" and row["status"] == "ok" and not row["diverged"]


def fits(rows: Sequence[Row]) -> dict[str, Fitted]:
    """Return the law of every norm placement that has enough models."""
    return {
        norm: _fitted(tuple(sorted(points)), list(PLACEMENTS).index(norm))
        for norm, points in points_of(rows).items()
        if can_fit(points)
    }


def _fitted(points: tuple[Point, ...], seed: int) -> Fitted:
    """Return the law of one placement's points, fitted once; the seed keeps placements' draws independent."""
    if (points, seed) not in _KNOWN:
        _KNOWN[points, seed] = fitted(points, seed=seed)
    return _KNOWN[points, seed]


_KNOWN: dict[tuple[tuple[Point, ...], int], Fitted] = {}


def difference(of: Fitted, baseline: Fitted, parameters: float, tokens: float) -> dict[str, float]:
    """Return a placement's loss over the baseline's by their laws, its interval, and the share of draws above 0."""
    each = of.resampled.loss(parameters, tokens) - baseline.resampled.loss(parameters, tokens)
    low, high = between(each)
    mean = of.law.loss(parameters, tokens) - baseline.law.loss(parameters, tokens)
    above = math.nan if math.isnan(low) else float(np.mean(each > 0))
    return {"over": mean, "over_low": low, "over_high": high, "above": above}


class End(NamedTuple):
    """Runs of one model after their last step."""

    parameters: float
    tokens: float
    losses: list[float]
    """Loss of each seed."""


def ends(rows: Sequence[Row], norm: str) -> dict[str, End]:
    """Return every model of this placement at its end, by name, the smallest first."""
    found: dict[str, End] = {}
    for row in rows:
        if row["norm_placement"] == norm and _counts(row):
            tokens = float(row["step"] * row["tokens_per_step"])
            end = found.setdefault(row["model"], End(float(row["parameters"]), tokens, []))
            end.losses.append(math.log(row["token_perplexity"]))
    return dict(sorted(found.items(), key=lambda item: item[1].parameters))


def targets(laws: dict[str, Fitted]) -> list[tuple[float, float]]:
    """Return parameters and tokens that the laws are extrapolated to."""
    largest = max(point.parameters for one in laws.values() for point in one.points)
    return [(times * largest, times * largest * TOKENS_PER_PARAMETER) for times in TIMES]


NATS: dict[str, Any] = {"unit": "nats", "si": "nats"}
SHOWN = (
    Column(key="norm", header="norm", text=True),
    Column(key="model", header="parameters", text=True),
    Column(key="tokens", header="tokens", digits=2),
    Column(key="loss", header="loss, measured", interval="loss_half_width", **NATS),
    Column(key="law", header="loss, by the law", **NATS),
    Column(key="low", header="from", **NATS),
    Column(key="high", header="to", **NATS),
    Column(key="over", header=f"over {BASELINE}, by the law", digits=3, **NATS),
    Column(key="over_low", header=f"over {BASELINE}, from", digits=3, **NATS),
    Column(key="over_high", header=f"over {BASELINE}, to", digits=3, **NATS),
    Column(key="above", header=f"draws above {BASELINE}", unit="%", si="fraction", scale=0.01, digits=3),
    Column(key="n", header="n"),
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate losses of trained and of larger models, measured and by each placement's law, with its certainty."""
    title, rows = f"Loss by size, data and norm placement{about(records)}", measured(records)
    laws = fits(rows)
    if not laws:
        return Table("layernorm_scaling_law", title, (), pd.DataFrame())
    found = []
    for norm in laws:
        for end in ends(rows, norm).values():
            mean = estimate(end.losses)
            ran = {"loss": mean.mean, "loss_half_width": mean.half_width, "n": mean.n}
            found.append(_row(norm, laws, end.parameters, end.tokens) | ran)
        found += [_row(norm, laws, *target) for target in targets(laws)]
    made = pd.DataFrame(found).astype({"loss": float, "loss_half_width": float})
    notes = (
        "Loss: nats per token of held-out text. n: seeds; ± is the half-width of their 95% t-interval. Rows without n "
        f"are extrapolations, to {TOKENS_PER_PARAMETER} tokens a parameter.",
        *(f"{norm}: {in_words(one)}" for norm, one in laws.items()),
        f"From, to: {SURE:.0%} of {len(next(iter(laws.values())).resampled.E)} fits to runs drawn anew, of every size "
        "with replacement. They say how the seeds scatter, not whether the law holds that far.",
    )
    return Table("layernorm_scaling_law", title, shown(SHOWN, made), made, notes)


def _row(norm: str, laws: dict[str, Fitted], parameters: float, tokens: float) -> dict[str, Any]:
    one = laws[norm]
    low, high = one.interval(lambda law: law.loss(parameters, tokens))
    known = {"norm": norm, "model": size_name(round(parameters)), "tokens": tokens}
    known |= {"law": one.law.loss(parameters, tokens), "low": low, "high": high}
    if norm == BASELINE or BASELINE not in laws:
        return known
    return known | difference(one, laws[BASELINE], parameters, tokens)


def in_words(one: Fitted) -> str:
    """Return the constants with their intervals, as `E 1.2 (1.1 to 1.3), ..., 0.5% off`."""
    parts = []
    for name in Law._fields:
        low, high = one.interval(lambda law, name=name: getattr(law, name))
        certain = "" if math.isnan(low) else f" ({number(low, 3)} to {number(high, 3)})"
        parts.append(f"{name} {number(getattr(one.law, name), 3)}{certain}")
    return f"{', '.join(parts)}; {len(one.points)} losses are {one.off:.2%} off"


def figure(records: Sequence[Record]) -> "Figure | None":
    """Draw loss against tokens of every model, a panel a placement, with its law; None without a law."""
    from harness.figures.style import COLOURS, panels

    laws = fits(measured(records))
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


def described(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the law is close to the losses of every placement."""
    laws = fits(rows)
    numbers = ", ".join(f"{one.off:.2%} ({norm})" for norm, one in laws.items())
    return tally([one.off <= CLOSE for one in laws.values()], "placements", numbers)


def higher_here(rows: Sequence[Row], other: str) -> Evidence | None:
    """Judge whether the other placement ends higher than the baseline at every size that was trained."""
    ours, theirs = ends(rows, BASELINE), ends(rows, other)
    over = {
        name: estimate(theirs[name].losses).mean - estimate(ours[name].losses).mean for name in ours if name in theirs
    }
    numbers = ", ".join(f"{one:+.3f} ({name})" for name, one in over.items())
    return tally([one > 0 for one in over.values()], "sizes", f"{numbers} nats")


def higher_beyond(rows: Sequence[Row], other: str) -> Evidence | None:
    """Judge whether SURE of the draws agree at every extrapolated size; None where a law does not hold."""
    laws = fits(rows)
    if any(norm not in laws or laws[norm].off > CLOSE for norm in (BASELINE, other)):
        return None
    found = [(size, difference(laws[other], laws[BASELINE], size, tokens)) for size, tokens in targets(laws)]
    found = [(size, one) for size, one in found if not math.isnan(one["above"])]
    numbers = ", ".join(
        f"{one['over']:+.2f}, {one['over_low']:+.2f} to {one['over_high']:+.2f}, in {one['above']:.0%} of the draws "
        f"({size_name(round(size))})"
        for size, one in found
    )
    return tally([one["above"] >= SURE for _, one in found], "sizes", numbers)


def as_chinchilla(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the baseline's exponents are Chinchilla's, within the interval of the draws."""
    one = fits(rows).get(BASELINE)
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
        claimed(
            text="pre-layernorm reaches a lower loss than post-layernorm at every size that was trained",
            check=partial(higher_here, other="post"),
        ),
        claimed(
            text="so it does in models 10, 100 and 1000 times as large, by 95% of the draws",
            check=partial(higher_beyond, other="post"),
        ),
        claimed(
            text="and than sandwich-layernorm at every size that was trained",
            check=partial(higher_here, other="sandwich"),
        ),
        claimed(text="every placement's losses are within 2% of its law (root mean square)", check=described),
        Claim(
            text="pre-layernorm's exponents are Chinchilla's, within the interval of the draws",
            source="Hoffmann et al. 2022, equation 10",
            check=as_chinchilla,
            published="alpha 0.34, beta 0.28",
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
    found="Pre is ahead of post by 0.02 to 0.16 nats and of sandwich by 0.05 to 0.30, at every size (three seeds). "
    "The law does not describe these runs: after 300,000 tokens the larger models' losses fall faster than any law "
    "through what came before, the smallest's slower, and a model with post may begin to fall only later, by its "
    "seed. So fits are 2.6% (pre), 4.9% (post) and 1.4% (sandwich) off, E goes to 0 for pre and may be anything from "
    "0.2 to 2.2 for post, and pre's exponents are a third of Chinchilla's. In all draws post and sandwich stay behind "
    "pre in models of 8.4M, 84M and 845M parameters at 20 tokens a parameter, post by 0.31, 0.44 and 0.56 nats with "
    "intervals from 0.09 to 1.31; those say how seeds scatter. As the law of neither pre nor post is within 2% of its "
    "losses, and the extrapolation is 340 to 35,000 times as many tokens away, nothing is claimed of larger models. "
    "Two runs at a time shared two cores, beside other work: their throughput says little.",
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
