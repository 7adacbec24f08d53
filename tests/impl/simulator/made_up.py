"""A made-up system whose numbers are round, and runs on it."""

from dataclasses import replace
from typing import Any

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.system import System


def number(value: float) -> dict[str, Any]:
    return {"value": value, "source": "made up"}


DOCUMENT: dict[str, Any] = {
    "name": "made_up",
    "stack": "made up",
    "hardware": "Made Up 100",
    "device": {
        "kind": "cuda",
        "memory_bytes": number(80e9),
        "memory_bandwidth": number(2e12),
        "peak_flops": {"bf16": number(300e12), "fp16": number(300e12), "fp32": number(20e12)},
        "processors": number(100),
        "fused_attention": False,
    },
    "node": {"size": number(8), "nics": number(4), "nic_bandwidth": number(25e9), "link_bandwidth": number(300e9)},
}
SYSTEM = System.from_dict(DOCUMENT)
MODEL = ModelConfig(num_layers=8, hidden_size=2048, num_heads=16, seq_len=1024, vocab_size=51200, dropout=0.1)


def with_constants(system: System, source: str = "set", **values: float) -> System:
    known = system.all_constants
    changed = {name: replace(known[name], value=value, source=source) for name, value in values.items()}
    return replace(system, constants=system.constants | changed)


def faster(**rates: float) -> System:
    """The system with device or node rates times a factor."""
    document = {**DOCUMENT, "device": dict(DOCUMENT["device"]), "node": dict(DOCUMENT["node"])}
    for name, factor in rates.items():
        part = document["device"] if name in document["device"] else document["node"]
        old = part[name]
        if name == "peak_flops":
            part[name] = {precision: number(factor * one["value"]) for precision, one in old.items()}
        else:
            part[name] = number(factor * old["value"])
    return System.from_dict(document)


def run_of(*, global_batch: int = 32, microbatch: int = 2, model: ModelConfig = MODEL, **plan: Any) -> Run:
    return Run(
        model=model,
        plan=Plan(**{"bucket_bytes": 2**34, **plan}),
        train=Recipe(global_batch=global_batch, microbatch=microbatch),
        precision="bf16",
    )


def longer(run: Run, **fields: Any) -> Run:
    """The run with another model."""
    return replace(run, model=replace(run.model, **fields))
