"""Site whose ranks have a fault, and a harness that has one itself."""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.launch import sweep as sweeps
from harness.launch.flags import Saving
from harness.launch.site_file import Cluster
from harness.launch.slurm import Site, Where
from harness.records.attempts import Attempts
from harness.records.store import Store, write_atomically
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Run, from_dict
from tests.faults.fault import Fault, at_renaming
from tests.harness.small_runs import Told, small, sweep

SAVING = Saving(checkpoint_every=2)
STEPS = 6
LAYOUTS = {"dp2": Plan(dp=2), "zero": Plan(dp=2, zero_stage=2), "pp2": Plan(pp=2), "tp2": Plan(tp=2)}


def run_of(layout: str, tokens: Path) -> Run:
    """Return a short run of two ranks that trains, saves and evaluates."""
    model = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=16, dropout=0.1)
    short = small(tokens, steps=STEPS)
    return replace(short, model=model, plan=LAYOUTS[layout], evaluation=EvaluationConfig(sequences=4, every=3))


def store_of(folder: Path) -> Store:
    return Store(folder / "out", "faults", "smoke")


def place(on: Where) -> dict[str, Any]:
    """Return settings of a site: this machine, or a node for each rank in the cluster's default partition."""
    return {"on": on, "cluster": Cluster(ranks_per_node=1, memory_per_rank="1G")}


@dataclass(frozen=True)
class FaultySite(Site):
    """Site that writes a fault into the orders of ranks, and may have one of its own after their start."""

    fault: dict[str, Any] = field(default_factory=dict)
    own: Fault | None = None

    def submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int = 0) -> list[str]:
        for attempt in attempts:
            spec = json.loads((attempt / "spec.json").read_text())
            spec |= {"module": "tests.faults.rank", "fault": self.fault}
            write_atomically(attempt / "spec.json", json.dumps(spec))
        found = super().submit(attempts, ranks, seconds, at_once)
        if self.own:
            self.own.strike()
        return found


def main(folder: Path, run: Run, on: Where, phase: str, what: str) -> None:
    """Sweep one point, with a fault of this harness in a phase."""
    fault, store = Fault(what, folder / "fired"), store_of(folder)
    told = Told()
    pausing = {"rank": 0, "phase": "forward", "what": "pause 3", "fired": str(folder / "paused")}
    chosen = FaultySite(fault=pausing, own=fault if phase == "submission" else None, **place(on))
    if phase == "start-up":
        told.on_look = lambda point: fault.strike()
    elif phase == "training":
        saved = Attempts(store).checkpoints(run.id) / "step-00000002"
        told.on_look = lambda point: fault.strike() if saved.exists() else None
    elif phase in ("record write", "clearing up"):
        at_renaming(fault, f"{run.id}.json", behind=phase == "clearing up")
    sweeps.SCHEDULER_SECONDS = 1.0  # shorter than the pause
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sweep(store, [run], site=chosen, told=told, saving=SAVING)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["folder"]), from_dict(given["run"]), given["on"], given["phase"], given["what"])
