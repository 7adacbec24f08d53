"""Records of runs of any size, measured or simulated, that say no more than a rate, a bubble and predicted memory."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from harness.experiment.claims import claims_table
from harness.experiment.experiment import Experiment
from harness.records.measures import flops_per_step
from impl.plan import Plan
from impl.run import Run, to_dict
from tests.harness.made_up_records import record_of

YES, PARTLY, NO, ABSENT = "reproduced", "partly", "not reproduced", "not run here"
A100 = "NVIDIA A100-SXM4-80GB"


@cache
def _bare(run: Run) -> str:
    """Made for one rank: thousands would say the same."""
    alone = replace(run, plan=Plan(), train=replace(run.train, global_batch=1, microbatch=1))
    return json.dumps(record_of(alone) | {"config": to_dict(run), "id": run.id, "ranks": []})


def fast(run: Run, rate: float = 1e9, **more: Any) -> dict[str, Any]:
    """A record whose devices reach a rate of model FLOPs/s."""
    full = json.loads(_bare(run))
    seconds = flops_per_step(full) / (rate * run.plan.world_size)
    return full | {"steps": [step | {"seconds": [seconds]} for step in full["steps"]]} | more


def simulated(
    run: Run,
    rate: float = 1e12,
    *,
    memory: float | None = None,
    bubble: float | None = None,
    in_flight: float | None = None,
    device: str = A100,
    status: str = "ok",
) -> dict[str, Any]:
    """A record as `predict` leaves it."""
    full = fast(run, rate)
    ranks = [] if memory is None else [{"rank": 0, "peak_memory_bytes": memory, "memory_kind": "predicted bytes"}]
    environment = {"system": "made up", "stack": "", "device": "cuda", "device_name": device, "backend": "nccl"}
    steps = [{"step": 0, "seconds": full["steps"][0]["seconds"]}] if status == "ok" else []
    prediction = {"bubble": bubble, "microbatches_in_flight": in_flight}
    head = {"source": "simulated", "tier": "paper", "status": status, "environment": environment}
    return full | head | {"steps": steps, "ranks": ranks, "prediction": prediction, "evaluations": []}


def verdicts(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[str]:
    """On all claims, by records that are either all measured or all simulated."""
    found = claims_table(experiment.claims, records).frame
    return list(found[next(name for name in reversed(found.columns) if name.startswith("verdict"))])
