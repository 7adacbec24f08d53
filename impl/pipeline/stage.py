"""Division of layers into pipeline stages."""

from bisect import bisect_left
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from impl.errors import InputError
from impl.model.config import ModelConfig


class Stage(NamedTuple):
    """Part of a model: some layers, the embeddings before the first, the norm and heads after the last."""

    layers: range
    is_first: bool
    is_last: bool


def split(config: ModelConfig, vocab_size: int, count: int) -> tuple[Stage, ...]:
    """Split the model into `count` stages of about equal work; the output head counts as V / (12h + 2s) layers.

    Raises:
        InputError: there are more stages than layers.
    """
    head = vocab_size / (12 * config.hidden_size + 2 * config.seq_len) if config.family == "gpt" else 0.0
    parts = partition(config.num_layers, count, last_extra=head)
    return tuple(Stage(layers, i == 0, i == count - 1) for i, layers in enumerate(parts))


@lru_cache(maxsize=256)
def partition(num_layers: int, stages: int, last_extra: float = 0.0) -> tuple[range, ...]:
    """Return the layers of each stage, in order, with the slowest stage as fast as possible, then counts as equal.

    Remaining layers go to later stages: in 1F1B they hold fewer microbatches.

    Args:
        num_layers: layers to divide, every stage getting at least one.
        stages: p ranks x v chunks.
        last_extra: work of the last stage in addition to its layers (the output head), in units of a layer's.

    Raises:
        InputError: there are more stages than layers.
    """
    if stages > num_layers:
        raise InputError(
            f"plan.pp x plan.chunks {stages} is more than model.num_layers {num_layers}: every stage needs a layer; "
            f"valid: 1 to {num_layers}"
        )
    extra = [Fraction(0)] * stages
    extra[-1] += Fraction(last_extra)
    most = _most_layers(num_layers, extra)
    counts, free = [1] * stages, num_layers - stages
    while free:  # a layer for each stage that has as few as any and can take one, the least extra work first
        fewest = min(count for count, can in zip(counts, most, strict=True) if count < can)
        open_ = [s for s in range(stages) if counts[s] == fewest < most[s]]
        for stage in sorted(open_, key=lambda s: (extra[s], -s))[:free]:
            counts[stage] += 1
            free -= 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _most_layers(num_layers: int, extra: list[Fraction]) -> list[int]:
    """Return the layers that each stage can take without exceeding the smallest possible time of the slowest."""
    stages = Counter(extra)

    def can_take(slowest: Fraction) -> dict[Fraction, int]:
        return {work: int(slowest - work) if slowest >= work else 0 for work in stages}

    def is_enough(slowest: Fraction) -> bool:
        layers = can_take(slowest)
        return min(layers.values()) >= 1 and sum(layers[work] * count for work, count in stages.items()) >= num_layers

    slowest = sorted({count + work for count in range(1, num_layers + 1) for work in stages})
    layers = can_take(slowest[bisect_left(slowest, True, key=is_enough)])
    return [layers[work] for work in extra]
