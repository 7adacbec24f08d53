"""Does the placement of LayerNorm decide whether a few dimensions of the hidden state stand out from all others?

Kovaleva et al. 2021 (BERT Busters) find, in trained BERTs and their like, a few dimensions whose weights in the output
LayerNorms are unusually large, the same ones in most layers; without them the model loses what it does not lose
without as many others, and they are there early in its training. BERT has its norms after each block. Here models are
trained for each placement and looked at as they learn: the size of every dimension of what each layer hands on, the
weights of its norms, and what the loss is without the dimension that stands out most, or an average one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.megatron2019.layernorm_placement import NORMS, scaled
from experiments.ours.engines import claimed
from harness.analysis.render import Column, Table, number, shown
from harness.experiment.claims import Claim, Evidence, Row, measured, tally
from harness.experiment.experiment import Experiment
from harness.records.measures import about
from harness.records.record import Dimensions, Record
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

FAR = 3.0
"""Standard deviations from the mean beyond which a dimension is an outlier; assumed."""
IN_LAYERS = 0.5
"""Share of the layers in which an outlier dimension has to be one."""
WORTH = 10
"""Least ratio of the loss without the most outstanding dimension to that without an average one; assumed."""
EARLY = 0.5
"""Share of the training after which outliers have to be there."""
MEASURES = ("outliers", "ratio", "weight", "same", "lost", "lost_average")


def seen(looked: Dimensions) -> dict[str, float]:
    """Return MEASURES of one look at the dimensions; NaN for what was not looked at."""
    sizes = np.array(list(looked.layers.values()))
    deviations = (sizes - sizes.mean(axis=1, keepdims=True)) / np.maximum(sizes.std(axis=1, keepdims=True), 1e-12)
    weights = [norm["weight"] for norm in looked.norms.values()]
    (_, most) = Counter(dimension for _, dimension in weights).most_common(1)[0] if weights else (0, math.nan)
    zeroed = [nats - looked.nats for _, nats in looked.zeroed or ((0, math.nan),) * 2]
    return {
        "outliers": float(((deviations > FAR).mean(axis=0) >= IN_LAYERS).sum()),
        "ratio": float((sizes / np.median(sizes, axis=1, keepdims=True)).mean(axis=0).max()),
        "weight": float(np.mean([far for far, _ in weights])) if weights else math.nan,
        "same": most / len(weights) if weights else math.nan,
        "lost": zeroed[0],
        "lost_average": zeroed[1],
    }


def looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return every look at every run that ended well: family, placement, seed, share of its training, and MEASURES."""
    found = []
    for row in rows:
        if row["status"] != "ok" or row["diverged"] or not isinstance(row["course"], tuple):
            continue
        known = {name: row[name] for name in ("id", "family", "model", "norm_placement", "seed", "parameters")}
        for one in row["course"]:
            if looked := one.dimensions:
                when = {"tokens": one.step * row["tokens_per_step"], "share": one.step / row["step"]}
                found.append(known | when | seen(looked))
    return found


def at_the_end(rows: Sequence[Row], norm: str | None = None) -> list[dict[str, Any]]:
    """Return the last look at each run, of one placement or of all."""
    return [one for one in looks(rows) if one["share"] == 1 and norm in (None, one["norm_placement"])]


COUNT: dict[str, Any] = {"digits": 3}
SHOWN = (
    Column(key="model", header="model", text=True),
    Column(key="norm_placement", header="norm", text=True),
    Column(key="tokens", header="tokens"),
    Column(key="outliers", header="outlier dimensions", interval="outliers_half_width", **COUNT),
    Column(key="ratio", header="largest over median", interval="ratio_half_width", **COUNT),
    Column(key="weight", header="furthest norm weight", unit="sd", si="sd", interval="weight_half_width", **COUNT),
    Column(key="same", header="norms with the same", unit="%", si="fraction", scale=0.01, digits=3),
    Column(key="lost", header="loss without the largest", unit="nats", si="nats", interval="lost_half_width", digits=2),
    Column(key="lost_average", header="without an average one", unit="nats", si="nats", digits=2),
    Column(key="n", header="n"),
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate outliers of each model and placement over its training, mean over seeds."""
    title, found = f"Outlier dimensions{about(records)}", looks(measured(records))
    if not found:
        return Table("layernorm_outliers", title, (), pd.DataFrame())
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        at = one["family"] != "gpt", one["parameters"], list(PLACEMENTS).index(one["norm_placement"]), one["tokens"]
        groups.setdefault(at, []).append(one)
    made = pd.DataFrame([_combined(group) for _, group in sorted(groups.items())])
    notes = (
        f"Outlier dimensions: those of what layers hand on whose root mean square is over {FAR:g} standard deviations "
        "above that layer's mean, in half of the layers or more. Largest over median: of the dimension that stands "
        "out most, mean over layers. Furthest norm weight: of each LayerNorm's weights, in their standard deviations "
        "from their mean; norms with the same: those whose furthest weight is of the most frequent dimension.",
        "Loss without: nats per token that are lost where a dimension is zero in what all layers hand on. n: seeds; ± "
        "is the half-width of their 95% t-interval.",
    )
    return Table("layernorm_outliers", title, shown(SHOWN, made), made, notes)


def _combined(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row = {name: group[0][name] for name in ("model", "norm_placement", "tokens")} | {"n": len(group)}
    for measure in MEASURES:
        values = [one[measure] for one in group if not math.isnan(one[measure])]
        mean = estimate(values) if values else None
        width = math.nan if mean is None or mean.half_width is None else mean.half_width
        row |= {measure: mean.mean if mean else math.nan, f"{measure}_half_width": width}
    return row


def figure(records: Sequence[Record]) -> "Figure | None":
    """Draw the largest dimension over the median during training: a panel a model, a line a placement and seed."""
    from harness.figures.style import COLOURS, panels

    found = looks(measured(records))
    if not found:
        return None
    models = list(dict.fromkeys(one["model"] for one in found))
    made, axes = panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        for norm, colour in zip(PLACEMENTS, COLOURS, strict=False):
            own = [one for one in found if (one["model"], one["norm_placement"]) == (model, norm)]
            for i, run in enumerate(dict.fromkeys(one["id"] for one in own)):
                line = [(one["tokens"], one["ratio"]) for one in own if one["id"] == run]
                ax.plot(*zip(*line, strict=True), "o-", markersize=3, color=colour, label=norm if i == 0 else None)
        ax.set(title=model, xlabel="tokens", ylabel="largest dimension over median", ylim=(1, None))
        ax.legend()
    made.suptitle(f"How far one dimension stands out{about(records)}")
    return made


def has_outliers(rows: Sequence[Row], norm: str, families: Sequence[str] = ("gpt", "bert")) -> Evidence | None:
    """Judge whether every model with this placement ends with outlier dimensions."""
    found = [one for one in at_the_end(rows, norm) if one["family"] in families]
    return tally([one["outliers"] > 0 for one in found], "runs", _by_model(found, "outliers"))


def same_in_most_norms(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether post-layernorm BERTs have their furthest weight over FAR, in the same dimension of most norms."""
    found = [one for one in at_the_end(rows, "post") if one["family"] == "bert"]
    numbers = f"furthest {_by_model(found, 'weight')} sd; the same in {_by_model(found, 'same')} of the norms"
    return tally([one["weight"] > FAR and one["same"] > IN_LAYERS for one in found], "runs", numbers)


def worth_more(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether losing the most outstanding dimension raises the loss WORTH times as much as losing another."""
    found = [one for one in at_the_end(rows) if not math.isnan(one["lost"])]
    numbers = "; ".join(
        f"{norm}: {_by_model(own, 'lost')} and {_by_model(own, 'lost_average')} nats"
        for norm in PLACEMENTS
        if (own := [one for one in found if one["norm_placement"] == norm])
    )
    return tally([one["lost"] > WORTH * max(one["lost_average"], 0.0) for one in found], "runs", numbers)


def there_early(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether runs that end with outliers have some after EARLY of their training, or before."""
    ended = {one["id"] for one in at_the_end(rows) if one["outliers"] > 0}
    early = {one["id"] for one in looks(rows) if one["outliers"] > 0 and one["share"] <= EARLY}
    return tally([run in early for run in sorted(ended)], "runs that end with some")


def most_without_end_norm(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the largest dimension stands out more with pre-layernorm, whose sum is unscaled, than with post."""
    pre, post = at_the_end(rows, "pre"), at_the_end(rows, "post")
    models = [model for model in dict.fromkeys(one["model"] for one in pre) if model in {one["model"] for one in post}]
    means = [[_mean(of, model, "ratio") for of in (pre, post)] for model in models]
    numbers = ", ".join(f"{a:.2f} and {b:.2f} ({model})" for model, (a, b) in zip(models, means, strict=True))
    return tally([a > b for a, b in means], "models", f"{numbers} times the median")


def _mean(found: Sequence[Mapping[str, Any]], model: str, measure: str) -> float:
    return estimate([one[measure] for one in found if one["model"] == model]).mean


def _by_model(found: Sequence[Mapping[str, Any]], measure: str) -> str:
    """Return means over seeds by model, as `1.3 (GPT 0.3M), 2 (BERT 0.3M)`."""
    models = dict.fromkeys(one["model"] for one in found)
    return ", ".join(f"{number(_mean(found, model, measure), 3)} ({model})" for model in models)


def watched(norms: Sequence[str], families: Sequence[str], seeds: int, shape: tuple[int, int], steps: int) -> list[Run]:
    """Return runs of small models whose dimensions are looked at six times."""
    every = steps // 6
    return [
        Run(
            model=scaled(*shape, family=family, norm_placement=norm),
            train=Recipe(steps=6 * every, global_batch=8, microbatch=8, lr=2e-3, min_lr=2e-4, warmup_steps=every // 2),
            data=DataConfig(dataset="data/books-byte") if seeds > 1 else DataConfig(),
            evaluation=EvaluationConfig(every=every, sequences=128, dimensions=True),
            seed=seed,
        )
        for seed in range(seeds)
        for family in families
        for norm in norms
    ]


EXPERIMENT = Experiment(
    source="our own; Kovaleva et al. 2021 (2105.06990), abstract",
    expectation="with post-layernorm a few dimensions over three standard deviations out, the same in most layers; "
    "with pre-layernorm larger ones, as nothing scales what the layers add up to",
    claims=(
        Claim(
            text="every model with LayerNorm after its blocks ends with outlier dimensions",
            source="Kovaleva et al. 2021, abstract",
            check=partial(has_outliers, norm="post"),
        ),
        Claim(
            text="its norms' furthest weights are over three standard deviations out, in the same dimension of most",
            source="Kovaleva et al. 2021, abstract",
            check=same_in_most_norms,
        ),
        Claim(
            text="the dimension that stands out most is worth over ten times as much loss as an average one",
            source="Kovaleva et al. 2021, abstract",
            check=worth_more,
        ),
        Claim(
            text="outliers are there after half of the training",
            source="Kovaleva et al. 2021, abstract",
            check=there_early,
        ),
        claimed(text="pre-layernorm has them too, in every model", check=partial(has_outliers, norm="pre")),
        claimed(
            text="the largest dimension stands out more with pre-layernorm than with post-layernorm",
            check=most_without_end_norm,
        ),
    ),
    table=table,
    figure=figure,
    cost={
        "smoke": "1 min, 2 CPU cores",
        "small": "8 min, 2 CPU cores with `--jobs 2` (needs text, see docs/texts.md)",
        "paper": "4 days, 64 GPUs with 80 GB",
    },
    deviations="Kovaleva et al. look at the weights of trained models of 110M parameters and more; here small ones are "
    "trained, and what layers hand on is looked at as well, which pre-layernorm does not scale at a layer's end. They "
    "zero a dimension's weight and bias in every output LayerNorm, here it is zero in what the layers hand on. At "
    "`small`, six layers of 64 hidden units on bytes of books.",
    found="Not found at this scale. Two of the six models with LayerNorm after its blocks end with a dimension over "
    "three standard deviations, four of six with it before (three seeds each, of 64 dimensions), and which seeds do is "
    "chance. Where one is largest it is 1.5 times the median (GPT) to 2.1 (BERT, pre) and 3.2 (BERT, sandwich, where "
    "it shrinks from 5.8 during training). What the paper describes begins to show in one place: with post, BERT's "
    "norms have their furthest weight, 3.0 deviations out, in the same dimension in 58% of the norms, with pre in 17%. "
    "The dimension that stands out most is worth 1.3 to 11 times as much loss as an average one, but at most 0.035 "
    "nats, so that it is not what the model hangs on. Models are of 0.3M parameters and saw 614,400 bytes; the paper's "
    "are of 110M and saw billions of tokens. Two runs at a time shared two cores, beside other work: their throughput "
    "says little.",
    runs={
        "smoke": watched(("pre", "post"), ("gpt", "bert"), 1, (2, 64), 120),
        "small": watched(NORMS, ("gpt", "bert"), 3, (6, 64), 600),
        "paper": [
            Run(
                model=ModelConfig(
                    family="bert", num_layers=12, hidden_size=768, num_heads=12, seq_len=512, vocab_size=30592,
                    norm_placement=norm, dropout=0.1,
                ),
                plan=Plan(dp=8),
                train=Recipe(steps=100_000, global_batch=256, lr=1e-4, warmup_steps=10_000, decay="linear"),
                data=DataConfig(dataset="data/wikipedia-bert"),
                evaluation=EvaluationConfig(every=2000, sequences=1024, dimensions=True),
                precision="bf16",
                seed=seed,
            )
            for seed in range(3)
            for norm in NORMS
        ],
    },
)  # fmt: skip
