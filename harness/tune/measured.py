"""Plans that are run on this machine, and the agreement of their predicted order with the measured one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from harness.experiment.experiment import Point
from harness.launch.attempt import Options
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.slurm import Site
from harness.launch.sweep import Sweep
from harness.rank.devices import DeviceKind
from harness.records.store import Store
from harness.terminal import console
from harness.tune.search import Judged
from impl.pipeline.schedules import short
from impl.run import Run
from impl.simulator.plans import run_of

Machine = Callable[[Sequence[Run]], list[Judged]]
"""Function that runs plans and returns what each took."""


def run_here(runs: Sequence[Run], store: Store, device: DeviceKind) -> list[Judged]:
    """Run plans on this machine, unless they have a finished record, and return the median of the timed steps of each.

    A run that fails has the reason instead.
    """
    options = Options(site=Site(device=device))
    with Display(len(runs)) as display:
        Sweep(store, Datasets(store.out / ".synthetic"), options, display).run(
            [Point(run, _label(run)) for run in runs]
        )
    found: list[Judged] = []
    for record in (store.read(run.id) for run in runs):
        if record is None or record.status != "ok":
            found.append({"reason": "no record" if record is None else f"{record.status}: {record.reason}"})
        else:
            found.append({"seconds": record.step_seconds})
    return found


def compared(rows: Sequence[Judged], base: Run, real: Machine) -> dict[str, Any]:
    """Return predicted and measured seconds of plans that are run here, and Kendall's tau of their order."""
    from scipy.stats import kendalltau

    runs = [run_of(row, base) for row in rows]
    found = []
    for row, run, judgement in zip(rows, runs, real(runs), strict=True):
        line = {"id": run.id, "point": _label(run), "predicted_seconds": row.get("predicted_seconds", row["seconds"])}
        found.append(line | {f"measured_{name}" if name == "seconds" else name: of for name, of in judgement.items()})
    pairs = np.array([(one["predicted_seconds"], one["measured_seconds"]) for one in found if "reason" not in one])
    tau = float(kendalltau(*pairs.T)[0]) if len(pairs) > 1 else None  # type: ignore[arg-type]
    mape = float(np.mean(abs(pairs[:, 0] / pairs[:, 1] - 1))) if len(pairs) else None
    return {"runs": found, "kendall_tau": tau, "mape": mape}


def print_compared(document: dict[str, Any]) -> None:
    """Print the table of `compared`, the fastest first."""
    table = Table("plan", "predicted (s)", "measured (s)", "off", title="measured here", title_justify="left")
    for one in sorted(document["runs"], key=lambda one: one.get("measured_seconds", float("inf"))):
        measured = one.get("measured_seconds")
        off = one["reason"] if measured is None else f"{one['predicted_seconds'] / measured - 1:+.1%}"
        table.add_row(
            one["point"], f"{one['predicted_seconds']:.4f}", "" if measured is None else f"{measured:.4f}", off
        )
    console(table).print(table)
    if document["kendall_tau"] is not None:
        print(f"order: Kendall's tau {document['kendall_tau']:.2f}; off by {document['mape']:.1%} on average")


def _label(run: Run) -> str:
    plan = run.plan
    text = f"tp={plan.tp} pp={plan.pp} dp={plan.dp} b={run.train.microbatch}"
    if plan.pp > 1:
        text += f" {short(plan.schedule)}" + (f" v={plan.chunks}" if plan.chunks > 1 else "")
    text += f" zero={plan.zero_stage}" * (plan.zero_stage > 0) + f" {plan.recompute}" * (plan.recompute != "none")
    return text + " sequence_parallel" * plan.sequence_parallel
