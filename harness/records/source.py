"""Where the numbers of several records come from: runs, or the simulation of runs on described systems."""

from collections.abc import Sequence

from harness.records.record import Record


def devices(records: Sequence[Record]) -> dict[str | None, str]:
    """What the devices of simulated records are called, by system: stacks on the same hardware are compared like runs
    on it, unless a point was simulated for several of them."""
    own = {r.environment.system: r.environment.device_name for r in records if r.is_simulated}
    return {system: f"{device if is_one_each(records) else system}, simulated" for system, device in own.items()}


def to_draw(records: Sequence[Record]) -> tuple[list[Record], str]:
    """The records that were measured, or all where none was, and what a title says then."""
    ran = [record for record in records if not record.is_simulated]
    return (ran, "") if ran or not records else (list(records), ", simulated")


def is_one_each(records: Sequence[Record]) -> bool:
    """Whether no run was simulated for several systems."""
    ids = [record.id for record in records if record.is_simulated]
    return len(set(ids)) == len(ids)
