"""The verb `memory`: memory that a run needs on every pipeline rank, before any launch, and that devices have."""

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from harness.rank.devices import visible_gpus
from harness.records.parts import CATEGORIES
from harness.terminal import UNITS, Flag, console, parse_bytes, print_json, shown
from impl.cost.memory import Memory, memory_of_ranks
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.data.config import EMBEDDED, SYNTHETIC
from impl.data.tokenizer import AminoTokenizer, ByteTokenizer
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.run import Run
from impl.simulator.room import fit, taken_of

SHOWN = (*CATEGORIES, "total", "host")


def memory(
    config: Annotated[Run, tyro.conf.arg(name="")] = Run(),  # noqa: B008 - frozen
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    device_memory: str | None = None,
    json: Flag = False,
) -> int:
    """Predict the memory that every pipeline rank of a run needs, by category; nothing is launched.

    Args:
        config: The run; `--model NAME` starts from a named size.
        device: What it would run on.
        device_memory: What one device has, as 80GB or 40GiB: says what fits.
        json: Print one JSON document on standard output.
    """
    limit = None if device_memory is None else parse_bytes(device_memory)
    if problems := config.problems():
        raise InputError(problems[0])
    if config.engine != "native":
        raise InputError(f"the memory of the {config.engine} engine is not known; valid: --engine native")
    tokens = tokenizer_size(config)
    ranks = predicted(config, tokens, device)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    most = ranks[fullest].total
    verdict = lambda size: None if limit is None else fit(size, limit, taken_of(device))
    fits = lambda size: None if limit is None else verdict(size) != "does not fit"
    if json:
        rows = [
            {"pipeline_rank": i, "bytes": m.as_dict(), "fits": fits(m.total), "fit": verdict(m.total)}
            for i, m in enumerate(ranks)
        ]
        parameters = count_parameters(config.model, config.model.vocabulary(tokens))
        document = {"parameters": parameters, "ranks": rows, "fullest": fullest}
        known = {"device_memory_bytes": limit, "fits": fits(most), "fit": verdict(most)}
        return print_json(document | known)
    print_memory(ranks)
    print(f"predicted; fullest: pipeline rank {fullest}, {shown(most)}")
    if limit is not None:
        doubt = taken_of(device).doubt(verdict(most))
        print(f"{verdict(most)} {device_memory} ({most / limit:.0%} of it){doubt}")
    return 0


def predicted(run: Run, tokenizer_tokens: int, device: str) -> list[Memory]:
    """Return the predicted memory of every pipeline rank."""
    return memory_of_ranks(run, run.model.vocabulary(tokenizer_tokens), head_positions(run.model), device)


def tokenizer_size(run: Run) -> int:
    """Return the number of tokens of the run's tokenizer."""
    if run.data.dataset in EMBEDDED:
        return (ByteTokenizer if run.data.dataset == SYNTHETIC else AminoTokenizer).vocab_size
    return TokenFolder.open(Path(run.data.dataset)).manifest.vocab_size


def by_category(memory: Memory) -> str:
    """Return a rank's memory by category, in one line."""
    sizes = {name: size for name, size in memory.as_dict().items() if size and name != "total"}
    return ", ".join(f"{name} {shown(size)}" for name, size in sizes.items())


@cache
def gpu_memory() -> int | None:
    """Return bytes of the smallest GPU that ranks here may use, without a context on it; None: unknown, as with MIG."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    mine = visible_gpus()
    # CUDA numbers GPUs as nvidia-smi only with CUDA_DEVICE_ORDER=PCI_BUS_ID
    is_numbered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [line.split(", ") for line in said.splitlines()]
        sizes = {
            int(mib)
            for index, uuid, mib in rows
            for name in mine
            if (name == index or not is_numbered if name.isdecimal() else uuid.startswith(name))
        }
        return min(sizes) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def print_memory(ranks: Sequence[Memory]) -> None:
    """Print the memory of every pipeline rank by category."""
    most = max(memory.total for memory in ranks)
    unit = next(unit for unit, scale in UNITS.items() if most >= scale or unit == "KiB")
    names = [name for name in SHOWN if name != "host" or any(memory.host for memory in ranks)]
    table = Table("pipeline rank", *(f"{name} ({unit})" for name in names))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for i, memory in enumerate(ranks):
        sizes = memory.as_dict()
        table.add_row(str(i), *(f"{sizes[name] / UNITS[unit]:,.2f}" for name in names))
    console(table).print(table)
