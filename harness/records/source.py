"""Where a record's numbers come from: a run, or the simulation of one on a described system."""

from collections.abc import Sequence

from harness.records.labels import Record
from harness.records.store import SIMULATED


def devices(records: Sequence[Record]) -> dict[str, str]:
    """What the devices of simulated records are called, by system: stacks on the same hardware are compared like runs
    on it, unless a point was simulated for several of them."""
    own = {r["environment"]["system"]: r["environment"]["device_name"] for r in records if is_simulated(r)}
    return {system: f"{device if is_one_each(records) else system}, simulated" for system, device in own.items()}


def is_simulated(record: Record) -> bool:
    return record.get("source") == SIMULATED


def to_draw(records: Sequence[Record]) -> tuple[list[Record], str]:
    """The records that were measured, or all where none was, and what a title says then."""
    ran = [record for record in records if not is_simulated(record)]
    return (ran, "") if ran or not records else (list(records), ", simulated")


def is_one_each(records: Sequence[Record]) -> bool:
    """Whether no run was simulated for several systems."""
    ids = [record["id"] for record in records if is_simulated(record)]
    return len(set(ids)) == len(ids)
