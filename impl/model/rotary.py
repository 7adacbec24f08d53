"""Rotary positions: queries and keys turned by angles that grow with the place in the sequence (2104.09864)."""

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor


def rotate(qkv: Tensor, seq_len: int, heads: int, head_size: int, base: float) -> Tensor:
    """Turn the first `heads` heads of every token; its own memory is used unless compiled.

    Feature i of a head's first half and of its second make a pair, turned by place / base^(2 i / d), as in the Llama of
    transformers.

    Shapes: [b s, (a + 2 g) d] -> the same; heads is a + g.
    """
    if torch.compiler.is_compiling():
        by_head = qkv.view(-1, seq_len, qkv.shape[1] // head_size, head_size)
        turning, others = by_head[:, :, :heads], by_head[:, :, heads:]
        of_place = angles(seq_len, head_size, base, wide(qkv.dtype), qkv.device)
        return torch.cat([turned(turning, *of_place), others], 2).view_as(qkv)
    return cast(Tensor, _Rotate.apply(qkv, seq_len, heads, head_size, base))


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads turned by the angles of their places. Shapes: [b, s, heads, d], angles [s, 1, d / 2] -> the same."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).type_as(x)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, seq_len: int, heads: int, head_size: int, base: float) -> Tensor:
        ctx.how = seq_len, heads, head_size, base
        ctx.mark_dirty(qkv)
        return _turn(qkv, seq_len, heads, head_size, base, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seq_len, heads, head_size, base = ctx.how
        return _turn(grads[0].clone(), seq_len, heads, head_size, base, -1.0), None, None, None, None


def _turn(x: Tensor, seq_len: int, heads: int, head_size: int, base: float, way: float) -> Tensor:
    """Turn in place, by the opposite angles if `way` is -1."""
    cosine, sine = angles(seq_len, head_size, base, wide(x.dtype), x.device)
    first, second = x.view(-1, seq_len, x.shape[1] // head_size, head_size)[:, :, :heads].chunk(2, -1)
    new_first = first * cosine - second * (sine * way)
    second.copy_(second * cosine + first * (sine * way))
    first.copy_(new_first)
    return x


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which angles are applied: fp32, or a larger one."""
    return dtype if dtype.itemsize >= 4 else torch.float32


@lru_cache(maxsize=8)
def angles(
    seq_len: int, head_size: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every place's angles. Shapes: [s, 1, d / 2] each."""
    rates = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), rates)[:, None]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
