"""Source of records: measured runs, or runs simulated for described systems."""

from collections.abc import Sequence

from harness.records.record import Record


def devices(records: Sequence[Record]) -> dict[str | None, str]:
    """Return the device names of simulated records, by system.

    Stacks on the same hardware share its name, to be compared like runs on it, unless a point was simulated for
    several.
    """
    own = {r.environment.system: r.environment.device_name for r in records if r.is_simulated}
    return {system: f"{device if is_one_each(records) else system}, simulated" for system, device in own.items()}


def to_draw(records: Sequence[Record]) -> tuple[list[Record], str]:
    """Return the measured records, or all if none was measured, and the suffix of a title for the latter case."""
    ran = [record for record in records if not record.is_simulated]
    return (ran, "") if ran or not records else (list(records), ", simulated")


def is_one_each(records: Sequence[Record]) -> bool:
    """Return True if no run was simulated for several systems."""
    ids = [record.id for record in records if record.is_simulated]
    return len(set(ids)) == len(ids)
