"""Plan of `run`, printed without doing it, and the reasons if no point can run."""

from collections.abc import Mapping, Sequence

from harness.experiment.experiment import Experiment, Point
from harness.launch.attempt import shape, why_refused
from harness.launch.options import Options
from harness.launch.preflight import Datasets
from harness.launch.sweep import Sweep
from harness.predict.systems import names
from harness.records.store import Store
from harness.terminal import columns, print_json, tell_ignored


def print_plan(found: Experiment, sweep: Sweep, chosen: list[Point], json: bool) -> int:
    """Print the points that would be started, and for a cluster the scripts that would be submitted; return 0."""
    store, options = sweep.store, sweep.options
    todo = sweep.missing(chosen)
    ids = {point.id for point in chosen}
    rows = [
        {
            "id": p.id,
            "point": p.label,
            "ranks": p.run.plan.world_size,
            # a point that starts from the end of another one waits for it
            "why_invalid": why_refused(p.run, store, sweep.datasets, options, ends_to_come=ids),
        }
        for p in todo
    ]
    scripts = _scripts([p for p, row in zip(todo, rows, strict=True) if not row["why_invalid"]], store, options)
    tell_ignored(store)
    if json:
        document = {"experiment": found.id, "tier": store.tier, "points": rows, "scripts": scripts}
        return print_json(document)
    if rows:
        print(columns([(r["id"], r["point"], f"{r['ranks']} ranks", r["why_invalid"] or "") for r in rows]))
    for script in scripts:
        print(f"\n{script.rstrip()}")
    count = sum(not row["why_invalid"] for row in rows)
    print(f"\n{count} of {len(chosen)} points would be run; nothing was written")
    return 0


def none_can_run(chosen: list[Point], store: Store, datasets: Datasets, options: Options) -> dict[Point, str]:
    """Return why each point cannot run here if none can, else an empty dict.

    A point counts as one that can run if it is running, or has a record with another status than invalid.
    """
    attempts, found = store.attempts(), dict[Point, str]()
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
    found: Experiment, store: Store, refused: Mapping[Point, str], words: Sequence[str], json: bool
) -> int:
    """Print why no point can run here, each reason once with the number of its points; return 1.

    Args:
        words: options that choose these points, for the command that predicts them, shown if that is of the same runs.
    """
    rows = [{"id": point.id, "point": point.label, "why_invalid": reason} for point, reason in refused.items()]
    are_predicted = all(run.engine == "native" and not run.problems() for run in (point.run for point in refused))
    command = " ".join(["lmscale predict", found.id, "--tier", store.tier, "--system NAME", *words])
    predict = command if are_predicted else None
    if json:
        print_json(
            {"experiment": found.id, "tier": store.tier, "points": rows, "predict": predict if are_predicted else None}
        )
        return 1
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["why_invalid"], []).append(row["point"])
    for reason, labels in reasons.items():
        print(f"{labels[0] if len(labels) == 1 else f'{len(labels)} points'}: {reason}")
    print(f"\nnone of {len(rows)} points can run here; nothing was written")
    if predict:
        print(f"`{predict}` predicts their time and memory; systems: {', '.join(names())}")
    return 1


def _scripts(todo: list[Point], store: Store, options: Options) -> list[str]:
    if options.is_local:
        return []
    shapes: dict[tuple[int, int], int] = {}
    for point in todo:
        shapes[shape(point)] = shapes.get(shape(point), 0) + 1
    folder = (store.folder / "attempts").resolve()
    return [
        options.site.script(ranks, options.time_limit_seconds, count, options.at_once, folder, threads)
        for (ranks, threads), count in shapes.items()
    ]
