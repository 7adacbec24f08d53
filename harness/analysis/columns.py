"""Columns that tables of points have in common: fields of a run, and measures."""

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

from harness.analysis.render import Column
from harness.analysis.tables import GIB, MILLI, PERCENT
from impl.pipeline.schedules import short
from impl.run import Run

MIB, GB = 2**20, 1e9
BYTES = {"MiB": MIB, "GiB": GIB, "MB": 1e6, "GB": GB}
"""Bytes in each unit in which tables show them."""


def of_run(key: str, header: str, value: Callable[[Run], Any], *, text: bool = False) -> Column:
    """Return a table's column whose cell is computed from the run of its row, as its learning rate."""
    return Column(key=key, header=header, text=text, of=lambda point: value(point.run))


def share(key: str, header: str, of: Callable[[Any], Any] | None = None, digits: int = 3) -> Column:
    """Return a column of fractions, shown in percent."""
    return Column(key=key, header=header, unit="%", si="fraction", scale=PERCENT, digits=digits, of=of)


def milliseconds(key: str, header: str, of: Callable[[Any], Any] | None = None) -> Column:
    """Return a column of seconds, shown in milliseconds."""
    return Column(key=key, header=header, unit="ms", si="s", scale=MILLI, of=of)


def in_bytes(
    unit: str, key: str, header: str, of: Callable[[Any], Any] | None = None, digits: int = Column.digits
) -> Column:
    """Return a column of bytes, shown in a unit of BYTES."""
    return Column(key=key, header=header, unit=unit, si="B", scale=BYTES[unit], digits=digits, of=of)


gigabytes, gib, mebibytes = partial(in_bytes, "GB"), partial(in_bytes, "GiB", digits=3), partial(in_bytes, "MiB")


def ratio(key: str, header: str, of: Callable[[Any], Any]) -> Column:
    """Return a column of ratios."""
    return Column(key=key, header=header, si="ratio", digits=3, of=of)


def printed(key: str, header: str, unit: str = "", scale: float = 1.0, si: str = "", digits: int = 3) -> Column:
    """Return a column of numbers that a paper prints."""
    value = lambda point: point.printed.get(key)
    return Column(key=key, header=header, unit=unit, scale=scale, si=si, digits=digits, of=value)


def value(point: Any, column: Column) -> Any:
    """Return the value of a point in a column."""
    assert column.of
    return column.of(point)


def values(point: Any, columns: Iterable[Column]) -> tuple[Any, ...]:
    """Return the values of a point in some columns."""
    return tuple(value(point, column) for column in columns)


MODEL = Column(key="model", header="model", text=True, of=lambda point: point.model)
PARAMETERS = Column(key="parameters", header="parameters", of=lambda point: round(point.parameters))
RANKS = of_run("ranks", "ranks", lambda run: run.plan.world_size)
TP = of_run("tp", "tp", lambda run: run.plan.tp)
PP = of_run("pp", "pp", lambda run: run.plan.pp)
DP = of_run("dp", "dp", lambda run: run.plan.dp)
SCHEDULE = of_run("schedule", "schedule", lambda run: short(run.plan.schedule), text=True)
CHUNKS = of_run("chunks", "chunks", lambda run: run.plan.chunks)
SCATTER_GATHER = of_run(
    "scatter_gather", "scatter/gather", lambda run: "on" if run.plan.scatter_gather else "off", text=True
)
ZERO_STAGE = of_run("zero_stage", "ZeRO stage", lambda run: run.plan.zero_stage)
MICROBATCH = of_run("microbatch", "microbatch", lambda run: run.train.microbatch)
MICROBATCHES = of_run("microbatches", "micro-batches", lambda run: run.microbatches)
BATCH = of_run("global_batch", "global batch", lambda run: run.train.global_batch)
PREDICTED_BUBBLE = share("predicted_bubble", "simulated")

per_device = attrgetter("tokens_per_second_per_device")
DEVICE_RATE = Column(
    key="rate", header="rate per device", unit="tokens/s", si="tokens/s", of=lambda point: point.mean(per_device)
)
PRINTED_DEVICE_RATE = printed("published_rate", "rate per device, published", "tokens/s", si="tokens/s")


def sent(axis: str, header: str) -> Column:
    """Return the column of the bytes that the busiest rank sends along an axis of the plan, empty for a degree of 1."""
    key, degree = f"{axis}_bytes_sent", attrgetter(f"run.plan.{axis}")
    of = lambda point: point.mean(attrgetter(key)) if degree(point) > 1 else None
    return in_bytes("MiB", key, header, of, 3)


PP_SENT, TP_SENT = sent("pp", "sent to other stages"), sent("tp", "sent within layers")
