"""What do buffers of a constant size save, next to one that holds all gradients?

ZeRO-R's C_B (section 6.2): operations on large buffers are efficient, so that libraries fuse all gradients into one,
which then grows with the model; a buffer of a constant size does not. Here gradients are reduced in buckets: models of
growing depth train with small ones, and with one bucket for all. What ZeRO-R does against fragmented memory (M_D)
cannot be varied here: the memory of tensors is counted, not what an allocator holds.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from experiments.zero2019 import COUNTED, PREDICTED, N, for_memory, predicted_bytes
from harness.experiment.kit import (
    MODEL, Claim, Evidence, Experiment, ModelConfig, Plan, Point, Record, Run, Tolerance, cost, each, gigabytes,
    in_bytes, points, table_of, tally,
)  # fmt: skip

SHAPE = ModelConfig(hidden_size=128, num_heads=4, seq_len=64, vocab_size=512)
LARGE = ModelConfig(hidden_size=3072, num_heads=24, seq_len=1024, vocab_size=51200)
ONE = 2**34
"""Bytes of a bucket that holds all gradients."""
EXACT = Tolerance(0.01, "gradients that are reduced one by one", "2026-11-24")
"""Relative distance of the one bucket's bytes from those of all gradients."""


def both(model: ModelConfig, depths: Sequence[int], dp: int, bucket_bytes: int) -> list[Run]:
    """Return models of these depths with constant buckets, and with one for all, with divided gradients."""
    plans = [Plan(dp=dp, zero_stage=2, recompute="full", bucket_bytes=size) for size in (bucket_bytes, ONE)]
    return [for_memory(replace(model, num_layers=layers), plan, batch=1) for layers in depths for plan in plans]


def buffers(one: Point) -> float:
    """Return counted bytes of buffers; NaN for simulated runs."""
    return one.mean(lambda record: record.bytes_of("buffers"))


def by_buckets(records: Sequence[Record], *, is_one: bool) -> list[Point]:
    """Return the points with constant buckets, or with one for all, by size."""
    size = lambda record: record.peak_memory_bytes if record.is_simulated else record.memory_bytes
    found = [one for one in points(records, size, failed=True) if (one.run.plan.bucket_bytes == ONE) == is_one]
    return sorted(found, key=lambda one: one.parameters)


def rows(records: Sequence[Record]) -> list[Point]:
    return by_buckets(records, is_one=False) + by_buckets(records, is_one=True)


def constant_is_constant(records: Sequence[Record]) -> Evidence | None:
    """Judge whether buffers of constant buckets are as large in every model."""
    sizes = [buffers(one) for one in by_buckets(records, is_one=False) if not one.is_simulated]
    numbers = ", ".join(f"{size / 1e6:.3f}" for size in sizes) + " MB"
    return tally([a == b for a, b in pairwise(sizes)], "steps in size", numbers)


def of_one(records: Sequence[Record]) -> list[tuple[float]]:
    """Return the bytes a parameter that one bucket for all gradients takes."""
    return [(buffers(one) / one.parameters,) for one in by_buckets(records, is_one=True) if not one.is_simulated]


def costs_more_in_larger(records: Sequence[Record]) -> Evidence | None:
    """Judge whether one bucket for all gradients takes more memory than constant ones, the more the larger a model."""
    total = lambda one: predicted_bytes(one) if one.is_simulated else one.mean(lambda record: record.memory_bytes)
    whole = {(one.parameters, one.device): total(one) for one in by_buckets(records, is_one=True)}
    parts = [(one, whole.get((one.parameters, one.device))) for one in by_buckets(records, is_one=False)]
    more = [(size - total(one), one.model) for one, size in parts if size is not None]
    numbers = ", ".join(f"{size / 1e9:.3g} GB ({model})" for size, model in more)
    return tally([a < b for a, b in pairwise([0.0, *(size for size, _ in more)])], "models", numbers)


SIZE = lambda one: None if one.run.plan.bucket_bytes == ONE else one.run.plan.bucket_bytes
BUCKET = in_bytes("MB", "bucket", "bucket", SIZE)
EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), section 6.2",
    expectation="buffers that do not grow with the model, where one for all takes 2 bytes a parameter",
    claims=(
        Claim(
            "buffers of a constant size are as large in models of every depth", "section 6.2", constant_is_constant,
            kind="self-consistency",
        ),
        Claim(
            "one buffer for all gradients takes 2 bytes a parameter, within 1%", "our own",
            each(of_one, lambda size: abs(size / 2 - 1) <= EXACT, "models", "{:.3f}", after=" bytes a parameter"),
            kind="self-consistency", tolerance=EXACT,
        ),
        Claim(
            "one buffer for all takes more memory than constant ones, and the more the larger the model",
            "section 6.2", costs_more_in_larger, kind="direction",
        ),
    ),
    table=table_of(
        "constant_buffers", "Constant buffers", (MODEL, N, BUCKET, gigabytes("buffers", "buffers, counted", buffers),
        COUNTED, PREDICTED), rows, ("Without a bucket's size one bucket holds all gradients.",), is_timed=False,
    ),
    cost=cost("1 min", "20 min, 64 GPUs with 32 GB"),
    deviations="Gradients are in 16 bits, the paper's fused buffer in 32. Models at `paper` are ours, as wide as the "
    "paper's of 8B; it prints no memory without constant buffers.",
    runs={
        "smoke": both(SHAPE, (2, 4), 2, 2**16),
        "small": both(SHAPE, (2, 4, 8, 16), 2, 2**16),
        "paper": both(LARGE, (18, 36, 72), 64, 2**28),
    },
)  # fmt: skip
