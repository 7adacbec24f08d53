"""The last evaluation of each run and text, as rows: perplexity, accuracy and the entropy floor."""

import json
import math
from collections.abc import Sequence

import pandas as pd

from harness.records.frames import once_for_all
from harness.records.parts import Evaluation
from harness.records.record import Record


@once_for_all
def evaluations(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per run and text: the last evaluation of each, with its comparability key as canonical JSON.

    Perplexities are exp(nats per token or word). `floor` and its standard error are given only for the synthetic
    language's own validation sample under left-to-right prediction, where no model can be expected below it.
    """
    rows = []
    for record in records:
        for last in record.last_evaluations:
            shown = {name: getattr(last, name) for name in OF_AN_EVALUATION}
            key = json.dumps(last.key or {}, sort_keys=True)
            shown |= {"id": record.id, "key": key, "questions": last.total}
            rows.append(shown | floor_of(record, last))
    return pd.DataFrame(rows, columns=COLUMNS)


SCORES = ("token_perplexity", "word_perplexity", "bits_per_byte", "accuracy")
OF_AN_EVALUATION = ("name", "kind", "step", *SCORES)
"""Columns that are properties of an evaluation."""
FLOOR = ("floor", "floor_standard_error", "language_floor", "above_floor")
COLUMNS = ["id", *OF_AN_EVALUATION, "key", "questions", *FLOOR]


def floor_of(record: Record, last: Evaluation) -> dict[str, float]:
    """Return FLOOR of an evaluation; the error is that of as many tokens as it scores, mostly a part of the text."""
    data = record.resolved.data
    if not data or not data.entropy or (last.name, last.kind) != ("valid", "causal"):
        return dict.fromkeys(FLOOR, math.nan)
    floor, sample, scored = math.exp(data.entropy.floor), data.entropy.valid, last.tokens or math.nan
    error = (sample and sample.standard_error) or math.nan
    return {
        "floor": floor,
        "floor_standard_error": floor * error * ((data.valid_tokens or scored) / scored) ** 0.5,
        "language_floor": math.exp(data.entropy.nats_per_token),
        "above_floor": last.token_perplexity / floor - 1,
    }
