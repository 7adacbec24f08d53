"""The verbs for a sweep under way: `status`, `watch` and `cancel`."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from harness.cli.which import Chosen, OfWhich
from harness.experiment.experiment import Point
from harness.experiment.folders import of_archive
from harness.launch.attempt import Options
from harness.launch.decide import attempt_state, state_word
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.sweep import Sweep
from harness.launch.trackers import Trackers, tracker_names
from harness.rank import jobs
from harness.rank.job import STOP, job_of
from harness.records.attempts import Attempts
from harness.records.printable import printable, several
from harness.records.store import Store
from harness.report.results import tell_results
from harness.terminal import TABLE_ROWS, Flag, columns, console, counted, print_json, tell_ignored
from impl.errors import InputError


class State(NamedTuple):
    """State of a point, from its record or its job."""

    id: str
    point: str
    status: str
    reason: str | None
    cause: str | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Texts of its row of a table."""
        return self.id, self.point, printable(self.status), printable(self.reason or "")


def status(which: OfWhich, json: Flag = False) -> int:
    """Show the state of an experiment's points: done, failed, running, pending or missing, and why.

    Args:
        which: Which points.
        json: Print one JSON document.
    """
    chosen = which.chosen()
    states = states_of(chosen.store, chosen.points)
    tell_ignored(chosen.store)
    if which.out is None and not json and (note := of_archive(chosen.experiment.id, chosen.tier)):
        print(note)
    return tell_states(chosen, states, json)


def watch(which: OfWhich, track: str = "", html: Path | None = None, json: Flag = False) -> int:
    """Show the progress of an experiment's points that run elsewhere, until all have ended; nothing is started.

    Records of ended points are written, then tables and figures.

    Args:
        which: Which points.
        track: Trackers that follow the points, as those of `run`.
        html: A page to write, too, for a browser: losses, throughput, states and the ends of ranks' logs. It is
            written again every 5 s, and reloads itself.
        json: Print one JSON document on standard output, at the end.
    """
    chosen = which.chosen()
    found, _, store, points = chosen
    trackers = Trackers(tracker_names(track), store.out)
    with live_page(html, store, points):
        _wait_for(store, points, trackers)
    if not store.records():
        tell_ignored(store)
        return tell_states(chosen, states_of(store, points), json)
    return tell_results(found, store, points, json, were_run=False)


def cancel(which: OfWhich, json: Flag = False) -> int:
    """End the jobs of an experiment's points, running and pending; the next `run` starts them again.

    Args:
        which: Which points.
        json: Print one JSON document.
    """
    chosen = which.chosen()
    found, tier, store, points = chosen
    attempts = Attempts(store).open()
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
    states = states_of(store, live)
    tell_ignored(store)
    if json:
        return tell_states(chosen, states, json)
    if states:
        print(columns([(one.id, one.status, one.point, printable(one.reason or "")) for one in states]))
    count = sum(one.cause == "cancelled" for one in states)
    print(f"{found.id}, tier {tier}: {several(count, 'point')} cancelled")
    return 0


def states_of(store: Store, chosen: Sequence[Point]) -> list[State]:
    """Return the state of each point of a sweep, read from its record or asked of its job."""
    attempts = Attempts(store).open()
    states = jobs.states([attempt for point in chosen for attempt in attempts.get(point.id, [])])
    found = []
    for point in chosen:
        head, tries = store.head(point.id), attempts.get(point.id, [])
        word = state_word(head, tries, states)
        if head is not None and word == head.status:
            reason, cause = head.reason, head.cause
        else:
            reason, cause = next((states[a].reason for a in tries if a in states and states[a].reason), None), None
        found.append(State(point.id, point.label, word, reason, cause))
    return found


def live_page(path: Path | None, store: Store, points: list[Point]) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a page is kept, if one is asked for.

    Raises:
        InputError: it is no file that this command may write.
    """
    if path is None:
        return contextlib.nullcontext()
    from harness.report.live import MARK, kept

    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise InputError(f"--html {path}: exists, and is no page of `watch`; valid: a new file")
    states = lambda: [(one.status, printable(one.reason or "")) for one in states_of(store, points)]
    return kept(path, store, points, states)


def tell_states(chosen: Chosen, states: Sequence[State], json: bool) -> int:
    """Print the state of points, and their counts."""
    found, tier, store, _ = chosen
    words = [one.status for one in states]
    if json:
        counts = {word: words.count(word) for word in sorted(set(words))}
        rows = [one._asdict() for one in states]
        return print_json({"experiment": found.id, "tier": tier, "points": rows, "counts": counts})
    if len(states) > TABLE_ROWS:
        print(columns([one.cells for one in states]))
    else:
        table = Table("id", "point", "status", "reason")
        for one in states:
            table.add_row(*map(Text, one.cells))  # a reason is no markup
        console(table).print(table)
    print(f"{found.id}, tier {tier}, {store.out}: {counted(words)}")
    others = len({path.stem for path in store.recorded.glob("*.json")} - {one.id for one in states})
    if others and set(words) == {"missing"}:
        print(f"records of other points: {others}; with options of `run`, as --data and --sweep, give them here, too")
    return 0


def tell_submitted(chosen: Chosen, words: Sequence[str], json: bool) -> int:
    """Print how to follow submitted jobs, by options (`words`) for the same points, and the state of these."""
    found, tier, store, points = chosen
    if not json:
        follow = " ".join(["lmscale watch", found.id, "--tier", tier, *words])
        print(f"submitted; `{follow}` follows the jobs and keeps their records, as the same command would")
    return tell_states(chosen, states_of(store, points), json)


def _wait_for(store: Store, points: list[Point], trackers: Trackers | None = None) -> None:
    with Display(len(points), trackers=trackers) as display:
        Sweep(store, Datasets(store.folder), Options(), display).watch(points)
