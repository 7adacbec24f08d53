"""The tables of a sweep, each a pure function of its records."""

from collections.abc import Callable, Sequence

import pandas as pd

from harness.analysis.render import Column, Table, shown
from harness.analysis.scaling import scaling_rows, shown_elsewhere
from harness.records.frames import once_for_all
from harness.records.labels import labels
from harness.records.measures import about, combine, frame
from harness.records.printable import several
from harness.records.record import CONVENTION, Record
from harness.records.statistics import WARMUP_SHARE, WARMUP_STEPS
from harness.records.store import SIMULATED
from impl.run import Run

MakesTable = Callable[[Sequence[Record]], Table]
"""Function that makes an experiment's own table; without records the table has its name, and no rows."""

GIB, TERA, PERCENT, MILLI = 2**30, 1e12, 0.01, 1e-3
DISTURBED = "‡ other programs or machines took over a tenth of the processors' time during training: run it again."
OVERSUBSCRIBED = "† more ranks × threads than cores: the ranks wait for each other's turn; no scaling efficiency."
RULES = (
    f"Throughput is global tokens over wall time, the slowest rank's at every step; the first {WARMUP_STEPS} steps or "
    f"{WARMUP_SHARE:.0%}, whichever is more, are not timed.",
    "± is the half-width of the 95% t-interval over n runs; a single run (n = 1) has none.",
)

MODEL = Column(key="model", header="model", text=True)
VARIES = Column(key="varies", header="point", text=True)
DEVICE = Column(key="device_name", header="device", text=True)
RANKS = Column(key="ranks", header="ranks")
RATE = Column(
    key="tokens_per_second", header="throughput", unit="tokens/s", si="tokens/s",
    interval="tokens_per_second_half_width",
)  # fmt: skip
RATE_PER_DEVICE = Column(
    key="tokens_per_second_per_device", header="per device", unit="tokens/s", si="tokens/s",
    interval="tokens_per_second_per_device_half_width",
)  # fmt: skip
FLOP_RATE = Column(
    key="flop_rate", header="model FLOP rate per device", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3,
)  # fmt: skip
EFFICIENCY = Column(
    key="efficiency", header="efficiency", unit="%", si="fraction", scale=PERCENT, digits=3,
    interval="efficiency_half_width",
)  # fmt: skip
BUBBLE = Column(key="bubble", header="bubble", unit="%", si="fraction", scale=PERCENT, digits=3)
PUBLISHED = Column(key="published", header="published", unit="%", si="fraction", scale=PERCENT, digits=3)
RUNS = Column(key="n", header="n")
MARK = Column(key="mark", header="mark", text=True)
THROUGHPUT = (
    MODEL, VARIES, DEVICE, RANKS, RATE, RATE_PER_DEVICE,
    Column(key="step_seconds", header="step, median", unit="ms", si="s", scale=MILLI),
    Column(key="step_seconds_iqr", header="step, IQR", unit="ms", si="s", scale=MILLI, digits=2),
    FLOP_RATE,
    Column(key="mfu", header="MFU", unit="%", si="fraction", scale=PERCENT, digits=3),
    Column(key="hfu", header="HFU", unit="%", si="fraction", scale=PERCENT, digits=3),
    Column(key="gemm_share", header="share of GEMM rate", unit="%", si="fraction", scale=PERCENT, digits=3),
    Column(key="peak_memory_bytes", header="memory per rank", unit="GiB", si="B", scale=GIB, digits=3),
    Column(key="skipped_steps", header="skipped steps", si="steps"),
    BUBBLE, RUNS, MARK,
)  # fmt: skip
SCALING = (
    Column(key="kind", header="scaling", text=True), MODEL, VARIES, DEVICE, RANKS,
    Column(key="global_batch", header="global batch", unit="sequences", si="sequences"),
    RATE, RATE_PER_DEVICE,
    Column(key="speedup", header="speed-up", si="ratio", digits=3, interval="speedup_half_width"),
    EFFICIENCY,
    Column(key="baseline", header="relative to", text=True), RUNS, MARK,
)  # fmt: skip
FAILURES = (
    MODEL, VARIES, Column(key="system", header="simulated on", text=True),
    Column(key="status", header="status", text=True), Column(key="runs", header="runs"),
    Column(key="reason", header="reason", text=True),
)  # fmt: skip
MEASURES = tuple(c.key for c in THROUGHPUT if c.si)


def throughput_table(records: Sequence[Record]) -> Table:
    """Return the table of speed and memory of every timed point, repeats and seeds combined.

    Raises:
        InputError: the records are of several tiers.
    """
    title, rows = f"Throughput{about(records)}", timed(records)
    if rows.empty:
        return Table("throughput", title, (), rows)
    spread = rows["step_seconds_q3"] - rows["step_seconds_q1"]
    rows["step_seconds_iqr"] = spread.where(rows["source"] != SIMULATED)  # a simulation has one step
    rows = pd.DataFrame(combine(rows, ("point", "source", "device_name"), MEASURES))
    rows["varies"] = labels(list(rows["point"]), shown_elsewhere(rows))
    kinds = ", ".join(dict.fromkeys(kind for kind in rows["memory_kind"] if isinstance(kind, str)))
    notes = [*RULES, f"FLOP convention {CONVENTION}. Memory is the largest rank's {kinds or 'peak'}."]
    if any(rows["gemm_share"].notna()):
        notes.append("The GEMM rate is what a rank's matrix products alone reached in the same run.")
    if any(rows["bubble"].notna()):
        notes.append("Bubble: idle over computing time of all pipeline ranks in the last step, the update not counted.")
    if any(rows["skipped_steps"].notna()):
        notes.append("Skipped: steps whose fp16 gradients overflowed, so that nothing but the loss scale was changed.")
    if any(record.status != "ok" for record in records):
        notes.append(f"{denominators(records)}.")
    if unknown := [record for record in records if not record.has_trusted_code]:
        from impl.own_code import code_of

        named = ", ".join(f"{record.id} ({', '.join(code_of(record.run))})" for record in unknown)
        notes.append(f"Nothing is predicted or claimed of runs with code that only their record names: {named}.")
    return measured("throughput", title, THROUGHPUT, rows, notes)


def scaling_table(records: Sequence[Record]) -> Table:
    """Return the table of weak (constant batch per data-parallel rank) and strong scaling (constant global batch).

    Points are relative to the one with the fewest ranks.

    Raises:
        InputError: the records are of several tiers.
    """
    title, rows = f"Scaling efficiency{about(records)}", scaled(records)
    if rows.empty:
        return Table("scaling", title, (), rows)
    notes = [
        *RULES,
        "Weak scaling keeps the sequences per data-parallel rank, strong scaling the global batch. Speed-up is "
        "throughput over the baseline's, efficiency is throughput per device over the baseline's; the baseline has the "
        "fewest ranks.",
    ]
    return measured("scaling", title, SCALING, rows, notes)


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


def timed(records: Sequence[Record]) -> pd.DataFrame:
    """Return the rows of `measures.frame` of successful, timed runs."""
    rows = frame(records)
    return rows if rows.empty else pd.DataFrame(rows[(rows["status"] == "ok") & rows["tokens_per_second"].notna()])


@once_for_all
def scaled(records: Sequence[Record]) -> pd.DataFrame:
    """Return the rows of `scaling_rows` of timed runs."""
    return scaling_rows(timed(records))


def measured(name: str, title: str, columns: Sequence[Column], rows: pd.DataFrame, notes: Sequence[str]) -> Table:
    """Return a table of timings, with several devices as a column, a single one as a note, and oversubscription marked.

    Simulated numbers are next to measured ones.
    """
    rows["mark"] = [
        "†" * bool(over) + "‡" * bool(by) for over, by in zip(rows["oversubscribed"], rows["disturbed"], strict=True)
    ]
    ran = rows
    if "source" in rows and any(rows["source"] == SIMULATED):
        from harness.analysis.simulated_columns import SYSTEM, beside  # for tables of simulated records

        columns, rows = beside(columns, rows)
        ran, systems = rows[rows["source"] == "measured"], sorted(set(rows[SYSTEM.key].dropna()))
        columns = [c for c in columns if c is not SYSTEM or len(systems) > 1]
        notes = [*notes, f"Simulated: predicted for {', '.join(systems)}, nothing was run."]
    if len(set(ran["device_name"])) <= 1:
        columns = [c for c in columns if c is not DEVICE]
    if len(set(ran["device_name"])) == 1:
        first = ran.iloc[0]
        where = ", ".join(str(first[k]) for k in ("device", "backend") if first[k])
        notes = [*notes, f"Device: {first['device_name']} ({where})."]
    if any(rows["oversubscribed"]):
        notes = [*notes, OVERSUBSCRIBED]
    if any(rows["disturbed"]):
        notes = [*notes, DISTURBED]
    return Table(name, title, shown(columns, rows), rows.reset_index(drop=True), tuple(notes))


def denominators(records: Sequence[Record]) -> str:
    """Return the numbers of points by status, as `12 points: 10 ok, 1 failed, 1 invalid`.

    A point is ok if all its runs are, else it has the status of its first other run. Simulated points are counted
    separately.
    """
    simulated = [record for record in records if record.is_simulated]
    if simulated and len(simulated) < len(records):
        ran = [record for record in records if not record.is_simulated]
        return f"{denominators(ran)}; simulated: {denominators(simulated)}"
    outcome: dict[Run, str] = {}
    for record in records:
        if outcome.get(record.point, "ok") == "ok":
            outcome[record.point] = record.status
    counts = {
        status: list(outcome.values()).count(status) for status in ("ok", *sorted(set(outcome.values()) - {"ok"}))
    }
    points = several(len(outcome), "point") + f" ({len(records)} runs)" * (len(records) > len(outcome))
    return f"{points}: " + ", ".join(f"{count} {status}" for status, count in counts.items())
