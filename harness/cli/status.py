"""The verbs for a sweep under way: `status`, `watch` and `cancel`."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.cli.which import Chosen, OfWhich, PlanFields
from harness.experiment.experiment import Point
from harness.experiment.folders import of_archive
from harness.launch.attempt import Options
from harness.launch.decide import attempt_state, state_word
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.sweep import Sweep
from harness.rank import jobs
from harness.rank.job import STOP, job_of
from harness.records.printable import printable
from harness.records.store import Store
from harness.report.results import tell_results
from harness.terminal import TABLE_ROWS, Flag, columns, console, counted, print_json, tell_ignored


def status(which: OfWhich, plan_fields: PlanFields = frozenset(), json: Flag = False) -> int:
    """Show the state of an experiment's points: done, failed, running, pending or missing, and why.

    Args:
        which: Which points.
        plan_fields: Fields of the plan that are given.
        json: Print one JSON document.
    """
    chosen = which.chosen(plan_fields)
    found, tier, store, points = chosen
    rows = rows_of(store, points)
    tell_ignored(store)
    if which.out is None and not json and (note := of_archive(found.id, tier)):
        print(note)
    return tell_rows(chosen, rows, json)


def watch(which: OfWhich, plan_fields: PlanFields = frozenset(), json: Flag = False) -> int:
    """Show the progress of an experiment's points that run elsewhere, until all have ended; nothing is started.

    Records of ended points are written, then tables and figures.

    Args:
        which: Which points.
        plan_fields: Fields of the plan that are given.
        json: Print one JSON document on standard output, at the end.
    """
    chosen = which.chosen(plan_fields)
    found, _, store, points = chosen
    _wait_for(store, points)
    if not store.records():
        tell_ignored(store)
        return tell_rows(chosen, rows_of(store, points), json)
    return tell_results(found, store, points, json)


def cancel(which: OfWhich, plan_fields: PlanFields = frozenset(), json: Flag = False) -> int:
    """End the jobs of an experiment's points, running and pending; the next `run` starts them again.

    Args:
        which: Which points.
        plan_fields: Fields of the plan that are given.
        json: Print one JSON document.
    """
    chosen = which.chosen(plan_fields)
    found, tier, store, points = chosen
    attempts = store.attempts()
    live = [point for point in points if point.id in attempts]
    tries = [attempt for point in live for attempt in attempts[point.id]]
    jobs.cancel(tries)
    for attempt, state in jobs.states(tries).items():
        if attempt_state(attempt, {attempt: state}) == "live" and not (attempt / STOP).exists():
            store.ignored[attempt] = "another user's try, which cannot be stopped"
        elif state.name == "unknown" and (job := job_of(attempt)) is not None:
            print(f"{attempt}: {state.reason}; job {job.job} is given up: if it starts, it ends", file=sys.stderr)
    if live:
        _wait_for(store, live)
    rows = rows_of(store, live)
    tell_ignored(store)
    if json:
        return tell_rows(chosen, rows, json)
    if rows:
        print(columns([(row["id"], row["status"], row["point"], printable(row["reason"] or "")) for row in rows]))
    count = sum(row["cause"] == "cancelled" for row in rows)
    print(f"{found.id}, tier {tier}: {'1 point' if count == 1 else f'{count} points'} cancelled")
    return 0


def rows_of(store: Store, chosen: list[Point]) -> list[dict[str, Any]]:
    """Return the state of each point, from its record or its job."""
    attempts = store.attempts()
    states = jobs.states([attempt for point in chosen for attempt in attempts.get(point.id, [])])
    rows = []
    for point in chosen:
        head, tries = store.head(point.id), attempts.get(point.id, [])
        word = state_word(head, tries, states)
        is_record = head is not None and word == head.status
        waits_for = next((states[a].reason for a in tries if a in states and states[a].reason), None)
        reason = head.reason if head and is_record else waits_for
        cause = head.cause if head and is_record else None
        rows.append({"id": point.id, "point": point.label, "status": word, "reason": reason, "cause": cause})
    return rows


def tell_rows(chosen: Chosen, rows: list[dict[str, Any]], json: bool) -> int:
    """Print the state of points, and their counts."""
    found, tier, store, _ = chosen
    words = [row["status"] for row in rows]
    if json:
        counts = {word: words.count(word) for word in sorted(set(words))}
        return print_json({"experiment": found.id, "tier": tier, "points": rows, "counts": counts})
    cells = [(row["id"], row["point"], printable(row["status"]), printable(row["reason"] or "")) for row in rows]
    if len(rows) > TABLE_ROWS:
        print(columns(cells))
    else:
        table = Table("id", "point", "status", "reason")
        for row in cells:
            table.add_row(*map(Text, row))  # a reason is no markup
        console(table).print(table)
    print(f"{found.id}, tier {tier}, {store.out}: {counted(words)}")
    return 0


def tell_submitted(chosen: Chosen, words: Sequence[str], json: bool) -> int:
    """Print how to follow jobs that have been submitted, and the state of their points.

    Args:
        words: Options that choose the same points.
    """
    found, tier, store, points = chosen
    if not json:
        follow = " ".join(["lmscale watch", found.id, "--tier", tier, *words])
        print(f"submitted; `{follow}` follows the jobs and keeps their records, as the same command would")
    return tell_rows(chosen, rows_of(store, points), json)


def _wait_for(store: Store, points: list[Point]) -> None:
    with Display(len(points)) as display:
        Sweep(store, Datasets(store.folder), Options(), display).watch(points)
