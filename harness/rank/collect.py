"""The record of a run, put together from what its ranks wrote."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.rank import jobs
from harness.rank.failure import Facts, Failure, Outcome, decide
from harness.rank.heartbeat import Alive, alive
from harness.rank.orders import ORDERS, Orders, TrainingOrders, UnreadableError
from harness.records.store import SCHEMA, Document, loads, read_json

PARTS = {"status": str, "seconds": dict, "evaluations": list, "rank": dict}
"""What a rank's result has in any case."""
MAY_HAVE = {"device": dict, "resolved": dict, "engine": dict, "resumed": list}
LATEST = 1e11
"""No clock is right that is later: seconds of the year 5138."""


def document_of(attempt: Path, state: jobs.JobState | None = None, run_id: str | None = None) -> Document:
    """The record of an attempt that has ended: per-step values of every rank, or why it failed.

    Args:
        state: how the scheduler says its job ended.
        run_id: of the run that it has to be a try at; None: of any.

    Raises:
        UnreadableError: what is there makes no record.
    """
    from harness.records.parse import of_document  # what watches over ranks imports this module, and starts faster

    orders = TrainingOrders.read(attempt)
    if run_id not in (None, orders.id):
        raise UnreadableError(f"{attempt / ORDERS} is about another run: {orders.id}")
    ranks = range(orders.ranks)
    results = {rank: found for rank in ranks if (found := result_of(attempt, rank)) is not None}
    for path in (attempt / f"rank-{rank}.json" for rank in ranks if rank not in results):
        if path.exists():
            raise UnreadableError(f"{path} is no whole result of a rank")
    outcome = decide(_facts(attempt, results, ranks, state))
    whole = list(results.values())
    first = whole[0] if whole else {}
    latest = min(max(_end(attempt, ranks), orders.submitted, 0), LATEST)  # by other hosts' clocks
    begun, ended = (datetime.fromtimestamp(time, UTC) for time in (min(max(orders.submitted, 0), LATEST), latest))
    seconds = {f"{k}_seconds": max(r["seconds"].get(k, 0.0) for r in whole) for k in first.get("seconds", {})}
    record = {
        **base_record(orders.id, orders.experiment, orders.tier, orders.config),
        "attempt": attempt.name,
        "tries": orders.tries,
        "status": outcome.status,
        "reason": outcome.reason,
        "cause": outcome.cause,
        "engine": first.get("engine", {"name": orders.engine}),
        "resolved": {**first.get("resolved", {}), "data": orders.data_summary},
        "environment": {**orders.environment, **first.get("device", {})},
        "times": {
            "started": begun.isoformat(timespec="seconds"),
            "ended": ended.isoformat(timespec="seconds"),
            **seconds,
            **({"resumed_at": first["resumed"]} if first.get("resumed") else {}),
            "total_seconds": latest - orders.submitted,
        },
        "ranks": [r["rank"] for r in whole],
        "steps": _steps(attempt, orders.ranks),
        "evaluations": first.get("evaluations", []),
        "log": [] if outcome.status in ("ok", "nan") else _log(attempt, ranks, outcome),
    }
    try:
        of_document(record)
    except ValueError as error:
        raise UnreadableError(f"{attempt}: {error}") from None
    logged, trained = len(record["steps"]), orders.run.train.steps
    if outcome.status == "ok" and logged != trained:
        raise UnreadableError(f"{attempt}: the step logs of its ranks have {logged} of {trained} steps")
    return record


def base_record(run_id: str, experiment: str, tier: str, config: dict[str, Any]) -> Document:
    """What every record has, whatever came of the run."""
    return {
        "schema": SCHEMA,
        "id": run_id,
        "experiment": experiment,
        "tier": tier,
        "source": "measured",
        "config": config,
    }


def result_of(attempt: Path, rank: int) -> dict[str, Any] | None:
    """What a rank that came to its end wrote; None: nothing, or no whole result."""
    found = read_json(attempt / f"rank-{rank}.json")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in PARTS.items()):
        return None
    is_whole = all(isinstance(found.get(name, kind()), kind) for name, kind in MAY_HAVE.items())
    return found if is_whole and all(map(_is_number, found["seconds"].values())) else None


def has_results(attempt: Path) -> bool:
    """Whether every rank has left its result."""
    orders = Orders.found(attempt)
    ranks = range(orders.ranks) if orders is not None else ()
    return len(ranks) > 0 and all(result_of(attempt, rank) is not None for rank in ranks)


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
    """The whole lines of a rank's step log, without a torn last one; a loss that is not finite is None.

    Raises:
        UnreadableError: a line is not the step that follows the one before it.
    """
    path = attempt / f"rank-{rank}.steps.jsonl"
    try:
        lines = path.read_bytes().decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError:
        return []
    found = [step_of(line) for line in lines]
    for i, step in enumerate(found):
        if step is None or step["step"] != i:
            raise UnreadableError(f"{path}: line {i + 1} is not step {i}")
    return [step for step in found if step is not None]


def step_of(line: str) -> dict[str, Any] | None:
    """The step that a line of a log holds; None: it holds none."""
    try:
        step = loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(step, dict) or not {"step", "loss", "seconds"} <= step.keys():
        return None
    measured = (step[name] for name in ("loss", "grad_norm", "lr") if step.get(name) is not None)  # None: not finite
    return step if all(map(_is_number, (step["step"], step["seconds"], *measured))) else None


def _is_number(found: Any) -> bool:
    return type(found) in (int, float)


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
