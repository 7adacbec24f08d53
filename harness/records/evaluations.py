"""The last evaluation of each run and text, as rows: perplexity, accuracy and the entropy floor."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.records.cache import once_for_all
from harness.records.measures import Record, float_or_nan


@once_for_all
def evaluations(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run and text: the last evaluation of each, with its comparability key as canonical JSON.

    `course` has all evaluations of that text in a run, as recorded, the first one first. Perplexities are exp(nats per
    token or word). `floor` and its standard error only for the synthetic language's own validation sample under
    left-to-right prediction, where no model can be expected below it.
    """
    rows = []
    for record in records:
        courses: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for evaluation in sorted(record.get("evaluations") or (), key=lambda evaluation: evaluation["step"]):
            courses.setdefault((evaluation["name"], evaluation["kind"]), []).append(evaluation)
        for course in courses.values():
            said = _evaluation(course[-1])
            rows.append({"id": record["id"], "course": tuple(course)} | said | _floor(record, said))
    return pd.DataFrame(rows, columns=EVALUATION_COLUMNS)


EVALUATION_COLUMNS = [
    "id", "name", "kind", "step", "key", "token_perplexity", "word_perplexity", "bits_per_byte", "accuracy",
    "questions", "floor", "floor_standard_error", "language_floor", "above_floor", "course",
]  # fmt: skip


def _evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    nats = float_or_nan(evaluation.get("nats"))

    def per(unit: str) -> float:
        return nats / evaluation[unit] if evaluation.get(unit) else math.nan

    total = evaluation.get("total")
    return {
        **{name: evaluation[name] for name in ("name", "kind", "step")},
        "key": json.dumps(evaluation.get("key") or {}, sort_keys=True),
        "token_perplexity": float(np.exp(per("tokens"))),
        "word_perplexity": float(np.exp(per("words"))),
        "bits_per_byte": per("bytes") / math.log(2),
        "accuracy": evaluation["correct"] / total if total else math.nan,
        "questions": total,
    }


def _floor(record: Record, said: Mapping[str, Any]) -> dict[str, float]:
    entropy = ((record.get("resolved") or {}).get("data") or {}).get("entropy")
    if not entropy or (said["name"], said["kind"]) != ("valid", "causal"):
        return dict.fromkeys(("floor", "floor_standard_error", "language_floor", "above_floor"), math.nan)
    sample = entropy.get("valid") or {}
    language = math.exp(entropy["nats_per_token"])
    floor = math.exp(sample.get("nats_per_token", entropy["nats_per_token"]))
    return {
        "floor": floor,
        "floor_standard_error": floor * float_or_nan(sample.get("standard_error")),
        "language_floor": language,
        "above_floor": said["token_perplexity"] / floor - 1,
    }
