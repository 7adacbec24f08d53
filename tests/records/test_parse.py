"""Which documents are records, and what is said of those that are not."""

import sys
from typing import Any

import pytest

from harness.records.parse import of_document
from harness.records.store import Document
from impl.run import Run, from_dict
from tests.harness.made_up_records import document, record, with_pipeline


def why_no_record(document: Document) -> str | None:
    try:
        of_document(document)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("status", ["ok", "nan", "invalid", "oom", "failed", "timeout"])
def test_a_record_of_any_end_is_whole(status: str) -> None:
    assert record(status=status).status == status
    assert with_pipeline(record(status="ok", plan__pp=2, train__microbatch=4)).ranks[1].timeline


def test_what_our_own_ranks_may_write_is_no_damage() -> None:
    """A record that is not whole is run again, so none that a run ends with may be taken for that."""
    undividable: dict[str, Any] = {"train__global_batch": 6, "plan__dp": 4}  # it was `invalid`
    full = document(record(train__steps=3, train__lr=1e30, **undividable))
    full["steps"][0] |= {"loss": sys.float_info.max, "grad_norm": -0.0, "lr": 1e30}
    full["steps"][1] |= {"loss": 3e38, "grad_norm": None}
    full["steps"][2] |= {"loss": None, "skipped": True, "lr": 5}
    full["evaluations"][0] |= {"nats": 1e300, "words": 0, "bytes": None}
    full["times"] = {"total_seconds": -3.5, "training_seconds": 0.0, "resumed_at": [4]}
    full |= {"cause": "", "tries": [{"status": "failed", "cause": "killed", "reason": "x", "ended": "now"}], "log": []}
    assert of_document(full).steps[2].skipped
    assert not of_document({**full, "steps": [], "ranks": [], "evaluations": [], "resolved": {"data": None}}).losses


def test_a_newer_field_is_no_damage_and_a_missing_option_is_at_its_default() -> None:
    full = document(record())
    full["novelty"] = full["ranks"][0]["novelty"] = {"a": 1}
    del full["config"]["plan"]["zero_stage"]
    assert of_document(full).run == Run()
    full["config"]["model"]["num_layers"] = 4
    full["id"] = from_dict(full["config"]).id
    del full["config"]["model"]["num_layers"]
    assert why_no_record(full) == f"config: it is that of the run {Run().id}, not of {full['id']!r}"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("status",), "done", "status"),
        (("config", "model", "num_layers"), "2", "config.model.num_layers"),
        (("config", "model", "nonsense"), 1, "config.model.nonsense"),
        (("steps", 1, "loss"), "x", "steps.1.loss"),
        (("steps", 0, "seconds"), [0.1, 0.1], "2 ranks, there are 1"),
        (("steps", 0, "seconds"), [0.0], "steps.0.seconds"),
        (("steps", 0, "seconds"), [], "steps.0.seconds"),
        (("ranks",), {}, "ranks"),
        (("ranks", 0, "memory"), {"parameters": 1}, "memory"),
        (("ranks", 0, "timeline"), [["0F0", 1.0, 0.5]], "timeline"),
        (("ranks", 0, "timeline"), [["F0", 0.0, 0.5]], "not an action"),
        (("ranks", 0, "timeline"), [["0F0", 0.0, 0.5]], "not all actions"),
        (("evaluations", 0, "kind"), "guess", "evaluations.0.kind"),
        (("evaluations", 0, "total"), 5, "right ones"),
        (("resolved", "data", "entropy", "nats_per_token"), 1e9, "nats_per_token"),
        (("times",), 5, "times"),
        (("log",), [1], "log"),
        (("reason",), float("nan"), "reason"),
        (("reason",), "\ud800", "not a whole JSON"),
        (("notes",), [10**5000], "digits"),
    ],
)
def test_what_is_wrong_is_named_in_a_line(path: tuple[Any, ...], value: Any, told: str) -> None:
    at: Any = (full := document(record(train__steps=4)))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    why = why_no_record(full)
    assert why is not None
    assert told in why
    assert len(why.splitlines()) == 1


def test_nothing_that_a_record_names_is_loaded() -> None:
    full = document(with_pipeline(record(plan__pp=2, train__microbatch=4)))
    full["config"]["plan"]["schedule"] = "antigravity_of_mine:rows"
    full["id"] = from_dict(full["config"]).id
    assert not of_document(full).has_trusted_code
    assert "antigravity_of_mine" not in sys.modules
