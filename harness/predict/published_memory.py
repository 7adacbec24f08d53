"""Published memory of runs next to its prediction."""

import re
from collections.abc import Hashable, Mapping
from typing import Any

from harness.experiment.published import published
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.simulator.llama import Layout, Recompute, peak_bytes

GIB = 2**30


def torchtitan() -> list[float]:
    """Return the errors, as shares, of the memory that PyTorch's allocator reserved for Llama 3.1 on H100s.

    Compilation and 8-bit products are not distinguished: neither changes what is kept for the backward pass.

    Source: torchtitan (2410.06511), tables 1, 3, 4 and 5.
    """
    rows = published("torchtitan2024").query("unit == 'GiB per GPU'").to_dict("records")
    return [peak_bytes(*_described(row)) / (row["value"] * GIB) - 1 for row in rows]


def _described(row: Mapping[Hashable, Any]) -> tuple[ModelConfig, Layout]:
    """Return the model and the layout of a row; a batch has one microbatch for each pipeline stage."""
    text = row["note"]
    note = re.fullmatch(r"(\S+); (\w+) recomputation.*; sequence (\d+), batch of a rank (\d+)", text)
    assert note is not None, text
    chunks = 2 if row["quantity"].endswith("interleaved") else 1
    stages = row["pp"] * chunks
    recompute: Recompute = "operators" if note[2] == "selective" else "full"
    sizes = int(note[3]), int(note[4]) // stages, stages
    return named(note[1]), Layout(row["dp"], row["tp"], row["pp"], chunks, *sizes, recompute)
