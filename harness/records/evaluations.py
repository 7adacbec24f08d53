"""The last evaluation of each run and text, as rows: perplexity, accuracy and the entropy floor."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.records.frames import once_for_all
from harness.records.record import Evaluation, Record, float_or_nan


@once_for_all
def evaluations(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per run and text: the last evaluation of each, with its comparability key as canonical JSON.

    `course` holds all evaluations of that text in a run, in order of their steps. Perplexities are exp(nats per token
    or word). `floor` and its standard error are given only for the synthetic language's own validation sample under
    left-to-right prediction, where no model can be expected below it.
    """
    rows = []
    for record in records:
        courses: dict[tuple[str, str], list[Evaluation]] = {}
        for evaluation in sorted(record.evaluations, key=lambda evaluation: evaluation.step):
            courses.setdefault((evaluation.name, evaluation.kind), []).append(evaluation)
        for course in courses.values():
            said = _evaluation(course[-1])
            rows.append({"id": record.id, "course": tuple(course)} | said | _floor(record, said))
    return pd.DataFrame(rows, columns=EVALUATION_COLUMNS)


EVALUATION_COLUMNS = [
    "id", "name", "kind", "step", "key", "token_perplexity", "word_perplexity", "bits_per_byte", "accuracy",
    "questions", "floor", "floor_standard_error", "language_floor", "above_floor", "course",
]  # fmt: skip


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    correct, total = evaluation.correct, evaluation.total
    return {
        **{name: getattr(evaluation, name) for name in ("name", "kind", "step")},
        "key": json.dumps(evaluation.key or {}, sort_keys=True),
        "token_perplexity": float(np.exp(evaluation.per("tokens"))),
        "word_perplexity": float(np.exp(evaluation.per("words"))),
        "bits_per_byte": evaluation.per("bytes") / math.log(2),
        "accuracy": correct / total if correct is not None and total else math.nan,
        "questions": total,
    }


def _floor(record: Record, said: dict[str, Any]) -> dict[str, float]:
    entropy = record.resolved.data.entropy if record.resolved.data else None
    if not entropy or (said["name"], said["kind"]) != ("valid", "causal"):
        return dict.fromkeys(("floor", "floor_standard_error", "language_floor", "above_floor"), math.nan)
    floor, error = math.exp(entropy.floor), entropy.valid.standard_error if entropy.valid else None
    return {
        "floor": floor,
        "floor_standard_error": floor * float_or_nan(error),
        "language_floor": math.exp(entropy.nats_per_token),
        "above_floor": said["token_perplexity"] / floor - 1,
    }
