"""Orders of ranks that nobody has to obey."""

from pathlib import Path
from typing import Any

from harness.rank.orders import TrainingOrders
from harness.records.environment import CODE
from impl.run import Run, to_dict


def made_up(run: Run | None = None, **changes: Any) -> TrainingOrders:
    """Of a run on processors of this machine, without a driver or a claim, and with no limit that a test reaches."""
    run = run or Run()
    given: dict[str, Any] = {
        "id": run.id,
        "experiment": "made_up",
        "tier": "smoke",
        "config": to_dict(run),
        "ranks": run.plan.world_size,
        "on": "local",
        "device": "cpu",
        "code": CODE,
        "folder": CODE,
        "token": "word",
        "submitted": 1e9,
        "time_limit_seconds": 1e6,
        "hang_seconds": 0.0,
        "collective_timeout_seconds": 60.0,
        "data": Path("data"),
        "data_summary": {"name": "synthetic"},
        "environment": {"cores": 2},
        "checkpoints": Path("checkpoints"),
    }
    return TrainingOrders(**given | changes)
