"""The verbs for a sweep under way: `status`, `watch` and `cancel`."""

import sys
from collections.abc import Sequence
from typing import Any

import tyro
from rich.table import Table
from rich.text import Text

from harness.cli.which import WHICH, Chosen
from harness.experiment.experiment import Experiment, Point, load
from harness.experiment.folders import of_archive
from harness.launch.decide import attempt_state, shown
from harness.launch.options import Options
from harness.launch.preflight import Datasets
from harness.launch.progress import LiveDisplay
from harness.launch.sweep import Sweep
from harness.rank import jobs
from harness.records.printable import printable
from harness.records.store import Store
from harness.report.results import tell_results
from harness.terminal import TABLE_ROWS, Flag, columns, console, counted, print_json, tell_ignored
from impl.plan import Plan


def status(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    which: Chosen = WHICH,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    plan_fields: tyro.conf.Suppress[frozenset[str]] = frozenset(),
    json: Flag = False,
) -> int:
    """Say which points of an experiment are done, failed, running, pending or missing, and why.

    Args:
        experiment: Id of an experiment, or its last word.
        which: Which points.
        plan: Fields of the parallel plan, as given to `run`.
        plan_fields: Which are given.
        json: Print one JSON document.
    """
    found = load(experiment)
    tier = which.tier_of(found)
    store = which.store(found, tier)
    rows = rows_of(store, which.points(found, tier, plan, plan_fields))
    tell_ignored(store)
    if which.out is None and not json and (note := of_archive(found.id, tier)):
        print(note)
    return tell_rows(found, store, rows, json)


def watch(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    which: Chosen = WHICH,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    plan_fields: tyro.conf.Suppress[frozenset[str]] = frozenset(),
    json: Flag = False,
) -> int:
    """Show how the points of an experiment get on that run elsewhere, until none does; nothing is started.

    The records of what has ended are written, then tables and figures.

    Args:
        experiment: Id of an experiment, or its last word.
        which: Which points.
        plan: Fields of the parallel plan, as given to `run`.
        plan_fields: Which are given.
        json: Print one JSON document on standard output, at the end.
    """
    found = load(experiment)
    tier = which.tier_of(found)
    store, chosen = which.store(found, tier), which.points(found, tier, plan, plan_fields)
    _wait_for(store, chosen, Options())
    if not store.records():
        tell_ignored(store)
        return tell_rows(found, store, rows_of(store, chosen), json)
    return tell_results(found, store, chosen, json)


def cancel(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    which: Chosen = WHICH,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    plan_fields: tyro.conf.Suppress[frozenset[str]] = frozenset(),
    json: Flag = False,
) -> int:
    """End the jobs of an experiment's points, running and pending; the next `run` does these points again.

    Args:
        experiment: Id of an experiment, or its last word.
        which: Which points.
        plan: Fields of the parallel plan, as given to `run`.
        plan_fields: Which are given.
        json: Print one JSON document.
    """
    found = load(experiment)
    tier = which.tier_of(found)
    store = which.store(found, tier)
    attempts = store.attempts()
    live = [point for point in which.points(found, tier, plan, plan_fields) if point.id in attempts]
    chosen = [attempt for point in live for attempt in attempts[point.id]]
    jobs.cancel(chosen)
    for attempt, state in jobs.states(chosen).items():
        if attempt_state(attempt, {attempt: state}) == "live" and not (attempt / jobs.STOP).exists():
            store.ignored[attempt] = "another user's try, which cannot be stopped"
        elif state.name == "unknown" and (job := jobs.job_of(attempt)) is not None:
            print(f"{attempt}: {state.reason}; job {job.job} is given up: if it starts, it ends", file=sys.stderr)
    if live:
        _wait_for(store, live, Options())
    rows = rows_of(store, live)
    tell_ignored(store)
    if json:
        return tell_rows(found, store, rows, json)
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
        word = shown(head, tries, states)
        is_record = head is not None and word == head.status
        waits_for = next((states[a].reason for a in tries if a in states and states[a].reason), None)
        reason = head.reason if head and is_record else waits_for
        cause = head.cause if head and is_record else None
        rows.append({"id": point.id, "point": point.label, "status": word, "reason": reason, "cause": cause})
    return rows


def tell_rows(found: Experiment, store: Store, rows: list[dict[str, Any]], json: bool) -> int:
    """Print the state of points, and their counts."""
    words = [row["status"] for row in rows]
    if json:
        counts = {word: words.count(word) for word in sorted(set(words))}
        return print_json({"experiment": found.id, "tier": store.tier, "points": rows, "counts": counts})
    cells = [(row["id"], row["point"], printable(row["status"]), printable(row["reason"] or "")) for row in rows]
    if len(rows) > TABLE_ROWS:
        print(columns(cells))
    else:
        table = Table("id", "point", "status", "reason")
        for row in cells:
            table.add_row(*map(Text, row))  # a reason is no markup
        console(table).print(table)
    print(f"{found.id}, tier {store.tier}, {store.out}: {counted(words)}")
    return 0


def tell_submitted(found: Experiment, store: Store, chosen: list[Point], words: Sequence[str], json: bool) -> int:
    """Print how to follow jobs that have been submitted, and the state of their points.

    Args:
        words: Options that choose the same points.
    """
    if not json:
        follow = " ".join(["lmscale watch", found.id, "--tier", store.tier, *words])
        print(f"submitted; `{follow}` follows the jobs and keeps their records, as the same command would")
    return tell_rows(found, store, rows_of(store, chosen), json)


def _wait_for(store: Store, chosen: list[Point], options: Options) -> None:
    with LiveDisplay(len(chosen)) as display:
        Sweep(store, Datasets(store.folder), options, display).watch(chosen)
