"""The record of a run, assembled from the files that its ranks left."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.rank.failure import Facts, Failure, Outcome, decide
from harness.rank.heartbeat import Alive, read_alive
from harness.rank.job import STOP
from harness.rank.orders import ORDERS, TrainingOrders, UnreadableError
from harness.rank.results import Result, result_of, steps_so_far
from harness.records.parse import of_document
from harness.records.store import SCHEMA, Document

LATEST = 1e11
"""Latest time that can be right, in seconds since 1970: the year 5138."""


def document_of(
    attempt: Path, run_id: str | None = None, *, scheduler: str = "", slurm_log: Sequence[str] = ()
) -> Document:
    """Return the record of an attempt that has ended: values of every rank at every step, or why it failed.

    Args:
        run_id: run of which it has to be an attempt; None for any.
        scheduler: state of its job in Slurm's words.
        slurm_log: Slurm's last lines in its job's log.

    Raises:
        UnreadableError: no record can be made of its files.
    """
    orders = TrainingOrders.read(attempt)
    if run_id not in (None, orders.id):
        raise UnreadableError(f"{attempt / ORDERS} is about another run: {orders.id}")
    ranks = range(orders.ranks)
    results = {rank: found for rank in ranks if (found := result_of(attempt, rank)) is not None}
    for path in (attempt / f"rank-{rank}.json" for rank in ranks if rank not in results):
        if path.exists():
            raise UnreadableError(f"{path} is no whole result of a rank")
    lives, failures = _last_start(attempt, ranks)
    facts = Facts(
        ranks=orders.ranks,
        results={rank: (result.status, result.reason) for rank, result in results.items()},
        failures=failures,
        stopped=[rank for rank, life in lives.items() if life.ended],
        has_begun=any(any(attempt.glob(f"rank-*.{end}")) for end in ("log", "json", "jsonl")),
        scheduler=scheduler,
        slurm_log=slurm_log if len(results) < len(ranks) else (),
        is_cancelled=(attempt / STOP).exists(),
    )
    outcome = decide(facts)
    first = results[min(results)] if results else Result("", {}, [], {})
    record = {
        **base_record(orders.id, orders.experiment, orders.tier, orders.config),
        "attempt": attempt.name,
        "tries": orders.tries,
        "status": outcome.status,
        "reason": outcome.reason,
        "cause": outcome.cause,
        "engine": first.engine or {"name": orders.engine},
        "resolved": {**first.resolved, "data": orders.data_summary},
        "environment": {**orders.environment, **first.device},
        "times": _times(orders.submitted, lives, failures, results),
        "ranks": [result.rank for result in results.values()],
        "steps": _steps(attempt, orders.ranks),
        "evaluations": first.evaluations,
        "log": [] if outcome.status in ("ok", "nan") else _log(attempt, ranks, outcome, slurm_log),
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
    """Return the fields of every record, whatever its outcome."""
    return {
        "schema": SCHEMA,
        "id": run_id,
        "experiment": experiment,
        "tier": tier,
        "source": "measured",
        "config": config,
    }


def _last_start(attempt: Path, ranks: range) -> tuple[dict[int, Alive], list[Failure]]:
    """Return states and failures of ranks in the last start of a requeued job."""
    lives = {rank: found for rank in ranks if (found := read_alive(attempt, rank)) is not None}
    failures = [failure for rank in ranks if (failure := Failure.of_rank(attempt, rank)) is not None]
    last = max([*(life.restart for life in lives.values()), *(f.restart for f in failures)], default=0)
    return {r: life for r, life in lives.items() if life.restart == last}, [f for f in failures if f.restart == last]


def _times(
    submitted: float, lives: dict[int, Alive], failures: list[Failure], results: dict[int, Result]
) -> dict[str, Any]:
    """Return start and end, and the durations of the run's parts, slowest rank.

    It ended when a rank was last heard of, which may be long before its record is made; hosts' clocks differ.
    """
    heard = [*(life.time for life in lives.values()), *(failure.time for failure in failures)]
    ended = min(max(max(heard, default=time.time()), submitted, 0), LATEST)
    times: dict[str, Any] = {
        name: datetime.fromtimestamp(min(max(moment, 0), LATEST), UTC).isoformat(timespec="seconds")
        for name, moment in (("started", submitted), ("ended", ended))
    }
    if results:
        first = results[min(results)]
        times |= {f"{k}_seconds": max(r.seconds.get(k, 0.0) for r in results.values()) for k in first.seconds}
        times |= {"resumed_at": first.resumed} if first.resumed else {}
    return {**times, "total_seconds": ended - submitted}


def _steps(attempt: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the steps that every rank finished; loss and norm are equal on all, seconds are each rank's."""
    logs = [steps_so_far(attempt, rank) for rank in range(ranks)]
    return [{**lines[0], "seconds": [line["seconds"] for line in lines]} for lines in zip(*logs, strict=False)]


def _log(attempt: Path, ranks: range, outcome: Outcome, slurm_log: Sequence[str]) -> list[str]:
    """Return the last lines of the rank that failed first, else of Slurm and of the ranks that left no result."""
    if outcome.failure is not None:
        return list(outcome.failure.log)
    logs = [attempt / f"rank-{r}.log" for r in ranks if not (attempt / f"rank-{r}.json").exists()]
    last = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()[-5:]]
    return [*slurm_log, *last]
