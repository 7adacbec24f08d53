"""Default folders of records: the user's own, or the committed ones of the checkout.

A sweep (`run`, `status`, `watch`, `cancel`, `predict EXPERIMENT`) uses the user's own folder, so that it never changes
the committed archive. Verbs that read records (`table`, `claims`, `report`, `export`, `import`) use, for each tier, the
user's own measured records if there are any, else the committed ones, and likewise for each simulated system. A folder
given by `--out` or `--results` is used as it is.
"""

from pathlib import Path

from harness.experiment.findings import findings
from harness.experiment.tiers import TIERS, Tier
from harness.records.attempts import Attempts
from harness.records.environment import CODE
from harness.records.store import SIMULATED, Store
from impl.errors import InputError

OWN = Path("runs")
"""Folder of the user's own records, in the working directory; ignored by git in a checkout."""
ARCHIVE = CODE / "results"
"""Folder of the committed records; an installed package has none."""


def sweep_folder(out: Path | None) -> Path:
    """Return the folder that a sweep works in.

    Raises:
        InputError: it is a file.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"{out}: is no folder; valid: a folder of records")
    return OWN if out is None else out


def stores(out: Path | None, experiment: str, tier: Tier) -> list[Store]:
    """Return the stores that a tier's records are read from: the measured ones, then one for each system.

    Raises:
        InputError: the folder does not exist.
    """
    if out is not None:
        if not out.is_dir():
            raise InputError(f"{out}: no such folder; valid: a folder of records")
        return _of(out, experiment, tier)
    archived, own = ({store.system: store for store in _of(folder, experiment, tier)} for folder in (ARCHIVE, OWN))
    chosen = archived | {system: store for system, store in own.items() if _has_records(store)}
    measured = chosen.pop(None)
    return [measured, *(chosen[system] for system in sorted(filter(None, chosen)))]


def reading_tier(out: Path | None, experiment: str) -> Tier | None:
    """Return the largest tier with measured records, else the largest with simulated ones; None without records.

    The user's own records have precedence over the committed ones.
    """
    for folder in (OWN, ARCHIVE) if out is None else (out,):
        for pattern in ("records/*.json", f"{SIMULATED}/*/*.json"):
            for tier in TIERS[::-1]:
                if any((folder / experiment / tier).glob(pattern)):
                    return tier
    return None


def sweep_tier(out: Path, experiment: str) -> Tier:
    """Return the tier with open attempts, else the one that records are read from, else the default of `run`.

    Raises:
        InputError: several tiers have open attempts.
    """
    busy: list[Tier] = [tier for tier in TIERS if Attempts(Store(out, experiment, tier)).open()]
    if len(busy) > 1:
        raise InputError(f"{experiment} has jobs under way at several tiers; --tier says which: {', '.join(busy)}")
    if busy:
        return busy[0]
    return reading_tier(out, experiment) or TIERS[0]


def of_archive(experiment: str, tier: Tier) -> str | None:
    """Return a line that points to the committed records if the user has none of this tier; else None."""
    if any(map(_has_records, _of(OWN, experiment, tier))) or not any(map(_has_records, _of(ARCHIVE, experiment, tier))):
        return None
    return f"{OWN} has no records of this tier; the committed ones are in {ARCHIVE}, which --out reads"


def own_tiers(experiment: str) -> list[Tier]:
    """Return the tiers of which the user's own folder has records of an experiment."""
    return [tier for tier in TIERS if any(map(_has_records, _of(OWN, experiment, tier)))]


def read_from(out: Path | None, experiments: list[str]) -> str:
    """Return a line that names the folders whose records were read; empty if a folder was given."""
    if out is not None:
        return ""
    own = list(filter(own_tiers, experiments))
    others = f"the committed ones in {ARCHIVE}" if ARCHIVE.exists() else "none, as they come with a checkout only"
    if len(own) == len(experiments):
        return f"records: your own in {OWN}, before {others}"
    return f"records: your own in {OWN} ({', '.join(own)}), else {others}" if own else f"records: {others}"


def findings_of(out: Path | None, experiment: str) -> str:
    """Return an experiment's findings from a folder, by default the user's own, else the committed ones; empty if none.

    Raises:
        InputError: a placeholder in the findings is not that of one cell.
    """
    return findings(sweep_folder(out) / experiment) or findings(ARCHIVE / experiment)


def _of(out: Path, experiment: str, tier: Tier) -> list[Store]:
    measured = Store(out, experiment, tier)
    return [measured, *measured.simulated()]


def _has_records(store: Store) -> bool:
    return any(store.recorded.glob("*.json"))
