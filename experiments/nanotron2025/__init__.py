"""Experiments of nanotron (Hugging Face's Ultra-Scale Playbook, 2025): the best plans of Llamas on 8 to 512 H100s."""

import math
import re
from dataclasses import replace

from experiments.ptdp2021 import SELENE
from harness.experiment.kit import GIB, UNTESTED, ModelConfig, Plan, Point, Printed, Run, noted, published
from impl.cost.flops import model_flops
from impl.cost.peaks import peak_flops
from impl.model.sizes import LLAMA_BLOCK

BUCKET = 25 * 2**20
"""Bytes; ddp_bucket_cap_mb of the benchmark's configuration."""
SHAPE = re.compile(r"(.*?): .*MLP (\d+), (\w+);.*ZeRO (\d)")
"""Size, width of the MLP, whether the embedding is `tied`, and ZeRO stage in the note of a published row."""


def on_h100s(row: Printed) -> Run:
    """Return the run of a published row, which waits for its updated parameters, as nanotron's ZeRO does."""
    _, width, tied, stage = SHAPE.findall(row["note"])[0]
    shape, tp = noted(row["note"]), int(row["tp"])
    recipe = replace(SELENE, global_batch=int(row["global_batch"]), microbatch=shape.pop("microbatch"))
    block = LLAMA_BLOCK | {"mlp_size": int(width), "tied": tied == "tied", "vocab_size": 131072}
    plan = Plan(
        dp=int(row["dp"]), tp=tp, pp=int(row["pp"]), sequence_parallel=tp > 1, zero_stage=int(stage),  # type: ignore[arg-type]
        overlap_param_gather=False, bucket_bytes=BUCKET,
    )  # fmt: skip
    return Run(model=ModelConfig(**shape, **block), plan=plan, train=recipe, evaluation=UNTESTED, precision="bf16")


def as_published() -> dict[Run, Point]:
    """Return the points of all rows by their runs, with utilization by our count of FLOPs, and bytes of memory."""
    found: dict[Run, Point] = {}
    for row in published("nanotron2025").to_dict("records"):
        run, value = on_h100s(row), row["value"]
        needed = model_flops("ptdp", run.model, 1) / run.model.seq_len
        peak = peak_flops("NVIDIA H100 80GB HBM3", "bf16") or math.nan
        numbers = {"memory": value * GIB, "token_rate": value * needed / peak}
        key = "memory" if row["quantity"] == "memory" else "mfu"
        one = found.setdefault(run, Point(run, model=f"Llama {SHAPE.findall(row['note'])[0][0]}"))
        found[run] = replace(one, printed={**one.printed, f"published_{key}": numbers[row["quantity"]]})
    return found


PAPER = as_published()
