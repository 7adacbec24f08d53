"""The record of a run, put together from what its ranks wrote."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import jobs
from harness.heartbeat import Alive, alive
from harness.outcome import Facts, Failure, Outcome, decide
from harness.store import SCHEMA, Record, loads, read_json

PARTS = {"status": str, "seconds": dict, "evaluations": list, "rank": dict}
"""What a rank's result has in any case."""


def record_of(attempt: Path, state: jobs.JobState | None = None) -> Record:
    """The record of an attempt that has ended: per-step values of every rank, or why it failed.

    Args:
        state: how the scheduler says its job ended.
    """
    spec = json.loads((attempt / "spec.json").read_text())
    ranks = range(spec["ranks"])
    results = {rank: found for rank in ranks if (found := result_of(attempt, rank)) is not None}
    outcome = decide(_facts(attempt, results, ranks, state))
    whole = list(results.values())
    first = whole[0] if whole else {}
    ended = datetime.fromtimestamp(max(_end(attempt, ranks), spec["submitted"]), UTC)  # by other hosts' clocks
    seconds = {f"{k}_seconds": max(r["seconds"].get(k, 0.0) for r in whole) for k in first.get("seconds", {})}
    return {
        **base_record(spec),
        "status": outcome.status,
        "reason": outcome.reason,
        "cause": outcome.cause,
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
        "log": [] if outcome.status in ("ok", "nan") else _log(attempt, ranks, outcome),
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


def result_of(attempt: Path, rank: int) -> dict[str, Any] | None:
    """What a rank that came to its end wrote; None: nothing, or no whole result."""
    found = read_json(attempt / f"rank-{rank}.json")
    is_whole = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in PARTS.items())
    return found if is_whole else None


def has_results(attempt: Path) -> bool:
    """Whether every rank has left its result."""
    spec = read_json(attempt / "spec.json")
    ranks = spec.get("ranks", 0) if isinstance(spec, dict) else 0
    return ranks > 0 and all(result_of(attempt, rank) is not None for rank in range(ranks))


def _last_start(attempt: Path, ranks: range) -> tuple[dict[int, Alive], list[Failure]]:
    """Signs of life and failures of the last start; what an earlier one of a requeued job left counts no more."""
    lives = {rank: found for rank in ranks if (found := alive(attempt, rank)) is not None}
    read = (Failure.read(read_json(attempt / f"rank-{rank}.failure.json")) for rank in ranks)
    failures = [failure for failure in read if failure is not None]
    last = max([*(life.restart for life in lives.values()), *(f.restart for f in failures)], default=0)
    return {r: life for r, life in lives.items() if life.restart == last}, [f for f in failures if f.restart == last]


def _end(attempt: Path, ranks: range) -> float:
    """When the last word was said of any rank, which may be long before somebody reads it; now, if none was."""
    lives, failures = _last_start(attempt, ranks)
    return max([*(life.time for life in lives.values()), *(failure.time for failure in failures)], default=time.time())


def _facts(attempt: Path, results: dict[int, dict[str, Any]], ranks: range, state: jobs.JobState | None) -> Facts:
    lives, failures = _last_start(attempt, ranks)
    return Facts(
        ranks=len(ranks),
        results={rank: (result["status"], result.get("reason")) for rank, result in results.items()},
        failures=failures,
        stopped=[rank for rank, life in lives.items() if life.ended],
        has_begun=any(any(attempt.glob(f"rank-*.{end}")) for end in ("log", "json", "jsonl")),
        scheduler=(state.scheduler if state is not None else None) or "",
        said=jobs.said(attempt) if len(results) < len(ranks) else (),
        is_cancelled=(attempt / jobs.STOP).exists(),
    )


def steps_so_far(attempt: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The whole lines of a rank's step log; a loss that is not finite is None."""
    try:
        lines = (attempt / f"rank-{rank}.steps.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            found.append(loads(line))
        except ValueError:  # torn, since the writer or the disk came to its end
            break
    return found if not lines or lines[-1].endswith("\n") else found[: len(lines) - 1]


def _steps(attempt: Path, ranks: int) -> list[dict[str, Any]]:
    """Steps that every rank finished; loss and norm are equal on all, seconds are each rank's."""
    logs = [steps_so_far(attempt, rank) for rank in range(ranks)]
    return [{**lines[0], "seconds": [line["seconds"] for line in lines]} for lines in zip(*logs, strict=False)]


def _log(attempt: Path, ranks: range, outcome: Outcome) -> list[str]:
    """The last lines of the rank that failed first, else of the scheduler and the ranks that left no result."""
    if outcome.failure is not None:
        return list(outcome.failure.log)
    logs = [attempt / f"rank-{r}.log" for r in ranks if not (attempt / f"rank-{r}.json").exists()]
    last = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-5:]]
    return [*jobs.said(attempt), *last]
