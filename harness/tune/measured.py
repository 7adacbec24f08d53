"""Plans that are run on this machine, and the agreement of their predicted order with the measured one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.experiment.experiment import Point
from harness.launch.attempt import Options
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.slurm import Site
from harness.launch.sweep import Sweep
from harness.records.store import Store
from harness.terminal import console
from harness.tune.search import Judged
from impl.run import Run
from impl.simulator.plans import run_of
from impl.simulator.system import System


class Real:
    """Judge that runs plans on this machine; records are kept, and a run with a finished record is not repeated."""

    def __init__(self, system: System, out: Path) -> None:
        self.store = Store(out, "tune", "small")
        self.store.require_writable()
        self.datasets = Datasets(out / ".synthetic")
        self.options = Options(site=Site(device=system.device.kind))

    def run(self, points: Sequence[Point]) -> None:
        with Display(len(points)) as display:
            Sweep(self.store, self.datasets, self.options, display).run(list(points))

    def judged(self, run: Run) -> Judged:
        """Return the median of the timed steps from a run's record, or the reason why there is none."""
        record = self.store.read(run.id)
        if record is None or record.status != "ok":
            return {"reason": "no record" if record is None else f"{record.status}: {record.reason}"}
        return {"seconds": record.step_seconds}

    def __call__(self, run: Run) -> Judged:
        self.run([Point(run, _label(run))])
        return self.judged(run)


def compared(rows: Sequence[Judged], base: Run, real: Real) -> dict[str, Any]:
    """Return predicted and measured seconds of plans that are run here, and Kendall's tau of their order."""
    from scipy.stats import kendalltau

    runs = [run_of(row, base) for row in rows]
    real.run([Point(run, _label(run)) for run in runs])
    found = []
    for row, run in zip(rows, runs, strict=True):
        judgement = real.judged(run)
        line = {"id": run.id, "point": _label(run), "predicted_seconds": row["seconds"]}
        found.append(line | {f"measured_{name}" if name == "seconds" else name: of for name, of in judgement.items()})
    pairs = [(one["predicted_seconds"], one["measured_seconds"]) for one in found if "reason" not in one]
    tau = float(kendalltau(*zip(*pairs, strict=True))[0]) if len(pairs) > 1 else None  # type: ignore[arg-type]
    off = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return {"runs": found, "kendall_tau": tau, "mape": sum(off) / len(off) if off else None}


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
        text += f" {plan.schedule}" + (f" v={plan.chunks}" if plan.chunks > 1 else "")
    text += f" zero={plan.zero_stage}" * (plan.zero_stage > 0) + f" {plan.recompute}" * (plan.recompute != "none")
    return text + " sequence_parallel" * plan.sequence_parallel
