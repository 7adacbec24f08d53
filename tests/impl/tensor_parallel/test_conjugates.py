"""The collectives around a split block: what each computes, its conjugate as the adjoint, and what it moves.

A pair is a linear map between spaces of three kinds. `same`: one vector, of which every rank has a copy. `parts`: one
vector, of which every rank has its part of the rows. `own`: a vector on each rank, all different. The adjoint is that
of the inner product which counts a `same` vector once and sums the others over the ranks.
"""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import counted
from impl.cost.traffic import Count
from impl.tensor_parallel.conjugates import F_SEQUENCE, GATHER, NOTHING, F, Pair
from tests.ranks import run_ranks

Kind = Literal["same", "parts", "own"]
N, H = 6, 5  # rows: divisible by 2 and 3

PAIRS: dict[str, tuple[Pair, Kind, Kind, str | None, str | None]] = {
    "F": (F, "same", "own", None, "all_reduce"),
    "G": (F.conjugate, "own", "same", "all_reduce", None),
    "F_SEQUENCE": (F_SEQUENCE, "parts", "own", "all_gather", "reduce_scatter"),
    "G_SEQUENCE": (F_SEQUENCE.conjugate, "own", "parts", "reduce_scatter", "all_gather"),
    "GATHER": (GATHER, "parts", "same", "all_gather", None),
    "NOTHING": (NOTHING, "same", "same", None, None),
}
"""Each with the spaces that it maps from and to, and the collective of the forward and of the backward pass."""


def vectors(kind: Kind, ranks: int, seed: int) -> list[Tensor]:
    """What each rank has; whole numbers, so that sums are exact in any order."""
    draw = lambda i: torch.randint(-9, 10, (N, H), generator=torch.Generator().manual_seed(100 * seed + i)).double()
    if kind == "own":
        return [draw(rank) for rank in range(ranks)]
    return list(draw(0).chunk(ranks)) if kind == "parts" else [draw(0)] * ranks


def inner(kind: Kind, a: list[Tensor], b: list[Tensor]) -> float:
    products = [(x * y).sum().item() for x, y in zip(a, b, strict=True)]
    return products[0] if kind == "same" else sum(products)


def formula(into: Kind, out: Kind, x: list[Tensor]) -> list[Tensor]:
    """What the map gives each rank, by the definitions of the spaces."""
    ranks = len(x)
    whole = {"same": lambda: x[0], "parts": lambda: torch.cat(x), "own": lambda: torch.stack(x).sum(0)}[into]()
    return list(whole.chunk(ranks)) if out == "parts" else [whole] * ranks


def apply_all(ranks: int) -> dict[str, dict[str, Any]]:
    """Every pair's output and input gradient on this rank, what was moved, and whether an input was overwritten."""
    assert dist.group.WORLD is not None
    answers = {}
    for name, (pair, into, out, *_) in PAIRS.items():
        x = vectors(into, ranks, 1)[dist.get_rank()].clone().requires_grad_()
        y = vectors(out, ranks, 2)[dist.get_rank()].clone()
        with counted() as forward:
            result = pair(x, dist.group.WORLD)
        with counted() as backward:
            result.backward(y)
        assert x.grad is not None
        intact = torch.equal(x, vectors(into, ranks, 1)[dist.get_rank()]) and torch.equal(
            y, vectors(out, ranks, 2)[dist.get_rank()]
        )
        moved = [{op: count for (_, op), count in counts.items()} for counts in (forward, backward)]
        answers[name] = {"out": result.detach().numpy(), "grad": x.grad.numpy(), "moved": moved, "intact": intact}
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_pair_is_its_formula_and_its_conjugate_the_adjoint(ranks: int) -> None:
    """And moves the whole activation once in each direction, over one rank nothing."""
    answers = run_ranks(ranks, apply_all, ranks)
    for name, (_, into, out, *ops) in PAIRS.items():
        x, y = vectors(into, ranks, 1), vectors(out, ranks, 2)
        of = lambda what, name=name: [torch.from_numpy(answer[name][what]) for answer in answers]
        for found, expected in zip(of("out"), formula(into, out, x), strict=True):
            assert torch.equal(found, expected), name
        for found, expected in zip(of("grad"), formula(out, into, y), strict=True):
            assert torch.equal(found, expected), f"backward of {name}"
        assert inner(out, of("out"), y) == inner(into, x, of("grad")) != 0.0, name
        moved = [{op: Count(1, N * H * 8)} if op and ranks > 1 else {} for op in ops]
        for answer in answers:
            assert answer[name]["intact"], f"{name} overwrote what it was given"
            assert answer[name]["moved"] == moved, name
