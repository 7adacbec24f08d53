"""The verb `import`: an archive of `export`, checked, kept in a folder, and compared with the records of this machine.

Nothing in an archive is executed: its records and the code's uncommitted changes are unpacked, and the archive itself
is kept with them, so that its experiment's file never lies where Python would import it.
"""

import hashlib
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import tyro

from harness.analysis.columns import MODEL, ratio, share
from harness.analysis.points import Point, points, relative
from harness.analysis.render import Column, Table
from harness.analysis.tables import DEVICE, OVERSUBSCRIBED, RATE, RULES, RUNS, VARIES
from harness.analysis.tabulate import tabulate
from harness.experiment import folders
from harness.experiment.experiment import Experiment
from harness.experiment.loading import experiment_ids, load
from harness.experiment.tiers import TIERS, Tier
from harness.records.environment import commits
from harness.records.frames import is_missing, rows_of
from harness.records.labels import SHAPE, labels
from harness.records.measures import about
from harness.records.printable import printable
from harness.records.record import Record
from harness.records.statistics import Estimate
from harness.records.store import Store, write_atomically
from harness.records.writable import replaced
from harness.report.results import as_json
from harness.report.zipped import MOST_PACKED, unpack
from harness.terminal import Flag, print_json, print_tables, shown_progress
from impl.errors import InputError
from impl.files import read_bytes
from impl.grouping import by_key
from impl.run import Run

INBOX = Path("inbox")
KEPT = "archive.zip"
"""Name of the archive in the folder that it is imported to."""
RESULTS = re.compile(
    rf"results/(?P<experiment>.+?)/({'|'.join(TIERS)})/"
    r"((?P<kept>(records|simulated/[^/]+)/[^/]+\.json|changes/[^/]+)|(tables|figures)/[^/]+)"
)
"""Path of a file of results in an archive; tables and figures are not kept, as they are made again of the records."""
RATES, PUBLISHED_RATE = ("counted_rate", "rate"), "published_rate"
"""Columns of experiments' tables: rates that are counted as the published ones, which are in the last."""
NOTES = (
    *RULES,
    "Theirs / ours: of two independent means, with Welch's interval; none where either is of one run (n = 1), or both "
    "are the same runs.",
)
rate = attrgetter("tokens_per_second")


@dataclass(frozen=True, eq=False, kw_only=True)
class Both(Point):
    """Point of an archive, relative to the same point of this machine."""

    ours: Point
    of_published: Estimate
    """Share of the published rate that the archive's point reaches."""


COLUMNS = (
    MODEL, VARIES,
    replace(DEVICE, header="their device"), replace(RATE, header="theirs"), replace(RUNS, header="n, theirs"),
    Column(key="our_device", header="our device", text=True, of=lambda one: one.ours.device),
    replace(RATE, key="ours", header="ours", of=lambda one: one.ours.estimate(rate)),
    Column(key="our_n", header="n, ours", of=lambda one: one.ours.n),
    ratio("relative", "theirs / ours", relative),
    share("of_published", "theirs, of the published rate", lambda one: one.of_published),
    Column(key="shared", header="mark", text=True,
           of=lambda one: "†" * (one.is_oversubscribed or one.ours.is_oversubscribed)),
)  # fmt: skip


def import_archive(file: tyro.conf.Positional[Path], /, *, out: Path = INBOX, json: Flag = False) -> int:
    """Read an archive that `export` wrote, perhaps on another machine, and compare its points with your own.

    Everything is checked before anything is written; nothing in it is executed.

    Args:
        file: The zip.
        out: Where each archive gets a folder, which `table --out`, `claims --out` and `report --results` read.
        json: Print one JSON document.
    """
    content = read_bytes(file, MOST_PACKED)
    try:
        name, inside = unpack(content)
        experiment, records, kept = checked(inside)
    except InputError as error:
        raise InputError(f"{file}: {error}; valid: an archive that `lmscale export` wrote") from None
    digest = hashlib.sha256(content).hexdigest()
    target = out / f"{name}-{digest[:8]}"
    tables, notes = compared(experiment, records)
    where = environments([record for of_tier in records.values() for record in of_tier])
    if is_new := not target.is_dir():
        with replaced(target) as folder:
            for path, data in {**kept, KEPT: content}.items():
                write_atomically(folder / path, data)
    if json:
        head = {"id": experiment, "file": str(file), "sha256": digest, "folder": str(target), "is_new": is_new}
        return print_json({**head, "environments": where, **as_json(tables), "notes": notes})
    print(f"{'imported' if is_new else 'there already'}: {target} (sha256 {digest})")
    for one in where:
        what = f"{one.pop('records')} {one.pop('source')} at {one.pop('tier')} on {one.pop('on')}"
        print(printable(f"  {what} ({', '.join(f'{key} {value}' for key, value in one.items() if value)})"))
    print_tables(tables)
    print("", *filter(None, notes), f"all of it: lmscale table {experiment} --out {target}", sep="\n")
    return 0


def checked(inside: Mapping[str, bytes]) -> tuple[str, dict[Tier, list[Record]], dict[str, bytes]]:
    """Return the experiment of an archive, its records by tier, and what is kept of it by path in a folder of results.

    Raises:
        InputError: a file is none of results, a record is invalid, or there are not records of one experiment.
    """
    experiments, kept, records = set[str](), dict[str, bytes](), dict[Tier, list[Record]]()
    for path in sorted(path for path in inside if path.startswith("results/")):
        if (found := RESULTS.fullmatch(path)) is None:
            raise InputError(f"{path} is no file of results")
        experiments.add(found["experiment"])
        if found["kept"]:
            kept[path.removeprefix("results/")] = inside[path]
    if len(experiments) != 1:
        raise InputError(f"results of {', '.join(sorted(experiments)[:3]) or 'nothing'}, not of one experiment")
    [experiment] = experiments
    with tempfile.TemporaryDirectory() as scratch:
        for path, data in kept.items():
            write_atomically(Path(scratch, path), data, is_lasting=False)
        for tier in shown_progress(TIERS, "checking"):
            store = Store(Path(scratch), experiment, tier)
            records |= {tier: found} if (found := store.with_simulated()) else {}
            for path, why in store.ignored.items():
                raise InputError(f"results/{path.relative_to(scratch)}: {why}")
    if not records:
        raise InputError(f"no records of {experiment}")
    return experiment, records, kept


def environments(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return where the records come from, each place once, with their number."""
    keys = ("tier", "source", "on", "device", "backend", "cores", "code")
    of = lambda record, where: (
        record.tier, record.source, where.system or where.device_name or "an unnamed device", where.device,
        where.backend, where.cores, where.git and commits(where.git, "{:.8}"),
    )  # fmt: skip
    found = Counter(of(record, record.environment) for record in records)
    return [{"records": count, **dict(zip(keys, key, strict=True))} for key, count in found.items()]


def compared(experiment: str, records: Mapping[Tier, list[Record]]) -> tuple[list[Table], list[str]]:
    """Return a table for each tier with points that this machine has too, and what is to be said besides."""
    found = load(experiment) if experiment in experiment_ids() else None
    tables, notes = list[Table](), [folders.read_from(None, [experiment])]
    if found is None:
        notes.append(f"{experiment} is no experiment here; {KEPT} has its file: code, to be read before it is used")
    for tier, theirs in records.items():
        ran = [record for record in theirs if not record.is_simulated]
        ours = [record for store in folders.stores(None, experiment, tier) for record in store.records()]
        if both := in_both(found, ran, ours):
            tables.append(table(found, ran, both))
        elif ran:
            again = f"`lmscale run {experiment} --tier {tier}` makes them"
            notes.append(f"tier {tier}: this machine has none of its timed points; {again}")
        else:
            notes.append(f"tier {tier}: all of it was simulated, by no machine")
    return tables, notes


def in_both(found: Experiment | None, theirs: Sequence[Record], ours: Sequence[Record]) -> list[Both]:
    """Return the timed points of two lists of records; simulated ones of ours only where we have not measured."""
    here = by_key((one.run, one) for one in points(ours, rate))
    shares, both = of_published(found, theirs), list[Both]()
    for one in points(theirs, rate):
        reached = one.estimate(rate).scaled(shares.get((one.run, one.device), math.nan) / one.mean(rate))
        of_run = here.get(one.run, [])
        for other in [each for each in of_run if not each.is_simulated] or of_run:
            is_same = [each.timed_seconds for each in one.records] == [each.timed_seconds for each in other.records]
            over = one.over(one if is_same else other, rate)
            both.append(Both(**{**vars(one), "relative": over}, ours=other, of_published=reached))
    return both


def of_published(found: Experiment | None, records: Sequence[Record]) -> dict[tuple[Run, str], float]:
    """Return the share of the published rate that points reach, where the experiment's table has both rates."""
    made = found.table(records) if found and found.table and records else None
    units = {column.key: column.si for column in made.columns} if made else {}
    own = next((key for key in RATES if key in units and units[key] == units.get(PUBLISHED_RATE)), None)
    rows = rows_of(made.frame) if made and own else []
    both = ((row["point"], row["device_name"], row[own or ""], row[PUBLISHED_RATE]) for row in rows)
    return {(run, device): a / b for run, device, a, b in both if isinstance(a, float) and isinstance(b, float)}


def table(found: Experiment | None, theirs: Sequence[Record], both: Sequence[Both]) -> Table:
    """Return the table of points that an archive and this machine have."""
    called = dict(zip(both, labels([one.run for one in both], SHAPE), strict=True))
    columns = [replace(column, of=called.get) if column is VARIES else column for column in COLUMNS]
    notes = list(NOTES)
    if found and any(not is_missing(one.of_published.mean) for one in both):
        notes.append(f"Published: {found.source}, on its authors' devices.")
    if any(one.is_oversubscribed or one.ours.is_oversubscribed for one in both):
        notes.append(OVERSUBSCRIBED)
    title = f"Throughput, theirs and ours{about(theirs)}"
    return tabulate("imported", title, columns, both, notes, is_timed=False)
