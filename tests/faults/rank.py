"""A rank with one fault in one phase: the worker itself, some of whose functions are replaced before it starts.

"fault" in its orders holds {"rank", "phase", "what", "fired"}; it happens once, however often the point is tried.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from harness.rank import results, worker
from impl.checkpoint import Checkpoints
from impl.optim import MasterAdamW
from impl.pipeline.engine import Engine
from impl.pipeline.schedule import Op
from impl.train import Trainer
from tests.faults.fault import Fault, at_renaming

AT_STEP = 4
"""Step in which faults of a step happen: after two checkpoints, the second of which may still be being written."""
AT_SAVE = 2
"""Save of an attempt in which faults of a save happen."""


def put(fault: Fault, phase: str, result: str) -> None:
    """Make the fault happen when the worker comes to the phase; `result` is the name of the file of its results."""
    {
        "rendezvous": lambda: before(worker, "join", fault),
        "start-up": lambda: before(worker, "make", fault),
        "forward": lambda: in_a_step(fault, Op.F),
        "backward": lambda: in_a_step(fault, Op.B),
        "optimizer": lambda: in_a_step(fault, None),
        "checkpoint save": lambda: before(Checkpoints, "_write", fault, AT_SAVE),
        "checkpoint publish": lambda: before(dcp, "save", fault, AT_SAVE, behind=True),
        "evaluation": lambda: before(Trainer, "evaluate", fault),
        "steps log": lambda: writes_to_a_full_disk(fault),
        "record write": lambda: at_renaming(fault, result),
    }[phase]()


def before(owner: Any, name: str, fault: Fault, call: int = 1, *, behind: bool = False) -> None:
    """Make the fault happen just before, or `behind`, the call of a function with this number."""
    function, calls = getattr(owner, name), itertools.count(1)

    def instead(*args: Any, **kwargs: Any) -> Any:
        is_due = next(calls) == call
        if is_due and not behind:
            fault.strike()
        done = function(*args, **kwargs)
        if is_due and behind:
            fault.strike()
        return done

    setattr(owner, name, instead)


def in_a_step(fault: Fault, op: Op | None) -> None:
    """Make the fault happen in a step: after a pass of this kind, or without one before the update."""
    at: list[int] = [-1]
    step, compute, update = Trainer.step, Engine._compute, MasterAdamW.step

    def stepping(self: Trainer, i: int, *args: Any) -> Any:
        at[0] = i
        try:
            return step(self, i, *args)
        finally:
            at[0] = -1

    def computing(self: Engine, of: Any, forward: Any, action: Any, received: Any) -> None:
        compute(self, of, forward, action, received)
        if at[0] >= AT_STEP and action.op is op:
            fault.strike()

    def updating(self: MasterAdamW, lr: float) -> None:
        if at[0] >= AT_STEP and op is None:
            fault.strike()
        update(self, lr)

    Trainer.step, Engine._compute, MasterAdamW.step = stepping, computing, updating  # type: ignore[method-assign]


def writes_to_a_full_disk(fault: Fault) -> None:
    """Let the rank write its steps to a device that is always full."""
    really_open = open

    def instead(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_log = str(path).endswith(".steps.jsonl")
        return really_open("/dev/full" if is_log and fault.is_due() else path, *args, **kwargs)

    results.open = instead  # type: ignore[attr-defined]


def main(attempt: Path, rank: int, *place: int, rendezvous: str) -> int:
    """Return the worker's exit status, if it comes to that."""
    fault = json.loads((attempt / "spec.json").read_text())["fault"]
    if fault["rank"] == rank:
        put(Fault(fault["what"], Path(fault["fired"])), fault["phase"], f"rank-{rank}.json")
    return worker.main(attempt, rank, *place, rendezvous=rendezvous)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
