"""Rotary positions: queries and keys turned by angles that grow with the place in the sequence (2104.09864)."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from impl.model.config import ModelConfig


class Rotary(NamedTuple):
    """Rotary positions of a model: how heads are turned."""

    features: int
    """Number of a head's features, from the first on, that are turned."""
    base: float
    scaling: tuple[float, float, float, float] | None
    places: Callable[[int], Tensor]
    """Function that returns the positions, in the sequence, of a number of this rank's tokens."""

    @classmethod
    def of(cls, config: ModelConfig, places: Callable[[int], Tensor] = torch.arange) -> "Rotary | None":
        """Return the rotary positions of a model; None if it has none."""
        how = cls(config.turned, config.rotary_base, config.rotary_scaling, places)
        return how if config.positions == "rotary" else None


def rotate(qkv: Tensor, seq_len: int, heads: int, head_size: int, how: Rotary) -> Tensor:
    """Turn the first `heads` heads of every token; its own memory is used unless compiled.

    Of the r features that are turned, i of the first half and of the second make a pair, turned by its place times its
    rate, as in the Llama of transformers.

    Shapes: [b s, (a + 2 g) d] -> the same; heads is a + g.
    """
    if torch.compiler.is_compiling():
        turning, others = qkv.view(-1, seq_len, qkv.shape[1] // head_size, head_size).tensor_split([heads], 2)
        return torch.cat([turned(turning, *angles(seq_len, how, qkv.dtype, qkv.device)), others], 2).view_as(qkv)
    return cast(Tensor, _Rotate.apply(qkv, seq_len, heads, head_size, how))


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads turned by the angles of their places. Shapes: [b, s, heads, d], angles [s, 1, r / 2] -> the same."""
    pairs = cosine.shape[-1]
    first, second, rest = x.tensor_split([pairs, 2 * pairs], -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1).type_as(x)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        ctx.mark_dirty(qkv)
        return _turn(1.0, qkv, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(-1.0, grads[0].clone(), *ctx.how), None, None, None, None


def _turn(way: float, x: Tensor, seq_len: int, heads: int, head_size: int, how: Rotary) -> Tensor:
    """Turn in place, by the opposite angles if `way` is -1."""
    cosine, sine = angles(seq_len, how, x.dtype, x.device)
    by_head = x.view(-1, seq_len, x.shape[1] // head_size, head_size)
    first, second = by_head[:, :, :heads, : how.features].chunk(2, -1)
    new_first = first * cosine - second * (sine * way)
    second.copy_(second * cosine + first * (sine * way))
    first.copy_(new_first)
    return x


def angles(*of: Any) -> tuple[Tensor, Tensor]:
    """Return `_angles`, which compiled code has as constants: it would compute them for every head in every layer."""
    return _angles(*of)


angles.__dict__["_dynamo_marked_constant"] = True  # as torch.compiler's decorator does, which imports the compiler


@lru_cache(maxsize=8)
def _angles(seq_len: int, how: Rotary, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every place's angles, at least in fp32. Shapes: [s, 1, r / 2] each."""
    angles = torch.outer(how.places(seq_len).double(), rates(how))[:, None]
    as_used = device, torch.promote_types(dtype, torch.float32)
    return angles.cos().to(*as_used), angles.sin().to(*as_used)


def rates(how: Rotary) -> Tensor:
    """Return the angle by which each pair of features turns from one position to the next: pair i by base^(-2 i / r).

    With Llama 3.1's scaling a pair that turns round less than `low` times in the original length turns slower by the
    factor, and one that does so more than `high` times as before; between, both rates are weighted in proportion.

    Source: the Llama of transformers, `rope_type` llama3. Shapes: [r / 2].
    """
    found = how.base ** (-torch.arange(0, how.features, 2, dtype=torch.float64) / how.features)
    if how.scaling is None:
        return found
    factor, low, high, length = how.scaling
    kept = ((length * found / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return found * (kept + (1 - kept) / factor)
