"""Plan of `run`, printed without doing it, and the reasons if no point can run."""

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.experiment.experiment import Experiment, Point
from harness.launch.attempt import Options, shape, why_refused
from harness.launch.preflight import Datasets
from harness.launch.sweep import Sweep
from harness.predict.systems import names
from harness.records.attempts import Attempts
from harness.records.printable import several
from harness.records.store import Store
from harness.terminal import columns, print_json, tell_ignored


def print_plan(found: Experiment, sweep: Sweep, chosen: Sequence[Point], json: bool) -> None:
    """Print the points that would be started, and for a cluster the scripts that would be submitted."""
    store, options = sweep.store, sweep.options
    ids = {point.id for point in chosen}
    # a point that starts from the end of another one waits for it
    reasons = {
        point: why_refused(point.run, store, sweep.datasets, options, ends_to_come=ids)
        for point in sweep.missing(chosen)
    }
    able = [point for point, reason in reasons.items() if reason is None]
    folder = (store.folder / "attempts").resolve()
    scripts = [
        options.site.script(ranks, options.time_limit, count, options.at_once, folder, threads)
        for (ranks, threads), count in Counter([] if options.is_local else map(shape, able)).items()
    ]
    tell_ignored(store)
    if json:
        rows = [
            {"id": point.id, "point": point.label, "ranks": point.run.plan.world_size, "why_invalid": reason}
            for point, reason in reasons.items()
        ]
        print_json({"experiment": found.id, "tier": store.tier, "points": rows, "scripts": scripts})
        return
    if reasons:
        ranks = lambda point: several(point.run.plan.world_size, "rank")
        print(columns([(point.id, point.label, ranks(point), why or "") for point, why in reasons.items()]))
    for script in scripts:
        print(f"\n{script.rstrip()}")
    print(f"\n{len(able)} of {len(chosen)} points would be run; nothing was written")


def none_can_run(chosen: Sequence[Point], store: Store, datasets: Datasets, options: Options) -> dict[Point, str]:
    """Return why each point cannot run here if none can, else an empty dict.

    A point counts as one that can run if it is running, or has a record with another status than invalid.
    """
    attempts, found = Attempts(store).open(), dict[Point, str]()
    for point in chosen:
        head = store.head(point.id)
        if point.id in attempts or (head is not None and head.status != "invalid"):
            return {}
    for point in chosen:
        if (reason := why_refused(point.run, store, datasets, options)) is None:
            return {}
        found[point] = reason
    return found


def print_refused(
    found: Experiment, store: Store, refused: Mapping[Point, str], words: Sequence[str] | None, json: bool
) -> int:
    """Print why no point can run here, each reason once with the number of its points; return 1.

    Args:
        words: options by which `predict` chooses these points, whose command is shown if they can be predicted; None:
            it has no such options.
    """
    are_predicted = all(point.run.engine == "native" and not point.run.problems() for point in refused)
    command = " ".join(["lmscale predict", found.id, "--tier", store.tier, "--system NAME", *(words or ())])
    predict = command if are_predicted and words is not None else None
    if json:
        rows = [{"id": point.id, "point": point.label, "why_invalid": reason} for point, reason in refused.items()]
        print_json({"experiment": found.id, "tier": store.tier, "points": rows, "predict": predict})
        return 1
    for reason, count in Counter(refused.values()).items():
        first = next(point.label for point, other in refused.items() if other == reason)
        print(f"{first if count == 1 else f'{count} points'}: {reason}")
    print(f"\nnone of {len(refused)} points can run here; nothing was written")
    if predict:
        print(f"`{predict}` predicts their time and memory; systems: {', '.join(names())}")
    return 1
