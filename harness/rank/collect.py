"""The record of a run, assembled from the files that its ranks left."""

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.rank.failure import Failure, Outcome, decide, last_lines
from harness.rank.heartbeat import Alive, read_alive
from harness.rank.job import STOP
from harness.rank.json_files import read_as
from harness.rank.orders import ORDERS, TrainingOrders, UnreadableError
from harness.rank.results import MEMORY, RESUMED, Result, Resumption, result_of, steps_so_far
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
        raise UnreadableError(f"{attempt / ORDERS} has the orders of another run, {orders.id}")
    ranks = range(orders.ranks)
    results = {rank: found for rank in ranks if (found := result_of(attempt, rank)) is not None}
    missing = [rank for rank in ranks if rank not in results]
    if damaged := [path for rank in missing if (path := attempt / f"rank-{rank}.json").exists()]:
        raise UnreadableError(f"{damaged[0]} is not the whole result of a rank")
    lives, failures = _last_start(attempt, ranks)
    outcome = decide(
        ranks=orders.ranks,
        results={rank: (result.status, result.reason) for rank, result in results.items()},
        failures=failures,
        stopped=[rank for rank, life in lives.items() if life.ended],
        has_begun=any(any(attempt.glob(f"rank-*.{end}")) for end in ("log", "json", "jsonl")),
        scheduler=scheduler,
        slurm_log=slurm_log if missing else (),
        is_cancelled=(attempt / STOP).exists(),
    )
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
        **{name: found for name in ("forecast", "loss_forecast") if (found := getattr(orders, name))},
        "times": _times(orders.submitted, [*lives.values(), *failures], [*results.values()]),
        "ranks": [result.rank for result in results.values()],
        "steps": _steps(attempt, ranks),
        "evaluations": first.evaluations,
        "log": _log(attempt, outcome, missing, slurm_log),
    }
    _note_resumption(record, attempt)
    record |= _certified(record, [] if missing else [*results.values()]) if orders.certify else {}
    try:
        of_document(record)
    except ValueError as error:
        raise UnreadableError(f"{attempt}: {error}") from None
    logged, trained = len(record["steps"]), orders.run.train.steps
    if outcome.status == "ok" and logged != trained:
        raise UnreadableError(f"{attempt}: the step logs of its ranks have {logged} of {trained} steps")
    return record


def base_record(run_id: str, experiment: str, tier: str, config: Document) -> Document:
    """Return the fields of every record, whatever its outcome."""
    return {
        "schema": SCHEMA,
        "id": run_id,
        "experiment": experiment,
        "tier": tier,
        "source": "measured",
        "config": config,
    }


def _note_resumption(record: Document, attempt: Path) -> None:
    """Add to a record where its run was resumed, and by which code."""
    if resumption := read_as(Resumption, attempt / RESUMED):
        record["times"] |= {"resumed_at": resumption.resumed} if resumption.resumed else {}
        record["environment"] |= {"git": resumption.git} if resumption.git else {}


def _last_start(attempt: Path, ranks: range) -> tuple[dict[int, Alive], list[Failure]]:
    """Return states and failures of ranks in the last start of a requeued job."""
    lives = {rank: found for rank in ranks if (found := read_alive(attempt, rank)) is not None}
    failures = [failure for rank in ranks if (failure := Failure.of_rank(attempt, rank)) is not None]
    last = max([*(life.restart for life in lives.values()), *(f.restart for f in failures)], default=0)
    return {r: life for r, life in lives.items() if life.restart == last}, [f for f in failures if f.restart == last]


def _times(submitted: float, last: Sequence[Alive | Failure], results: Sequence[Result]) -> Document:
    """Return start and end, and the durations of the run's parts, slowest rank.

    It ended when a rank last wrote its state, which may be long before its record is made; hosts' clocks differ.
    """
    ended = max((found.time for found in last), default=time.time())
    ended = min(max(ended, submitted, 0), LATEST)
    iso = lambda moment: datetime.fromtimestamp(min(max(moment, 0), LATEST), UTC).isoformat(timespec="seconds")
    times: Document = {"started": iso(submitted), "ended": iso(ended)}
    parts = {name: max(of.seconds.get(name, 0.0) for of in results) for name in (results[0].seconds if results else ())}
    times |= {f"{name}_seconds": seconds for name, seconds in parts.items()}
    # its parts are of all attempts, the time since it was submitted is of the last one
    return {**times, "total_seconds": max(ended - submitted, math.fsum(parts.values()))}


def _steps(attempt: Path, ranks: range) -> list[Document]:
    """Return the steps that every rank finished; loss and norm are equal on all, seconds are each rank's."""
    logs = [steps_so_far(attempt, rank) for rank in ranks]
    kept = lambda line: {name: line[name] for name in line if name != MEMORY}
    return [{**kept(lines[0]), "seconds": [line["seconds"] for line in lines]} for lines in zip(*logs, strict=False)]


def _certified(record: Document, results: Sequence[Result]) -> Document:
    """Return what a record with a certificate has: the hashes of every step by rank, and no times, which hashing is in.

    Of ranks with the same hashes the first has them, and the others its number. There is no certificate where a rank
    lacks hashes of some steps: it failed, or did those before it was asked for them.
    """
    certificate: list[list[Document | int]] = []
    for hashes in zip(*(result.certificate for result in results), strict=False):
        firsts = enumerate(map(hashes.index, hashes))
        certificate.append([hashes[rank] if first == rank else first for rank, first in firsts])
    is_whole = all(len(result.certificate) == len(record["steps"]) for result in results)
    return {
        "certified": True,
        "certificate": certificate if is_whole else [],
        "steps": [step | {"seconds": None} for step in record["steps"]],
        "ranks": [rank | {"timeline": None} for rank in record["ranks"]],
        "times": record["times"] | {"training_seconds": None},
    }


def _log(attempt: Path, outcome: Outcome, missing: Sequence[int], slurm_log: Sequence[str]) -> list[str]:
    """Return the last lines of the rank that failed first, else of Slurm and of the ranks that left no result."""
    if outcome.status in ("ok", "nan"):
        return []
    if outcome.failure is not None:
        return [*outcome.failure.log]
    return [*slurm_log, *(line for rank in missing for line in last_lines(attempt, rank)[-5:])]
