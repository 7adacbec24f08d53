"""Steps that `run` and `train` share: choose a site, check what can run there, and run it."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.experiment.experiment import Point
from harness.launch.attempt import Options
from harness.launch.dry_run import none_can_run
from harness.launch.flags import Place, Saving
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.slurm import Site
from harness.launch.sweep import Sweep
from harness.launch.trackers import Trackers, tracker_names
from harness.predict.systems import load_system
from harness.rank import torchrun
from harness.rank.devices import gpu_count
from harness.records.record import Record
from harness.records.store import FINISHED, Store
from harness.records.writable import require_writable
from impl.data.config import EMBEDDED
from impl.errors import InputError
from impl.own_code import code_of, hashes
from impl.run import Run
from impl.simulator.system import System


def site_of(place: Place, runs: Sequence[Run], *, is_there: bool = True) -> Site:
    """Return the site to run at; `auto` takes GPUs if they suffice for every run, so that all run on the same device.

    Raises:
        InputError: its settings are not valid, or it is not available, though it should be (`is_there`).
    """
    joined = torchrun.join() if place.on == "torchrun" else None
    device, cluster = place.device, place.cluster()
    if device == "auto":
        here = joined[0].per_node if joined else max(run.plan.world_size for run in runs)
        device = "cuda" if place.on != "slurm" and gpu_count() >= here else "cpu"
    if joined is not None:
        return Site("local", device, place.allow_oom, cluster, joined[0], joined[1].put)
    assert place.on != "torchrun"
    site = Site(place.on, device, place.allow_oom, cluster)
    if is_there:
        site.require()
    return site


def forecaster(name: str | None, site: Site) -> System | None:
    """Return the system that `--forecast` names; None if it names none.

    Raises:
        InputError: it does not exist, or has other devices than the site.
    """
    system = load_system(name) if name else None
    if system and system.device.kind != site.device:
        raise InputError(
            f"--forecast {name}: predicts steps on {system.device.kind}, these runs are on {site.device}; "
            "valid: a system with such devices, as `calibrate` describes this machine"
        )
    return system


def carry_out(chosen: list[Point], store: Store, datasets: Datasets, options: Options) -> None:
    """Run points into a writable folder, next to which the embedded language is kept, if records there are alike."""
    from harness.cli.status import live_page

    require_same_input(chosen, store, datasets)
    require_writable(store.recorded)
    datasets.keep_in(synthetic_cache(store))
    with live_page(options.saving.html, store, chosen):
        sweep(chosen, store, datasets, options)


def require_certified(chosen: Sequence[Point], store: Store, saving: Saving) -> None:
    """Check that no point to be certified has a finished record without a certificate, which would be left as it is.

    Raises:
        InputError: one has.
    """
    for point in chosen if saving.certify else ():
        record = store.read(point.id)
        if record is not None and record.status in FINISHED and not record.certified:
            has = f"{point.label} has a record without a certificate in {store.folder}"
            raise InputError(f"--certify: {has}; valid: --out with another folder")


def sweep(chosen: list[Point], store: Store, datasets: Datasets, options: Options) -> None:
    """Bring every point to a record, with a display and trackers; tests that are to train nothing replace this."""
    trackers = Trackers(tracker_names(options.saving.track), store.out)
    with Display(len(chosen), trackers=trackers) as display:
        Sweep(store, datasets, options, display).run(chosen)


@contextlib.contextmanager
def nothing_written(store: Store, data: str | None = None) -> Iterator[Datasets]:
    """Yield token folders, `data` among them, for a check of what can run; what is written is removed afterwards."""
    cache = synthetic_cache(store)
    with tempfile.TemporaryDirectory() as scratch:
        datasets = Datasets(cache if cache.exists() else Path(scratch) / ".synthetic")
        if data:
            datasets.open(data)
        yield datasets


def refusals(points: Sequence[Point], store: Store, datasets: Datasets, options: Options) -> dict[Point, str]:
    """Return why each point cannot run here if none can, else an empty dict."""
    require_same_input(points, store, datasets)
    return none_can_run(points, store, datasets, options)


def require_same_input(points: Sequence[Point], store: Store, datasets: Datasets) -> None:
    """Check that finished records are of the text and the user's own code that runs of the points would read now.

    Raises:
        InputError: one is of another text than is in its token folder now, or of other code than is in its file.
    """
    for run in (point.run for point in points):
        made_elsewhere = run.data.dataset not in EMBEDDED or code_of(run)
        record = store.read(run.id) if made_elsewhere and store.path(run.id).exists() else None
        if record is not None and record.status in FINISHED and (other := _other_input(run, record, datasets)):
            what, then = other
            of = f"{what}, but {store.path(run.id)} is of {then:.12}"
            raise InputError(f"{of}; valid: that again, or a folder of its own for this one, with --out")


def _other_input(run: Run, record: Record, datasets: Datasets) -> tuple[str, str] | None:
    """Return the data that a run would read now, and the hash of its record's data, if they differ."""
    made_by = record.environment.own_code or {}
    for name, now in hashes(run).items():
        if (then := made_by.get(name, now)) != now:
            return f"{name} is code {now[:12]}", then
    if run.data.dataset in EMBEDDED or record.resolved.data is None:
        return None
    try:
        now = datasets.open(run.data.dataset).sha256
    except InputError:  # why the point cannot run is said elsewhere
        return None
    then = record.resolved.data.sha256
    return (f"{run.data.dataset} is dataset {now[:12]}", then) if then not in (None, now) else None


def synthetic_cache(store: Store) -> Path:
    """Return the folder of the embedded language: next to the experiments, so that all of them read one copy."""
    up = len(Path(store.experiment).parts) + 1
    return store.folder.parents[up - 1] / ".synthetic"
