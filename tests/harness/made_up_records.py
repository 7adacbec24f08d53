"""Records that no run has made, of the form that the store hands out."""

import copy
import json
import math
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from experiments.korthikanti2022 import activation_bytes_per_layer
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import Document
from impl.cost.memory import state_bytes
from impl.cost.parameters import ELEMENT_BYTES, count_parameters
from impl.cost.place import Place
from impl.cost.traffic import pipeline_traffic
from impl.model.config import padded_vocabulary
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate, uniform
from impl.run import Run, from_dict, to_dict

KEY = {"tokenizer": "ab" * 32, "data": "cd" * 32, "context": 128, "overlap": 0, "boundary": "stream"}
FLOOR = 2.0
"""Nats per token of the made-up language."""
_MADE_OF: WeakKeyDictionary[Record, Document] = WeakKeyDictionary()


def made_of(document: Document) -> Record:
    """A record as it is read from a document."""
    read = of_document(document)
    _MADE_OF[read] = document
    return read


def document(of: Record) -> Document:
    """The document that a record was made of, to be changed or written."""
    return copy.deepcopy(_MADE_OF[of])


def changed(of: Record, **fields: Any) -> Record:
    """The record with other values for some fields of its document."""
    return made_of(document(of) | fields)


def config(**changed: Any) -> dict[str, Any]:
    """A run's configuration; fields by their dotted names with `__` for the dot, as `model__hidden_size=64`."""
    fields = to_dict(Run())
    for name, value in changed.items():
        place = fields
        *path, last = name.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    return json.loads(json.dumps(to_dict(from_dict(fields))))


def record(
    *,
    seconds: float = 0.1,
    nats: float = 2.2,
    parameters: int = 481_152,
    cores: int = 64,
    status: str = "ok",
    reason: str | None = None,
    key: dict[str, Any] | None = None,
    tier: str = "smoke",
    device: str = "cpu",
    device_name: str = "AMD EPYC",
    **changed: Any,
) -> Record:
    """A run whose steps all take `seconds` and whose validation loss is `nats`; one that never ran is left bare."""
    fields = config(**changed)
    run = from_dict(fields)
    ranks, steps = run.plan.world_size, fields["train"]["steps"]
    head = {
        "schema": 1, "experiment": "made_up", "tier": tier, "source": "measured", "status": status, "reason": reason,
        "id": run.id, "config": fields,
    }  # fmt: skip
    if status in ("invalid", "failed"):
        return made_of(head)
    entropy = {"nats_per_token": FLOOR + 0.01, "valid": {"nats_per_token": FLOOR, "standard_error": 0.005}}
    kept = held(run)
    losses = [nats + (5.5 - nats) * math.exp(-8 * i / steps) for i in range(steps)]
    tokens = 32 * fields["model"]["seq_len"]
    evaluation = {
        "name": "valid", "kind": "causal" if fields["model"]["family"] == "gpt" else "masked",
        "tokens": tokens, "words": tokens // 4, "bytes": tokens, "key": key or KEY,
    }  # fmt: skip
    return made_of(head | {
        "resolved": {
            "vocab_size": run.model.vocabulary(257),
            "padded_vocab_size": padded_vocabulary(run.model.vocabulary(257), run.plan.tp),
            "parameters": parameters,
            "data": {"name": "synthetic", "entropy": entropy},
        },
        "environment": {"device": device, "device_name": device_name, "backend": "gloo", "cores": cores},
        "times": {"training_seconds": seconds * steps},
        "ranks": [
            {
                "rank": r,
                "peak_memory_bytes": 2**28 + r,
                "memory_kind": "peak RSS",
                "gemm_flops_per_s": 50e9,
                **copy.deepcopy(kept),
            }
            for r in range(ranks)
        ],
        "steps": [{"step": i, "loss": loss, "lr": 1e-3, "seconds": [seconds] * ranks} for i, loss in enumerate(losses)],
        "evaluations": [
            evaluation | {"step": at, "nats": tokens * (losses[min(at, steps) - 1] if at < steps else nats)}
            for at in range(steps // 4, steps + 1, max(1, steps // 4))
        ],
    })  # fmt: skip


def record_of(run: Run, **place: Any) -> Record:
    """A record of this run."""
    parts = {part: values for part, values in to_dict(run).items() if isinstance(values, dict)}
    nested = {f"{part}__{name}": value for part, values in parts.items() for name, value in values.items()}
    plain: dict[str, Any] = {name: value for name, value in to_dict(run).items() if name not in parts}
    parameters = count_parameters(run.model, run.model.vocabulary(257))
    return record(parameters=parameters, **nested, **plain, **place)


def with_pipeline(of: Record, schedule: str = "", late: float = 0.0) -> Record:
    """The record with what its pipeline ranks sent, and the timeline of a schedule, by default its own.

    Every pass takes a millisecond for each of the three that it consists of.

    Args:
        late: seconds that pass after each of a rank's actions.
    """
    run, full = of.run, document(of)
    plan = run.plan
    table = build(schedule or plan.schedule, plan.pp, run.microbatches, plan.chunks)
    rows = simulate(table, uniform(1e-3, 1e-3, 1e-3, chunks=plan.chunks)).as_rows()
    for pp_rank, row in enumerate(rows):
        sent = pipeline_traffic(Place(run, run.model.vocabulary(257), pp_rank))["send"]
        for r in range(plan.dp * plan.tp):
            rank = full["ranks"][pp_rank * plan.dp * plan.tp + r]
            rank["traffic"] |= {"pp": {"send": asdict(sent)}}
            spans = [[action, start + i * late, end + i * late] for i, (action, start, end) in enumerate(row)]
            rank["timeline"] = spans if r == 0 else None
    return made_of(full)


def held(run: Run) -> dict[str, Any]:
    """What a rank says it holds and exchanges: bytes by formula, and one all-reduce over the tensor-parallel ranks."""
    plan, model = run.plan, run.model
    states = state_bytes(model, model.vocabulary(257), tp=plan.tp, precision=run.precision)
    layer = activation_bytes_per_layer(
        model,
        run.train.microbatch,
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        element_size=ELEMENT_BYTES[run.precision],
    )
    return {
        "state_bytes": states._asdict(),
        "activation_bytes": {"model": round(layer) * model.num_layers, "layer": round(layer)},
        "traffic": {"tp": {"all_reduce": {"calls": 1, "bytes": 1000}}} if plan.tp > 1 else {},
    }


def certified(of: Record, steps: int = 2) -> Document:
    """The document of the run, had it been certified; each rank has two tensors, and hashes of its own."""
    whole, ranks = document(of), of.run.plan.world_size
    numbers = lambda *which: (f"{hash(which) % 2**64:016x}", 1.5, -0.5)
    numerics = {"host": "ab12", "backend": "gloo", "processor": "AMD EPYC", "cpu_capability": "AVX2", "mkl": None}
    pieces = [("trunk.tokens.weight", 0, 48), ("trunk.norm.weight", 0, 16)]
    whole["ranks"] = [{"rank": rank, "numerics": numerics, "pieces": pieces} for rank in range(ranks)]
    hashes = lambda step, rank: {
        "loss": (5.0 - step).hex(),
        "gradient": [numbers(step, rank, i) for i in range(2)],
        "weight": [numbers(step, rank, -1 - i) for i in range(2)],
    }
    whole["certificate"] = [[hashes(step, rank) for rank in range(ranks)] for step in range(steps)]
    whole["steps"] = [{"step": step, "loss": 5.0 - step, "seconds": None} for step in range(steps)]
    return json.loads(json.dumps(whole | {"certified": True}))


def without_numbers(of: Record, status: str, reason: str | None = None) -> Record:
    """The same run, had it ended like this."""
    return changed(of, status=status, reason=reason, steps=[], evaluations=[], ranks=[])
