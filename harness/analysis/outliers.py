"""Outlier dimensions of the hidden state: what the looks at a run's dimensions show during its training."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.analysis.render import Column, Table, shown, texts
from harness.records.measures import about, combine, in_order, model_names, shape
from harness.records.parts import Dimensions
from harness.records.record import Record
from impl.model.norm_placement import order_of

FAR = 3.0
"""Standard deviations from the mean beyond which a dimension is an outlier; assumed."""
IN_LAYERS = 0.5
"""Share of the layers in which an outlier dimension has to be one."""
MEASURES = ("outliers", "ratio", "weight", "same", "lost", "lost_average")
"""Fields of a look that are measured; NaN where they were not looked at."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Dimensions of a run's hidden state at one step of its training."""

    record: Record
    model: str
    """Name of the model, as tables have it."""
    tokens: int
    """Tokens that the run had trained on at that step."""
    share: float
    """Share of the training that was done."""
    outliers: float
    """Dimensions over FAR deviations above the mean in IN_LAYERS of the layers."""
    ratio: float
    """Size of the largest dimension over that of the median one, mean over layers."""
    weight: float
    """Distance of a norm's furthest weight from the mean of its weights, in standard deviations; mean over norms."""
    same: float
    """Share of the norms whose furthest weight is of the most frequent dimension."""
    lost: float
    """Nats per token that are lost without the dimension that stands out most."""
    lost_average: float
    """Nats per token that are lost without an average dimension."""

    @property
    def norm(self) -> str:
        """Norm placement of the model."""
        return self.record.run.model.norm_placement


def measured(looked: Dimensions) -> dict[str, float]:
    """Return MEASURES of one look at the dimensions."""
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


def looks(records: Sequence[Record]) -> list[Look]:
    """Return every look at every run that ended well, in order of the steps."""
    names = model_names(records)
    found = []
    for record in in_order(records):
        run, counts = record.run, record.status == "ok" and not record.has_diverged
        for course in record.courses.values() if counts else ():
            for one in course:
                if one.dimensions:
                    tokens, share, model = one.step * run.tokens_per_step, one.step / course[-1].step, names[shape(run)]
                    sizes = measured(one.dimensions)
                    found.append(Look(record=record, model=model, tokens=tokens, share=share, **sizes))
    return found


SHOWN = (
    *texts(model="model", norm_placement="norm"),
    Column(key="tokens", header="tokens"),
    Column(key="outliers", header="outlier dimensions", interval="outliers_half_width", digits=3),
    Column(key="ratio", header="largest over median", interval="ratio_half_width", digits=3),
    Column(key="weight", header="furthest norm weight", unit="sd", si="sd", interval="weight_half_width", digits=3),
    Column(key="same", header="norms with the same", unit="%", si="fraction", scale=0.01, digits=3),
    Column(key="lost", header="loss without the largest", unit="nats", si="nats", interval="lost_half_width", digits=2),
    Column(key="lost_average", header="without an average one", unit="nats", si="nats", digits=2),
    Column(key="n", header="n"),
)
NOTES = (
    f"Outlier dimensions: those of what layers hand on whose root mean square is over {FAR:g} standard deviations "
    "above that layer's mean, in half of the layers or more. Largest over median: of the dimension that stands "
    "out most, mean over layers. Furthest norm weight: of each LayerNorm's weights, in their standard deviations "
    "from their mean; norms with the same: those whose furthest weight is of the most frequent dimension.",
    "Loss without: nats per token that are lost where a dimension is zero in what all layers hand on. n: seeds; ± "
    "is the half-width of their 95% t-interval.",
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate outliers of each model and placement over its training, mean over seeds."""
    place = lambda one: (one.record.run.model.family != "gpt", one.record.parameters, order_of(one.norm), one.tokens)
    found = sorted(looks(records), key=place)
    rows = pd.DataFrame([vars(one) | {"norm_placement": one.norm, "place": place(one)} for one in found])
    made = pd.DataFrame(combine(rows, ["place"], MEASURES))
    columns = shown(SHOWN, made)
    return Table("layernorm_outliers", f"Outlier dimensions{about(records)}", columns, made, NOTES if columns else ())
