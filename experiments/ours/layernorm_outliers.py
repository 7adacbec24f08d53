"""Does the placement of LayerNorm decide whether a few dimensions of the hidden state stand out from all others?

Kovaleva et al. 2021 (BERT Busters) find, in trained BERTs and their like, a few dimensions whose weights in the output
LayerNorms are unusually large, the same ones in most layers; without them the model loses what it does not lose
without as many others, and they are there early in its training. BERT has its norms after each block. Here models are
trained for each placement and looked at as they learn: the size of every dimension of what each layer hands on, the
weights of its norms, and what the loss is without the dimension that stands out most, or an average one.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.megatron2019 import scaled
from experiments.megatron2019.layernorm_placement import NORMS
from experiments.ours import claim
from harness.analysis.outliers import FAR, IN_LAYERS, Look, looks, table
from harness.experiment.kit import (
    Check, Claim, DataConfig, EvaluationConfig, Evidence, Experiment, ModelConfig, Plan, Recipe, Record, Run,
    Tolerance, about, less, means, number, tally,
)  # fmt: skip
from impl.model.norm_placement import PLACEMENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORTH = Tolerance(10, "assumed", "2026-11-22")
"""Least ratio of the loss without the most outstanding dimension to that without an average one."""
EARLY = Tolerance(0.5, "assumed", "2026-11-22")
"""Share of the training after which outliers have to be there."""


def figure(records: Sequence[Record]) -> "Figure | None":
    """Draw the largest dimension over the median during training: a panel a model, a line a placement and seed."""
    from harness.figures.style import COLOURS, panels

    found = looks(records)
    if not found:
        return None
    models = list(dict.fromkeys(one.model for one in found))
    made, axes = panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        for norm, colour in zip(PLACEMENTS, COLOURS, strict=False):
            own = [one for one in found if (one.model, one.norm) == (model, norm)]
            for i, run in enumerate(dict.fromkeys(one.record.id for one in own)):
                line = [(one.tokens, one.ratio) for one in own if one.record.id == run]
                ax.plot(*zip(*line, strict=True), "o-", markersize=3, color=colour, label=norm if i == 0 else None)
        ax.set(title=model, xlabel="tokens", ylabel="largest dimension over median", ylim=(1, None))
        ax.legend()
    made.suptitle(f"How far one dimension stands out{about(records)}")
    return made


def at_the_end(records: Sequence[Record], norm: str) -> list[Look]:
    """Return the last look at each run of one placement."""
    return [one for one in looks(records) if one.share == 1 and one.norm == norm]


def by_model(found: Iterable[Look], measure: str) -> str:
    """Return means over seeds by model, as `1.3 (GPT 0.3M), 2 (BERT 0.3M)`."""
    values = means((one.model, getattr(one, measure)) for one in found)
    return ", ".join(f"{number(value.mean, 3)} ({model})" for model, value in values.items())


def has_outliers(norm: str) -> Check:
    """Return a check that every model with this placement ends with outlier dimensions."""

    def check(records: Sequence[Record]) -> Evidence | None:
        found = at_the_end(records, norm)
        return tally([one.outliers > 0 for one in found], "runs", by_model(found, "outliers"))

    return check


def same_in_most_norms(records: Sequence[Record]) -> Evidence | None:
    """Judge whether post-layernorm BERTs have their furthest weight over FAR, in the same dimension of most norms."""
    found = [one for one in at_the_end(records, "post") if one.record.run.model.family == "bert"]
    numbers = f"furthest {by_model(found, 'weight')} sd; the same in {by_model(found, 'same')} of the norms"
    return tally([one.weight > FAR and one.same > IN_LAYERS for one in found], "runs", numbers)


def worth_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether losing the most outstanding dimension raises the loss WORTH times as much as losing another."""
    found = {norm: [one for one in at_the_end(records, norm) if not math.isnan(one.lost)] for norm in PLACEMENTS}
    numbers = (
        f"{norm}: {by_model(own, 'lost')} and {by_model(own, 'lost_average')} nats"
        for norm, own in found.items()
        if own
    )
    held = [one.lost > WORTH * max(one.lost_average, 0.0) for own in found.values() for one in own]
    return tally(held, "runs", "; ".join(numbers))


def there_early(records: Sequence[Record]) -> Evidence | None:
    """Judge whether runs that end with outliers have some after EARLY of their training, or before."""
    found = [one for one in looks(records) if one.outliers > 0]
    early = {one.record.id for one in found if one.share <= EARLY}
    return tally([one.record.id in early for one in found if one.share == 1], "runs that end with some")


def most_without_end_norm(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest dimension stands out more with pre-layernorm, whose sum is unscaled, than with post."""
    pre, post = (means((one.model, one.ratio) for one in at_the_end(records, norm)) for norm in ("pre", "post"))
    both = [(pre[model], post[model], model) for model in pre if model in post]
    numbers = ", ".join(f"{a:.2f} and {b:.2f} ({model})" for a, b, model in both)
    return tally([less(b, a) for a, b, _ in both], "models", f"{numbers} times the median")


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
            "every model with LayerNorm after its blocks ends with outlier dimensions",
            "Kovaleva et al. 2021, abstract", has_outliers("post"), kind="direction",
        ),
        Claim(
            "its norms' furthest weights are over three standard deviations out, in the same dimension of most",
            "Kovaleva et al. 2021, abstract", same_in_most_norms, kind="direction",
        ),
        Claim(
            "the dimension that stands out most is worth over ten times as much loss as an average one",
            "Kovaleva et al. 2021, abstract", worth_more, kind="direction",
            tolerance=WORTH,
        ),
        Claim(
            "outliers are there after half of the training",
            "Kovaleva et al. 2021, abstract", there_early, kind="direction", tolerance=EARLY,
        ),
        claim("pre-layernorm has them too, in every model", has_outliers("pre")),
        claim(
            "the largest dimension stands out more with pre-layernorm than with post-layernorm",
            most_without_end_norm,
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
