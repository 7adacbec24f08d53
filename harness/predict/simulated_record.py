"""The record of a run that is simulated on a described system, not carried out."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from harness.predict.doubt import doubt
from harness.predict.interval import interval
from harness.predict.memory import by_category
from harness.predict.simulation import Done, predicted, simulated, vocabulary_of
from harness.rank.collect import base_record
from harness.records.store import SIMULATED, Document, Store
from harness.terminal import shown
from impl.cost.parameters import count_parameters
from impl.cost.place import Place
from impl.cost.traffic import step_traffic
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.model.config import padded_vocabulary
from impl.pipeline.schedule import peak_in_flight
from impl.run import Run, to_dict
from impl.simulator.step import Prediction, stages_of
from impl.simulator.system import System


def document_of(run: Run, store: Store, system: System, given: Collection[str]) -> Document:
    """Return a point's record, in the form of a measured one, or with the reason why there is no prediction.

    Args:
        given: dotted names of the fields that count as given.
    """
    document = base_record(run.id, store.experiment, store.tier, to_dict(run)) | {"source": SIMULATED}
    environment = {
        "system": system.name,
        "stack": system.stack,
        "device": system.device.kind,
        "device_name": system.hardware,
        "backend": "nccl" if system.device.kind == "cuda" else "gloo",
    }
    try:
        asked = simulated(run, given, system)
        run, found = asked.asked, predicted(asked.done, system)
    except InputError as error:
        return document | {"status": "invalid", "reason": str(error), "cause": "", "environment": environment}
    reason, vocab_size = why_no_room(found, system), vocabulary_of(run)
    rows = Place(run, run.model.vocab_size or 2).schedule.rows
    in_flight = [peak_in_flight(row) / len({action.stage for action in row}) for row in rows]
    document |= {
        "status": "oom" if reason else "ok",
        "reason": reason,
        "cause": "",
        "resolved": {
            "vocab_size": vocab_size,
            "padded_vocab_size": padded_vocabulary(vocab_size, run.plan.tp),
            "parameters": count_parameters(run.model, vocab_size),
            "head_positions": head_positions(run.model),
        },
        "environment": environment,
        "prediction": {
            "seconds": found.seconds,
            **interval(system, asked, found.seconds)._asdict(),
            **{name: getattr(found, name) for name in ("bubble", "exposed", "mfu", "hfu")},
            "microbatches_in_flight": max(in_flight),
            **doubt(asked.done, system),
        },
        "ranks": _ranks(asked.done, vocab_size, found, system),
    }
    return document if reason else document | {"steps": [{"step": 0, "seconds": [found.seconds]}]}


def why_no_room(found: Prediction, system: System) -> str | None:
    """Return which rank is predicted to run out of memory, with its categories; None: all fit."""
    if found.fits:
        return None
    rank, memory = max(enumerate(found.memory), key=lambda numbered: numbered[1].total)
    there = shown(system.device.memory_bytes.value)
    return f"pipeline rank {rank} ({by_category(memory)}) needs {shown(memory.total)}, a device has {there}"


def _ranks(run: Done, vocab_size: int, found: Prediction, system: System) -> list[dict[str, Any]]:
    """Return a rank of every pipeline stage: memory, and traffic of the first, a middle and the last stage.

    The stages between the ends send alike.
    """
    pp, stages = run.plan.pp, stages_of(run, vocab_size, system.habits.stages_of(run))
    size = run.plan.world_size // pp
    ranks: list[dict[str, Any]] = [
        {"rank": i * size, "peak_memory_bytes": memory.total, "memory_kind": "predicted bytes"}
        for i, memory in enumerate(found.memory)
    ]
    for i in sorted({0, pp // 2, pp - 1}):
        traffic = step_traffic(Place(run, vocab_size, i, stages), head_positions(run.model))
        ranks[i]["traffic"] = {
            axes: {op: asdict(count) for op, count in counts.items()} for axes, counts in traffic.items()
        }
    return ranks
