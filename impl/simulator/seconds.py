"""Seconds of one operation on a system, by law, or interpolated between measured points where the system has a table.

Sizes may be numbers or NumPy arrays. Every law is continuous in every size but the head's, and never slower with more
FLOP/s or bandwidth.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES, OPERAND_BYTES
from impl.cost.traffic import TRAVELS, Op
from impl.errors import InputError
from impl.plan import AXES, Plan
from impl.simulator.surface import Surface
from impl.simulator.system import System

Size = Any
"""Number, or an array of numbers."""
PLACED = ("tp", "zero", "replicas", "pp")
"""Axes of ranks, those of adjacent ranks first."""
ROUNDED = 2
"""Doublings of 1 that give the exponent p of the p-norm used as a smooth maximum of two overlapping times: 4."""
STATE_BYTES = 14
"""Bytes that an update reads and writes per byte of a master weight.

Counted: gradient, two moments and weight, zeroing, norm and clipping, and the weight in the type used to compute.
"""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))
"""Rows and columns of a tile, and the share of the rate of the largest that its size allows: operands read again."""
SPLITS = (1, 2, 4)
"""Parts of the depth that processors may take apart from each other."""
TYPICAL_LENGTH = 2048
"""Tokens of a sequence in which a fused attention core reaches the share of the peak that systems state."""
RISE = 0.2
"""Share of a tile, or of a wave, in which a further one comes to cost all of its time: no size makes a step."""
_ROWS, _COLUMNS, _RATES, _SPLITS = np.array([(*tile, split) for tile, split in product(TILES, SPLITS)]).T


ROW_BYTES = 16
"""Bytes of which an operand's row must be a multiple for a GPU's units of matrix products."""


class Way(NamedTuple):
    """Way out of a unit of a network's level that a group's ranks leave."""

    per_unit: Size
    """Number of the group's ranks in one unit."""
    rate: Size
    """Bandwidth in bytes/s that each group of this kind has."""


class Group(NamedTuple):
    """Ranks that communicate, their placement on nodes, and the groups that share their links."""

    ranks: Size
    per_node: Size
    """Number of the group's ranks on one node."""
    sharing: Size
    """Number of groups of this kind with ranks on one node."""
    ways: tuple[Way, ...] = ()
    """Ways out of the units of further levels of the network."""


def group(axes: tuple[str, ...], plan: Plan, system: System) -> Group:
    """Return the ranks that differ in these axes, with ranks placed on nodes tp first, then cp, then dp, then pp.

    Where ZeRO divides over some of the ranks of dp and cp, these are placed first (zero), then its replicas.
    """
    ranks = _within(axes, plan, plan.world_size)
    return placed(ranks, plan.world_size // ranks, system, lambda size: _within(axes, plan, size))


def strided(ranks: int, stride: int, plan: Plan, system: System) -> Group:
    """Return a group of ranks, each `stride` places behind the one before."""
    within = lambda size: min(ranks, max(1, size // stride))
    return placed(ranks, plan.world_size // ranks, system, within)


def placed(ranks: int, groups: int, system: System, within: Callable[[int], int]) -> Group:
    """Return one of equal groups of ranks, `within(size)` of which are among `size` adjacent devices."""
    sharing = lambda size: max(1, min(groups, size // within(size)))
    node = system.node.size.value
    levels = [(level.size.value, system.rate_out(level)) for level in system.levels]
    ways = [Way(within(size), rate / sharing(size)) for size, rate in levels if within(size) < ranks]
    return Group(ranks, within(node), sharing(node), tuple(ways))


def _within(axes: tuple[str, ...], plan: Plan, size: int) -> int:
    """Return how many of the ranks that differ in these axes are among `size` adjacent devices."""
    ranks, within, stride = 1, 1, 1
    for axis in AXES[::-1] if "cp" in axes else PLACED:
        degree = getattr(plan, axis)
        if axis in axes or ("dp" in axes and axis in ("zero", "replicas")):
            ranks *= degree
            within *= min(degree, max(1, size // stride))
        stride *= degree
    return min(within, ranks)


def larger(a: Size, b: Size) -> Size:
    """Return the maximum, elementwise for arrays."""
    return (a + b + abs(a - b)) / 2


def gemm(
    system: System, precision: str, m: Size, n: Size, k: Size, pass_: str | None = None, *, is_sum: bool = False
) -> Size:
    """Return the seconds of one product [m, k] times [k, n], from its start to its end on the device.

    By law: operations at a share of the peak, in whole waves of tiles, each of which is filled and written, overlapped
    with moving the operands' bytes.

    Args:
        is_sum: whether it is added to a sum in fp32, which is read and written in place of a result of its own.
    """
    known = system.products.get((precision, pass_), system.products.get((precision, None)))
    return _corrected(partial(_gemm_law, system, precision, is_sum=is_sum), known, 3, (m, n, k))


def attention(
    system: System, precision: str, shape: tuple[Size, Size, Size, Size], *, masked: float, backward: bool
) -> Size:
    """Return the seconds of one attention core, softmax(q k^T) v, forward or backward, without moving scores.

    Args:
        shape: sequences, heads, tokens of a sequence and numbers of a head.
        masked: share of such cores that a causal mask cuts: 1, or 1 / c of the c meetings in a ring; 0 without a mask.
    """
    law = partial(_core_law, system, precision, masked=masked, backward=backward)
    return _corrected(law, system.cores.get(precision), 5 if backward else 4, shape)


def is_aligned(system: System, precision: str, head_size: Size) -> Size:
    """Return True if attention's products are done by the units for matrix products: rows of a head are ROW_BYTES.

    A fused kernel fills rows up, and a CPU has no such units. Source: NVIDIA's guide to matrix products, on the
    alignment of tensor cores; BLOOM's trials, where a step with heads of 108 takes 29% longer than with heads of 216.
    """
    if system.device.fused_attention or system.device.kind == "cpu":
        return True
    return head_size * ELEMENT_BYTES[precision] % ROW_BYTES == 0


def elementwise(system: System, precision: str, bytes_: Size, name: str = "", *, is_backward: bool = False) -> Size:
    """Return the seconds to read and write the bytes, without the launch of an operation."""
    return bytes_ / system.elementwise_rate(precision, name, is_backward=is_backward)


def optimizer(system: System, parameters: Size, master_bytes: int, tensors: Size = 0) -> Size:
    """Return the seconds of an update of the parameters whose moments a rank has."""
    rate = system.device.memory_bandwidth.value * system.constant("optimizer_efficiency")
    return parameters * master_bytes * STATE_BYTES / rate + tensors * system.constant("optimizer_tensor")


def collective(system: System, op: Op, bytes_: Size, group: Group) -> Size:
    """Return the seconds of one collective on a tensor of this size, with all groups of its kind at once.

    By law: hops, and the bytes over the slowest of the link within a node and the group's share of the links out of it,
    and out of the units of further levels. A ring's bytes pass each once; of an all-to-all each rank sends its own to
    all ranks elsewhere.
    """
    measured = _measured(system, op, bytes_, group)
    if measured is not None:
        return measured
    n, travels = group.ranks, TRAVELS[op]
    nodes = n / group.per_node
    wire = travels * (n - 1) / n * bytes_
    inside = wire / (system.node.link_bandwidth.value * system.constant("link_efficiency"))
    way_out = system.node.nics.value * system.node.nic_bandwidth.value * system.constant("nic_efficiency")
    way_out = way_out * (1 - (1 - system.constant("nic_shared")) * (group.sharing > 1))
    passing = lambda within: within * (1 - within / n) * bytes_ if op == "all_to_all" else wire
    outside = passing(group.per_node) * group.sharing / way_out * (nodes > 1)
    for way in group.ways:
        outside = larger(outside, passing(way.per_unit) / way.rate)
    inside = inside * (group.per_node > 1)
    return larger(inside, outside) + _hops(system, op, nodes, group)


def _hops(system: System, op: Op, nodes: Size, group: Group) -> Size:
    """Return the seconds that a collective takes however few bytes it moves.

    An all-reduce goes up and down a tree: 2 (g - 1) links and 2 log2(nodes) network cards, of g ranks a node. An
    all-to-all's parts go on at the same time, one hop each. The others go round a ring: n - nodes links and nodes - 1
    cards. Sources: NCCL's model of its own latencies (tuning.cc); its guide, on point-to-point calls of one group.
    """
    link, nic = system.constant("link_latency"), system.constant("nic_latency")
    if op == "all_reduce":
        return 2 * ((group.per_node - 1) * link + np.log2(nodes) * nic)
    if op == "all_to_all":
        return larger((group.per_node > 1) * link, (nodes > 1) * nic)
    return (group.ranks - nodes) * link + (nodes - 1) * nic


def send(system: System, bytes_: Size, *, is_inter: bool, senders: int, most: float = math.inf) -> float:
    """Return the seconds to send from one pipeline stage to the next, while `senders` ranks of the node do so.

    Args:
        most: bytes/s that further levels of the network leave to each sender.
    """
    measured = _measured(system, "send", bytes_, Group(2, 1 if is_inter else 2, senders))
    if measured is not None:
        return measured
    node = system.node
    if is_inter:
        rate = min(node.nic_bandwidth.value, node.nics.value * node.nic_bandwidth.value / senders)
    else:
        rate = node.link_bandwidth.value
    return system.constant("send_latency") + bytes_ / min(rate * system.constant("send_efficiency"), most)


def launched(system: System, device_seconds: Size, host_seconds: Size) -> Size:
    """Return the seconds of device work launched by a host: a smooth maximum of both; their sum on a CPU."""
    if system.device.kind == "cpu":
        return device_seconds + host_seconds
    q = system.constant("host_exponent")
    most = larger(device_seconds, host_seconds)
    least = device_seconds + host_seconds - most
    return most * (1 + (least / (most + 1e-30)) ** q) ** (1 / q)


def beside(system: System, collective_seconds: Size, computing: Size) -> Size:
    """Return the seconds that a collective adds to overlapping computation: never more than alone."""
    share = system.constant("overlap")
    hidden = share * collective_seconds
    return (1 - share) * collective_seconds + together(hidden, computing, ROUNDED + 1) - computing


def together(one: Size, other: Size, doublings: int = ROUNDED) -> Size:
    """Return the seconds of two things at once: a smooth maximum of both, their p-norm with p = 2**doublings."""
    for _ in range(doublings):  # of columns much faster than powers
        one, other = one * one, other * other
    total = one + other
    for _ in range(doublings):
        total = total**0.5
    return total


def _corrected(
    law: Callable[..., Size], known: tuple[np.ndarray, Surface] | None, column: int, sizes: tuple[Size, ...]
) -> Size:
    """Return a law's seconds, times what measurements are of it: interpolated between rows of sizes and seconds."""
    if known is None:
        return law(*sizes)
    rows, surface = known
    ratios = np.log(rows[:, column] / law(*rows[:, : len(sizes)].T))
    return law(*sizes) * surface.at(ratios, sizes)


def _gemm_law(system: System, precision: str, m: Size, n: Size, k: Size, *, is_sum: bool = False) -> Size:
    """Return a product's seconds: a tile takes the longer to write the more bytes it has, whatever its operands."""
    operand = OPERAND_BYTES[precision]
    written = 2 * MASTER_BYTES[precision] if is_sum else ELEMENT_BYTES[precision]
    processors, fill = system.device.processors, system.constant("gemm_fill") * written / operand
    operations = 2 * m * n * (k + fill) if processors is None else _busy(m, n, k, fill, processors.value)
    computed = operations / (_peak(system, precision) * system.constant("gemm_efficiency"))
    bytes_ = (m * k + k * n) * operand + m * n * written
    return together(computed, elementwise(system, precision, bytes_))


def _core_law(system: System, precision: str, *shape: Size, masked: float, backward: bool) -> Size:
    """Return the seconds of a core's products; a fused kernel with a mask reaches less of the peak in short sequences.

    Source: FlashAttention-3, figure 5: causal forward passes on an H100, heads of 128, 512 to 16,384 tokens. Speeds of
    FlashAttention-2 and of cuDNN are as 1 / (1 + fill / s) with a fill of 404 and of 388, to 2%.
    """
    batch, heads, seq_len, head_size = shape
    products, device = 4 if backward else 2, system.device
    has_fill = masked > 0 and device.fused_attention and device.kind != "cpu"
    fill = system.constant("attention_fill") if has_fill else 0.0
    whole = seq_len * (seq_len + masked * fill) * TYPICAL_LENGTH / (TYPICAL_LENGTH + fill)
    operations = products * 2 * batch * heads * whole * head_size
    return operations / (_core_peak(system, precision, head_size) * system.constant("attention_efficiency"))


def _core_peak(system: System, precision: str, head_size: Size) -> Size:
    """Return the peak FLOP/s of an attention core: at most that of fp32 for heads that are not aligned."""
    peak = _peak(system, precision)
    return np.where(is_aligned(system, precision, head_size), peak, min(peak, system.peak("fp32") or peak))


def _peak(system: System, precision: str) -> float:
    """Return the system's peak FLOP/s; raise InputError where it has none, since nothing is assumed."""
    peak = system.peak(precision)
    if peak is None:
        known = ", ".join(system.device.peak_flops)
        raise InputError(f"system {system.name} has no device.peak_flops for precision {precision}; valid: {known}")
    return peak


def _measured(system: System, op: Op, bytes_: Size, group: Group) -> Size | None:
    """Return the measured seconds by the curve of the nearest number of ranks; None if none was measured.

    Sizes beyond the curve's end are extrapolated linearly.
    """
    span = "inter" if group.per_node < group.ranks else "intra"
    curves = system.curves.get((op, span))
    if not curves:
        return None
    ranks, sizes, seconds = min(curves, key=lambda curve: abs(np.log(curve[0] / group.ranks)))
    at = np.log(np.maximum(bytes_, 1.0))
    beyond = np.maximum(at - sizes[-1], 0.0)
    found = np.exp(np.interp(at, sizes, seconds) + beyond)
    if op == "send":
        return found  # of a whole tensor, however many ranks there are
    return found * (1 - 1 / group.ranks) / (1 - 1 / ranks)


def _busy(m: Any, n: Any, k: Any, fill: float, processors: int) -> Any:
    """Return the operations that all processors could do while they do [m, k] times [k, n], with the best tiles for it.

    Args:
        fill: depth that takes as long as the filling and the writing of a tile.
    """
    if all(isinstance(size, int) for size in (m, n, k)):
        return _of_one(m, n, k, fill, processors)
    return _of_many(m, n, k, fill, processors)


@lru_cache(maxsize=2**16)
def _of_one(m: int, n: int, k: int, fill: float, processors: int) -> float:
    return float(_of_many(m, n, k, fill, processors))


def _of_many(m: Any, n: Any, k: Any, fill: float, processors: int) -> Any:
    rows, columns, depth = (np.asarray(size, dtype=float)[..., None] for size in (m, n, k))
    tiles = _up(rows / _ROWS) * _up(columns / _COLUMNS) * _SPLITS
    waves = _up(tiles / processors)
    return (2 * waves * processors * _ROWS * _COLUMNS * (depth / _SPLITS + fill) / _RATES).min(-1)


def _up(count: Any) -> Any:
    """Return the count rounded up, at least 1, with a steep continuous rise in place of each step."""
    whole = np.floor(count)
    return np.maximum(whole + np.minimum((count - whole) / RISE, 1.0), 1.0)
