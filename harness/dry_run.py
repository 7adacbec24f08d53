"""What `run` would do, told without doing it."""

from typing import Any

from harness.answers import columns, print_json, tell_ignored
from harness.case import shape
from harness.experiment import Experiment, Point
from harness.options import Options
from harness.store import Store
from harness.sweep import Sweep


class Silent:
    """A display that shows nothing."""

    def message(self, text: str) -> None: ...
    def started(self, point: Point) -> None: ...
    def advanced(self, point: Point, steps: list[dict[str, Any]]) -> None: ...
    def finished(self, point: Point, record: dict[str, Any]) -> None: ...
    def skipped(self, point: Point) -> None: ...
    def waiting(self, pending: int, running: int) -> None: ...


def tell_plan(found: Experiment, sweep: Sweep, chosen: list[Point], json: bool) -> int:
    """Print the points that would be started, and for a cluster the scripts that would be submitted."""
    store, options = sweep.store, sweep.options
    todo = sweep.missing(chosen)
    rows = [
        {"id": p.id, "point": p.label, "ranks": p.run.plan.world_size, "why_invalid": _why_invalid(p, options)}
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
    print(f"\n{len(rows)} of {len(chosen)} points would be run; nothing was written")
    return 0


def _why_invalid(point: Point, options: Options) -> str | None:
    """As far as it can be told without reading data."""
    run = point.run
    return options.saving.why_invalid(run) or run.why_invalid() or options.site.why_invalid(run.plan.world_size)


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
