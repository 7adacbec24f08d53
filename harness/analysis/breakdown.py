"""Share of its limit that a profiled run reaches, and the breakdown of the rest of its steps' time."""

from collections.abc import Sequence

import pandas as pd

from harness.analysis.columns import milliseconds, share
from harness.analysis.render import Column, Table
from harness.analysis.scaling import shown_elsewhere
from harness.analysis.tables import DEVICE, MARK, MODEL, RANKS, RUNS, VARIES, measured, timed
from harness.records.labels import labels
from harness.records.measures import about, combine
from harness.records.parts import Limit
from harness.records.record import Record

ALONE = ("gemm", "attention", "collective")
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "optimizer": "optimizer",
    "operators": "other operators",
    "communication": "exposed communication",
    "rest": "Python, data",
}
"""Parts of a profiled step: names in `harness.rank.profile`, and headers in tables."""


LIMIT = (
    MODEL, VARIES, DEVICE, RANKS,
    milliseconds("gemm_alone_seconds", "matrix products alone"),
    milliseconds("attention_alone_seconds", "attention alone"),
    milliseconds("collective_alone_seconds", "collectives alone"),
    milliseconds("limit_seconds", "limit"),
    milliseconds("step_seconds", "step, median"),
    share("limit_share", "share of the limit reached"),
    RUNS, MARK,
)  # fmt: skip
BREAKDOWN = (
    MODEL, VARIES, DEVICE, RANKS,
    milliseconds("profiled_seconds", "profiled step"),
    *(
        column
        for part, header in PARTS.items()
        for column in (milliseconds(f"{part}_seconds", header), share(f"{part}_share", header))
    ),
    RUNS, MARK,
)  # fmt: skip
LIMIT_NOTES = (
    "Alone: every distinct matrix product, attention's core and every kind of collective by itself, warm, on all ranks "
    "at once, forward and backward, added up over layers and microbatches; of the rank with most to do.",
    "Limit: matrix products and attention, or the collectives where these take longer: what a step would take that did "
    "nothing else, and communicated while it computed. A pipeline's bubble is not in it.",
)
BREAKDOWN_NOTES = (
    "One step under PyTorch's profiler, which slows it down a little, after all that is timed: mean over the ranks. "
    "Its parts add up to it.",
    "Other operators: element by element, norms, copies, cross-entropy; optimizer: AdamW's update alone. Exposed "
    "communication: starting collectives, and waiting for them or for other ranks with nothing else to do, in a "
    "pipeline its bubble too. Python, data: nothing of all this; on a GPU, the device idle.",
)


def profile_tables(records: Sequence[Record]) -> list[Table]:
    """Return two tables of profiled points: a step beside what it computes and sends, each run alone, and its parts.

    Raises:
        InputError: the records are of several tiers.
    """
    return [
        _table("limit", "Share of the limit", LIMIT, records, LIMIT_NOTES),
        _table("breakdown", "Where the time goes", BREAKDOWN, records, BREAKDOWN_NOTES),
    ]


def values(record: Record) -> dict[str, float]:
    """Return a profiled run's limit, of the rank with most work, and the parts of its step, means over the ranks.

    Empty if the run was not profiled.
    """
    found = [(rank.profile, rank.limit) for rank in record.ranks if rank.profile and rank.limit]
    if not found:
        return {}
    slowest = max((limit for _, limit in found), key=_least)
    whole = sum(profile.seconds for profile, _ in found) / len(found)
    parts = {part: sum(getattr(profile.parts, part) for profile, _ in found) / len(found) for part in PARTS}
    return {
        **{f"{kind}_alone_seconds": getattr(slowest, f"{kind}_seconds") for kind in ALONE},
        "limit_seconds": _least(slowest),
        "profiled_seconds": whole,
        **{f"{part}_seconds": seconds for part, seconds in parts.items()},
        **{f"{part}_share": seconds / whole for part, seconds in parts.items()},
    }


def _least(limit: Limit) -> float:
    """Return the seconds of a step that computes and communicates at the same time, and does nothing else."""
    return max(limit.gemm_seconds + limit.attention_seconds, limit.collective_seconds)


def _table(name: str, title: str, columns: Sequence[Column], records: Sequence[Record], notes: Sequence[str]) -> Table:
    title = f"{title}{about(records)}"
    found = {record.id: found for record in records if (found := values(record))}
    rows = timed([record for record in records if record.id in found])
    if rows.empty:
        return Table(name, title, (), rows)
    rows = pd.concat([rows, pd.DataFrame([found[id] for id in rows["id"]], index=rows.index)], axis=1)
    rows["limit_share"] = rows["limit_seconds"] / rows["step_seconds"]
    rows = pd.DataFrame(combine(rows, ("point", "source", "device_name"), [c.key for c in columns if c.si]))
    rows["varies"] = labels(list(rows["point"]), shown_elsewhere(rows))
    return measured(name, title, columns, rows, notes)
