"""The verbs for a sweep that is somewhere on its way: `status`, `watch` and `cancel`; and which points are meant."""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from harness.analysis.render import printable
from harness.experiment.experiment import Experiment, Point, Tier, changed, load, points
from harness.experiment.folders import of_archive, sweep_folder, sweep_tier
from harness.launch.decide import attempt_state, shown
from harness.launch.options import Options
from harness.launch.preflight import Datasets
from harness.launch.progress import LiveDisplay
from harness.launch.sweep import Sweep
from harness.rank import jobs
from harness.records.store import Store
from harness.report.results import tell_results
from harness.terminal import TABLE_ROWS, Flag, columns, console, counted, print_json, tell_ignored
from impl.plan import Plan
from impl.run import EngineName


@dataclass(frozen=True)
class Which:
    """Which points of an experiment are meant, and where their records lie."""

    tier: Tier | None = None
    """smoke (CPU, a minute or so), small (one machine), paper (the paper's scale). Without it `run` takes smoke, the
    other verbs the tier with a sweep under way, else the largest one with records."""
    only: str | None = None
    """Only points whose label contains this, or matches it as a pattern, or whose id starts with it."""
    out: Path | None = None
    """Folder of records, tables and figures; without it `runs` in the working directory."""
    data: str | None = None
    """Token folder to train on, in place of the experiment's."""
    engine: EngineName | None = None
    """Who trains every point: ours, DeepSpeed, or PyTorch's own parts; without it each point's own."""

    def points(self, found: Experiment, tier: Tier, plan: Plan, plan_fields: Iterable[str]) -> list[Point]:
        """Return the points of a tier, with these fields of the plan in place of each one's own.

        Raises:
            InputError: `only` matches none.
        """
        return points(changed(found.runs[tier], self.data, self.engine, plan, plan_fields), self.only)

    def words(self, plan: Plan, plan_fields: Iterable[str], *, data: bool = False) -> list[str]:
        """Return the options that choose the same points and folder in another command.

        Args:
            data: name the token folder and the engine too, which not every verb takes.
        """
        given = {"--only": self.only, "--out": self.out}
        given |= {"--data": self.data, "--engine": self.engine} if data else {}
        words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(str(value)))]
        for field in sorted(plan_fields):
            name, value = field.replace("_", "-"), getattr(plan, field)
            is_flag = isinstance(value, bool)
            words += [f"--plan.{'no-' * (value is False)}{name}"] if is_flag else [f"--plan.{name}", str(value)]
        return words

    def tier_of(self, found: Experiment) -> Tier:
        """Return the tier that is meant, of a sweep that has been started before."""
        return self.tier or sweep_tier(sweep_folder(self.out), found.id)

    def store(self, found: Experiment, tier: Tier) -> Store:
        return Store(sweep_folder(self.out), found.id, tier)


Chosen = Annotated[Which, tyro.conf.arg(name="")]
WHICH = Which()


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
    """The state of each point: what its record says, or its job."""
    attempts = store.attempts()
    states = jobs.states([attempt for point in chosen for attempt in attempts.get(point.id, [])])
    rows = []
    for point in chosen:
        head, tries = store.head(point.id), attempts.get(point.id, [])
        word = shown(head, tries, states)
        is_record = head is not None and word == head["status"]
        waits_for = next((states[a].reason for a in tries if a in states and states[a].reason), None)
        reason = head.get("reason") if head and is_record else waits_for
        cause = head.get("cause") if head and is_record else None
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


def _wait_for(store: Store, chosen: list[Point], options: Options) -> None:
    with LiveDisplay(len(chosen)) as display:
        Sweep(store, Datasets(store.folder), options, display).watch(chosen)
