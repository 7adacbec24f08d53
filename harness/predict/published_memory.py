"""Published memory of runs next to its prediction."""

import re
from typing import NamedTuple

from harness.experiment.published import published
from impl.simulator.llama import LLAMAS, Layout, Llama, Recompute, peak_bytes

GIB = 2**30


class Compared(NamedTuple):
    """A row of a paper's table."""

    name: str
    published: float
    """Published bytes of a device."""
    predicted: float

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


def torchtitan() -> list[Compared]:
    """Return the memory that PyTorch's allocator reserved for Llama 3.1 on H100s, with its prediction.

    Compilation and 8-bit products are not distinguished: neither changes what is kept for the backward pass.

    Source: torchtitan (2410.06511), tables 1, 3, 4 and 5.
    """
    found = []
    for row in published("torchtitan2024").to_dict("records"):
        model, layout = _described(row["note"], row["quantity"], *(int(row[axis]) for axis in ("dp", "tp", "pp")))
        name = f"{row['where']}, {row['quantity'].removeprefix('memory_').replace('_', ' ')}"
        found.append(Compared(name, row["value"] * GIB, peak_bytes(model, layout)))
    return found


def _described(note: str, quantity: str, dp: int, tp: int, pp: int) -> tuple[Llama, Layout]:
    """Return the model and the layout of a row; a batch is cut into as many microbatches as the pipeline has stages."""
    said = re.fullmatch(r"(\S+); (\w+) recomputation.*; sequence (\d+), batch of a rank (\d+)", note)
    assert said is not None, note
    chunks = 2 if quantity.endswith("interleaved") else 1
    recompute: Recompute = "operators" if said[2] == "selective" else "full"
    stages = pp * chunks
    return LLAMAS[said[1]], Layout(dp, tp, pp, chunks, int(said[3]), int(said[4]) // stages, stages, recompute)
