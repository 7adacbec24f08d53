"""Division of layers into pipeline stages."""

from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from impl.errors import InputError
from impl.model.config import ModelConfig


class Stage(NamedTuple):
    """Part of a model: some layers, the embeddings before the first, the norm and heads after the last."""

    layers: range
    is_first: bool
    is_last: bool


@lru_cache(maxsize=16)  # all ranks ask for it
def split(config: ModelConfig, vocab_size: int, count: int) -> tuple[Stage, ...]:
    """Split the model into `count` stages of about equal work; a GPT's output head counts as V / (12h + 2s) layers.

    Raises:
        InputError: there are more stages than layers.
    """
    layer = config.active_weights / config.num_layers / config.hidden_size + 2 * config.seq_len
    head = vocab_size / layer if config.family == "gpt" else 0.0
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
    others, extra = stages - 1, Fraction(last_extra)

    def divided(last: int) -> list[int]:
        few, more = divmod(num_layers - last, others) if others else (0, 0)
        return [few] * (others - more) + [few + 1] * more + [last]

    def cost(counts: list[int]) -> tuple[Fraction, int, int]:
        """Return the slowest stage's time, how unequal the counts are, and which of two equals comes first."""
        last = counts[-1]
        return max(last + extra, Fraction(max(counts))), sum(n * n for n in counts), last if extra else -last

    counts = min(map(divided, range(1, num_layers - others + 1) if others else [num_layers]), key=cost)
    return tuple(range(first, end) for first, end in pairwise(accumulate(counts, initial=0)))
