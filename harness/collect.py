"""The record of a run, put together from what its ranks wrote."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.store import SCHEMA, Record, loads, read_json


def record_of(attempt: Path) -> Record:
    """The record of an attempt that has ended: per-step values of every rank, or why it failed."""
    spec = json.loads((attempt / "spec.json").read_text())
    ranks = range(spec["ranks"])
    results = [read_json(attempt / f"rank-{r}.json") for r in ranks]
    status, reason = _status(attempt, results)
    whole = [r for r in results if r is not None]
    first = whole[0] if whole else {}
    ended = datetime.now(UTC)
    seconds = {f"{k}_seconds": max(r["seconds"][k] for r in whole) for k in first.get("seconds", {})}
    return {
        **base_record(spec),
        "status": status,
        "reason": reason,
        "engine": first.get("engine", {"name": spec["run"].get("engine", "native")}),
        "resolved": {**first.get("resolved", {}), "data": spec["data_summary"]},
        "environment": {**spec["environment"], **first.get("device", {})},
        "times": {
            "started": datetime.fromtimestamp(spec["submitted"], UTC).isoformat(timespec="seconds"),
            "ended": ended.isoformat(timespec="seconds"),
            **seconds,
            **({"resumed_at": first["resumed"]} if first.get("resumed") else {}),
            "total_seconds": ended.timestamp() - spec["submitted"],
        },
        "ranks": [r["rank"] for r in whole],
        "steps": _steps(attempt, spec["ranks"]),
        "evaluations": first.get("evaluations", []),
        "log": [] if status in ("ok", "nan") else _log(attempt, ranks),
    }


def base_record(spec: dict[str, Any]) -> Record:
    """What every record has, whatever came of the run."""
    run_id, experiment, tier = spec["id"], spec["experiment"], spec["tier"]
    return {
        "schema": SCHEMA,
        "id": run_id,
        "experiment": experiment,
        "tier": tier,
        "source": "measured",
        "config": spec["run"],
    }


def _status(attempt: Path, results: list[dict[str, Any] | None]) -> tuple[str, str | None]:
    """Failures come before results: one rank that failed is a run that failed, whatever the others wrote."""
    failure = first_failure(attempt)
    if failure is not None:
        return failure["status"], failure["reason"]
    missing = [rank for rank, result in enumerate(results) if result is None]
    if missing:
        return "failed", f"rank {missing[0]} vanished without an exit status: it, or what watched it, was killed"
    assert results[0] is not None
    return results[0]["status"], results[0]["reason"]


def first_failure(attempt: Path) -> dict[str, Any] | None:
    """The failure that caused the others: a rank that was killed, else the earliest.

    A rank that dies breaks its neighbours' collectives, and a neighbour may write that down first.
    """
    failures = [f for f in map(read_json, sorted(attempt.glob("rank-*.failure.json"))) if f is not None]
    return min(failures, key=lambda f: ("was killed by" not in f["reason"], f["time"]), default=None)


def steps_so_far(attempt: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The whole lines of a rank's step log; a loss that is not finite is None."""
    try:
        lines = (attempt / f"rank-{rank}.steps.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [loads(line) for line in lines if line.endswith("\n")]


def _steps(attempt: Path, ranks: int) -> list[dict[str, Any]]:
    """Steps that every rank finished; loss and norm are equal on all, seconds are each rank's."""
    logs = [steps_so_far(attempt, rank) for rank in range(ranks)]
    return [{**lines[0], "seconds": [line["seconds"] for line in lines]} for lines in zip(*logs, strict=False)]


def _log(attempt: Path, ranks: range) -> list[str]:
    """The last lines of the rank that failed first, else of the ranks that left no result."""
    failure = first_failure(attempt)
    if failure is not None:
        return failure["log"]
    logs = [attempt / f"rank-{r}.log" for r in ranks if not (attempt / f"rank-{r}.json").exists()]
    return [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-5:]]
