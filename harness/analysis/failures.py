"""Points without a result, and why."""

from collections.abc import Sequence

from harness.analysis.render import Column, Table, shown
from harness.analysis.tables import MODEL, VARIES, denominators
from harness.records.measures import about, frame
from harness.records.record import Record

FAILURES = (
    MODEL, VARIES, Column(key="system", header="simulated on", text=True),
    Column(key="status", header="status", text=True), Column(key="runs", header="runs"),
    Column(key="reason", header="reason", text=True),
)  # fmt: skip


def failures_table(records: Sequence[Record]) -> Table:
    """Return the table of points with an unsuccessful run, with the reason, and the denominators as a note.

    Raises:
        InputError: the records are of several tiers.
    """
    title, rows = f"Points without a result{about(records)}", frame(records)
    if not rows.empty:
        same = ["point", "status", "reason", "system"]
        rows = rows[rows["status"] != "ok"].fillna({"reason": "", "system": ""})
        rows = rows.assign(runs=rows.groupby(same, sort=False)["id"].transform("count"))
        rows = rows.drop_duplicates(same).reset_index(drop=True)
    return Table("failures", title, shown(FAILURES, rows), rows, (denominators(records),))
