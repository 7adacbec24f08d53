"""All parallel plans for a number of devices, stored as columns, since millions of plan objects would not fit."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from impl.errors import InputError
from impl.fields import divisors
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Run
from impl.simulator.periodic import PERIODIC

NAMES: dict[str, tuple[str, ...]] = {
    "schedule": PERIODIC,
    "recompute": ("none", "selective", "full"),
    "cp_attention": ("ring", "ulysses"),
}
"""Values that the numbers in a column of names stand for."""
FLAGS = (
    *("sequence_parallel", "scatter_gather", "partition_activations", "offload_activations", "offload_optimizer"),
    *("overlap_input_grad_reduce", "overlap_grad_reduce", "overlap_param_gather"),
)
KNOBS = (
    *("tp", "cp", "pp", "dp", "microbatch", "schedule", "chunks"),
    *("ep", "cp_attention", "recompute", "zero_stage", "zero_group", *FLAGS),
)
DEFAULTS = {name: getattr(Plan(), name) for name in KNOBS if name != "microbatch"}


@dataclass(frozen=True)
class Plans:
    """Plans and microbatches, a column of whole numbers for each of KNOBS."""

    columns: Mapping[str, np.ndarray]

    def __getitem__(self, knob: str) -> np.ndarray:
        return self.columns[knob]

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def take(self, rows: np.ndarray | slice) -> "Plans":
        return Plans({name: column[rows] for name, column in self.columns.items()})

    def values(self, knob: str) -> dict[Any, int]:
        """Return the values of the plan's field that a column has, as they come first, with their numbers in it."""
        numbers, first = np.unique(self.columns[knob], return_index=True)
        return {value_of(knob, number): number for number in numbers[np.argsort(first)].tolist()}

    def row(self, i: int) -> dict[str, Any]:
        """Return one plan's values, by knob."""
        return {name: value_of(name, int(column[i])) for name, column in self.columns.items()}

    def run(self, i: int, base: Run) -> Run:
        """Return a run with one of the plans, all else from `base`."""
        return run_of(self.row(i), base)

    @property
    def oddity(self) -> np.ndarray:
        """Return the number of knobs that differ from their defaults; of equal plans that with fewest is preferred."""
        defaults = {name: NAMES[name].index(of) if name in NAMES else of or 0 for name, of in DEFAULTS.items()}
        return sum((self.columns[name] != value).astype(int) for name, value in defaults.items())  # type: ignore


def value_of(knob: str, number: int) -> Any:
    """Return the value that a number in a column stands for."""
    if knob in NAMES:
        return NAMES[knob][number]
    if knob == "zero_group":
        return number or None
    return bool(number) if knob in FLAGS else number


def run_of(row: Mapping[str, Any], base: Run) -> Run:
    """Return a run with a plan of KNOBS, and of `tp3` if it is there, all else from `base`."""
    fields = {name: row[name] for name in (*KNOBS, *(("tp3",) if "tp3" in row else ())) if name != "microbatch"}
    recipe = replace(base.train, microbatch=row["microbatch"])
    return replace(base, plan=replace(base.plan, **fields), train=recipe)


def every(
    model: ModelConfig,
    gpus: int,
    global_batch: int,
    *,
    offload: bool = True,
    node: int | None = None,
    sharing: int | None = None,
) -> Plans:
    """Return all valid plans that use all of the devices; a knob without effect in a plan keeps its default.

    Where only some layers have experts, those whose pipeline stages have as many of each kind.

    Args:
        offload: the devices have a host, whose memory may be used.
        node: devices of a node, within which ZeRO may split; None: it splits over all data-parallel ranks only.
        sharing: most ranks that share a sequence; None: all.

    Raises:
        InputError: no plan is valid.
    """
    ways = (0, 1) if offload else (0,)
    degrees = _degrees(model, gpus, global_batch, gpus if sharing is None else sharing)
    parts = [_of_degrees(model, global_batch, plan, ways, node) for plan in degrees]
    if not parts:
        raise InputError(
            f"no plan puts {global_batch} sequences of this model on {gpus} devices: tp must divide {model.num_heads} "
            f"heads, pp be {model.num_layers} layers at most, dp divide the batch"
        )
    return Plans({name: np.concatenate([part[name] for part in parts]) for name in KNOBS})


def _degrees(model: ModelConfig, gpus: int, global_batch: int, sharing: int) -> Iterator[Plan]:
    for tp in filter(model.divides_groups, divisors(math.gcd(gpus, model.num_heads, model.mlp_inner))):
        degrees = [cp for cp in divisors(model.seq_len) if cp <= sharing and gpus // tp % cp == 0]
        shared = [Plan(tp=tp, cp=cp, cp_attention="ring") for cp in degrees]
        shared += [replace(one, cp_attention="ulysses") for one in shared]
        possible = [one for one in shared if not Run(model=model, plan=one).problems()]
        for one, pp in itertools.product(possible, range(1, len(model.own(range(model.num_layers))) + 1)):
            dp, rest = divmod(gpus, one.world_size * pp)
            if rest == 0 and global_batch % dp == 0 and _are_alike(model, pp):
                for ep in divisors(math.gcd(model.experts, dp * one.cp)) if model.experts else [1]:
                    yield replace(one, pp=pp, dp=dp, ep=ep)


def _of_degrees(
    model: ModelConfig, global_batch: int, plan: Plan, ways: tuple[int, ...], node: int | None
) -> dict[str, np.ndarray]:
    tp, pp, dp, splits = plan.tp, plan.pp, plan.dp, plan.tp > 1
    divides = splits and model.seq_len // plan.cp % tp == 0
    tables = _crossed(("microbatch", "schedule", "chunks"), list(_pipelines(model, global_batch // dp, pp)))
    kept = ("recompute", "sequence_parallel", "partition_activations", "offload_activations")
    memory = _crossed(kept, list(_activations(divides, ways)))
    zero = ("zero_stage", "zero_group", "overlap_grad_reduce", "overlap_param_gather")
    near = plan.dp_cp if node is None else math.gcd(plan.dp_cp, max(1, node // tp))
    near = near if near % plan.ep == 0 else plan.dp_cp
    states = _crossed(zero, list(_states(plan.dp_cp, near)))
    rest = {
        "offload_optimizer": list(ways),
        "overlap_input_grad_reduce": [0, 1] if splits else [1],
        "scatter_gather": [0, 1] if divides and pp > 1 else [1],
    }
    columns = _product([tables, memory, states, *({name: np.array(values)} for name, values in rest.items())])
    one_way = columns["scatter_gather"] | (columns["sequence_parallel"] == 0)  # with that it changes nothing
    kept = {name: column[one_way != 0] for name, column in columns.items()}
    count = len(kept["scatter_gather"])
    degrees = {"tp": tp, "cp": plan.cp, "pp": pp, "dp": dp, "ep": plan.ep}
    degrees["cp_attention"] = NAMES["cp_attention"].index(plan.cp_attention)
    return kept | {name: np.full(count, value) for name, value in degrees.items()}


def _pipelines(model: ModelConfig, sequences: int, pp: int) -> Iterator[tuple[int, int, int]]:
    """Yield microbatch, schedule and chunks; a pipeline of one rank has one schedule."""
    plain = NAMES["schedule"].index("one_f_one_b")
    for b in divisors(sequences):
        yield b, plain, 1
        if pp == 1:
            continue
        yield b, NAMES["schedule"].index("gpipe"), 1
        yield b, NAMES["schedule"].index("zb_h1"), 1
        if sequences // b % pp == 0:
            deepest = model.num_layers // pp
            for v in divisors(deepest) if model.num_layers % pp == 0 else range(1, deepest + 1):
                if v > 1 and _are_alike(model, pp * v):
                    yield b, NAMES["schedule"].index("interleaved"), v


def _are_alike(model: ModelConfig, stages: int) -> bool:
    """Return True if stages can be alike: those of a model only some of whose layers have experts need equal shares."""
    return stages == 1 or model.experts_every == 1 or model.num_layers % (stages * model.experts_every) == 0


def _activations(divides: bool, ways: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Yield recomputation, sequence parallelism, and whether recomputed layers' inputs are split or offloaded.

    Args:
        divides: several ranks share a layer, and can divide a sequence.
    """
    for recompute, splits in itertools.product(range(len(NAMES["recompute"])), (0, 1) if divides else (0,)):
        if NAMES["recompute"][recompute] != "full":
            yield recompute, splits, 0, 0
            continue
        for part in (0, 1) if divides and not splits else (0,):
            yield from ((recompute, splits, part, offloads) for offloads in ways)


def _states(dp: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ZeRO's stage and group, a part of the ranks if that is smaller, and if reductions and gathers overlap."""
    if dp == 1:
        yield 0, 0, 1, 1
        return
    groups = (0, group) if 1 < group < dp else (0,)
    for stage, of, reduces, gathers in itertools.product(range(4), groups, (0, 1), (0, 1)):
        if stage or (gathers and not of):
            yield stage, of, reduces, gathers


def _crossed(names: Sequence[str], rows: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    return dict(zip(names, np.array(rows, dtype=np.int32).T, strict=True))


def _product(tables: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the Cartesian product of the tables' rows."""
    counts = [len(next(iter(table.values()))) for table in tables]
    at = np.indices(counts, dtype=np.int32).reshape(len(counts), -1)
    return {name: column[at[i]].astype(np.int32) for i, table in enumerate(tables) for name, column in table.items()}
