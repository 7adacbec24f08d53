"""What `import lmscale` offers notebooks and programs: `run` trains, `load` reads records, `frame` tabulates them."""

from collections import UserList
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.experiment import folders
from harness.experiment.experiment import Experiment, points
from harness.experiment.loading import load as by_name
from harness.experiment.tiers import TIERS, Tier
from harness.records import measures
from harness.records.printable import several
from harness.records.record import Record
from harness.records.store import SIMULATED, Store
from impl.errors import InputError
from impl.run import Run

if TYPE_CHECKING:
    import pandas as pd

OF_RUNS = "mine"
"""Experiment that runs without one are kept under."""


class Records(UserList[Record]):
    """Records of runs, in the order of their ids; `frame` has a row for each."""

    def __repr__(self) -> str:
        places = sorted({f"{record.experiment}, {record.tier}" for record in self})
        return f"<{several(len(self), 'record')} of {'; '.join(places) or 'nothing'}>"

    def frame(self) -> "pd.DataFrame":
        """Return a row for each run, with the columns that docs/results.md lists, in SI units; NaN: not measured."""
        found = measures.frame(self.data)  # in an order of its own
        return found.assign(point=[run.id for run in found["point"]] if len(found) else [])

    def evaluations(self) -> "pd.DataFrame":
        """Return a row for each run and text: its last perplexities and accuracy."""
        from harness.records.evaluations import evaluations

        return evaluations(self.data)


def run(
    what: str | Path | Run | Iterable[Run], *, tier: Tier = "smoke", out: str | Path = folders.OWN,
    only: str | None = None, track: str = "",
) -> Records:  # fmt: skip
    """Train what has no finished record yet on this machine, and return the records of all of it.

    Args:
        what: id of an experiment, a file with one (`mine.py`), a run, or several.
        tier: that of the experiment; runs without one are kept as of tier `smoke`.
        out: folder of the records.
        only: only points whose label contains this, or matches it as a pattern, or whose id starts with it.
        track: trackers that follow the runs, as `--track`.

    Raises:
        InputError: there is no such experiment, or a run cannot be carried out; with the reason.
    """
    from harness.cli.sweeps import carry_out, nothing_written, site_of
    from harness.launch.attempt import Options, why_refused
    from harness.launch.flags import Place, Saving

    _require_tier(tier)
    _require("out", out, str | Path, "the folder of the records")
    _require("only", only, str | None, "part of a point's label, or the beginning of its id")
    _require("track", track, str, "trackers, as of `--track`")
    if isinstance(what, str | Path):
        found = _experiment(str(what))
        name, runs = found.id, list(found.runs[tier])
    else:
        runs = [what] if isinstance(what, Run) or not isinstance(what, Iterable) else list(what)
        name, tier, valid = OF_RUNS, "smoke", "the id of an experiment, a file with one, a Run, or several Runs"
        for one in runs or [None]:
            _require("run", one, Run, valid)
    chosen, store, saving = points(runs, only), Store(Path(out), name, tier), Saving(track=track)
    saving.require(Path(out))
    options = Options(site=site_of(Place(), runs), saving=saving)
    with nothing_written(store) as datasets:
        ends = {one.id for one in chosen}
        for point in chosen:
            if reason := why_refused(point.run, store, datasets, options, ends_to_come=ends):
                raise InputError(f"{point.label}: {reason}")
        carry_out(chosen, store, datasets, options)
    return Records(record for point in chosen if (record := store.read(point.id)) is not None)


def load(where: str | Path, *, tier: Tier | None = None) -> Records:
    """Return the records in a folder, such as `runs`, `runs/quickstart/small` or one of `inbox`, or of an experiment.

    Args:
        where: a folder, whose subfolders are searched, too; or the id of an experiment, whose own records in `runs` are
            read before committed ones.
        tier: only that one; of an experiment, by default the largest with records.

    Raises:
        InputError: there are none.
    """
    _require("load", where, str | Path, "a folder with records, or the id of an experiment")
    folder = Path(where)
    _require_tier(tier or TIERS[0])
    if not folder.is_dir() and (str(where) == str(folders.OWN) or len(folder.parts) > 2):
        raise InputError(f"{where}: is no folder; valid: one with records, or the id of an experiment")
    if folder.is_dir():
        stores = [*_stores(folder.resolve(), tier)]
    else:
        name = _experiment(str(where)).id
        stores = folders.stores(None, name, tier or folders.reading_tier(None, name) or TIERS[0])
    found = Records(record for store in stores for record in store.records())
    if not found:
        why = "; ".join(f"{path.name}: {reason}" for store in stores for path, reason in store.ignored.items())
        unreadable = f" that can be read ({why})" if why else ""
        raise InputError(f"{where}: has no records{unreadable}; `lmscale run` makes some")
    return found


def frame(records: Iterable[Record]) -> "pd.DataFrame":
    """Return a row for each record, as `Records.frame`; of several folders, for instance."""
    found = list(records) if isinstance(records, Iterable) else [records]
    for one in found:
        _require("frame", one, Record, "records, as `load` and `run` return them")
    return Records(found).frame()


def _require(name: str, value: object, kind: Any, valid: str) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name}: {value!r:.60} is of type {type(value).__name__}; valid: {valid}")


def _require_tier(tier: str) -> None:
    if tier not in TIERS:
        raise InputError(f"tier {tier!r}; valid: {', '.join(TIERS)}")


def _experiment(name: str) -> Experiment:
    """Return the experiment with this name, which a folder `experiments` of the working directory may hold, too."""
    from harness.cli.main import add_experiments

    add_experiments(Path("experiments").resolve())
    return by_name(name)


def _stores(folder: Path, tier: Tier | None) -> Iterator[Store]:
    """Yield the stores of tiers in or below a folder; an experiment's id has one part or two."""
    for place in sorted({path.parent for name in ("records", SIMULATED) for path in folder.rglob(name)}):
        if place.name not in ((tier,) if tier else TIERS):
            continue
        parts = place.parent.parts
        for depth in (2, 1):  # of `paper/question` or `quickstart`, whichever the records say
            store = Store(Path(*parts[:-depth]), "/".join(parts[-depth:]), place.name)
            if any(of.records() for of in (store, *store.simulated())):
                yield from (store, *store.simulated())
                break
