"""Certificates: hashing changes no bit, equal runs are equal, one changed bit is found by step, tensor and rank."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.records.certificate import Certificate, Compared, compared, of_document
from impl.certificate import StepHashes, numbers
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, to_dict
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

STEPS, AT = 3, 1
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=16, vocab_size=512)
PLANS: list[dict[str, Any]] = [
    {}, {"dp": 2}, {"dp": 2, "overlap_grad_reduce": False}, {"dp": 2, "offload_optimizer": True}, {"tp": 2},
    *({"dp": 2, "zero_stage": stage} for stage in (1, 2, 3)), {"cp": 2}, {"pp": 2, "schedule": "zb_h1"},
    {"tp": 2, "dp": 2, "zero_stage": 1, "sequence_parallel": True}, {"dp": 4, "zero_stage": 3, "zero_group": 2},
]  # fmt: skip


def run(precision: Any = "fp32", **plan: Any) -> Run:
    plan = {"bucket_bytes": 10_000, **plan}
    recipe = Recipe(steps=STEPS, global_batch=4, microbatch=1, warmup_steps=0)
    return Run(model=MODEL, plan=Plan(**plan), train=recipe, precision=precision)


RUNS = [*(run(**plan) for plan in PLANS), run("bf16", dp=2, zero_stage=1), run("bf16", tp=2), run("fp16", dp=2)]


def losses(one: Trainer) -> list[str]:
    return [float(one.step(i).loss.item()).hex() for i in range(STEPS)]


def hashed(one: Trainer, change: Callable[[int], None] = lambda _: None) -> tuple[list[dict[str, Any]], list[Any]]:
    """Hashes of every step, with `change` called in each when its gradient is complete."""
    hashes = StepHashes(one)
    of_gradient, step = one.on_gradient, 0

    def changed() -> None:
        change(step)
        of_gradient()

    one.on_gradient = changed
    lines = []
    for step in range(STEPS):
        lines.append(hashes.of(one.step(step)))
    return lines, hashes.pieces


def flip(tensor: Tensor) -> None:
    """Flip the last bit of a tensor's fourth number."""
    tensor.view(torch.uint8)[3 * tensor.itemsize].bitwise_xor_(1)


def with_another_gradient(one: Trainer) -> Any:
    is_here = dist.get_rank() == dist.get_world_size() - 1
    return hashed(one, lambda step: flip(one.buckets[0].gradient) if is_here and step == AT else None)


def with_another_weight(one: Trainer) -> Any:
    """The weight is another one before it is hashed, after it was updated."""
    update, calls = one.optimizer.step, 0

    def changed(lr: float, factor: torch.Tensor | None = None) -> None:
        nonlocal calls
        update(lr, factor)
        calls += 1
        if dist.get_rank() == 0 and calls == AT + 1:
            one.parameters.settle(one.buckets[0])  # which would write it again
            flip(one.optimizer.masters[-1])

    one.optimizer.step = changed  # type: ignore[method-assign]
    return hashed(one)


def certificate(one: Run, ranks: list[Any], **numerics: str) -> Certificate:
    parts = [{"numerics": {"host": "a", "backend": "gloo", **numerics}, "pieces": pieces} for _, pieces in ranks]
    steps = [list(of_ranks) for of_ranks in zip(*(lines for lines, _ in ranks), strict=True)]
    document = {"config": to_dict(one), "resolved": {}, "ranks": parts, "certificate": steps}
    return of_document(json.loads(json.dumps(document)))


@pytest.fixture(scope="module")
def first(data: Path) -> dict[Run, list[Any]]:
    return on_ranks(hashed, RUNS, data)


def test_hashing_changes_no_loss_and_other_processes_give_equal_certificates(
    first: dict[Run, list[Any]], data: Path
) -> None:
    some = RUNS[1::3]
    second, without = on_ranks(hashed, some, data), on_ranks(losses, some, data)
    for one in some:
        result = compared(certificate(one, first[one]), certificate(one, second[one]))
        assert (result.equal_steps, result.first, result.changes) == (STEPS, None, [])
        for (lines, pieces), expected in zip(first[one], without[one], strict=True):
            assert [line["loss"] for line in lines] == expected
            assert all(len(line["gradient"]) == len(line["weight"]) == len(pieces) > 3 for line in lines)


def test_every_element_is_hashed_once_by_the_ranks_that_share_it(first: dict[Run, list[Any]]) -> None:
    for one in [one for one in RUNS if one.plan.tp * one.plan.pp == 1]:
        owned: dict[str, set[int]] = {}
        for _, pieces in first[one]:
            for name, start, stop in pieces:
                owned.setdefault(name, set()).update(range(start, stop))
        sizes = {name: max(elements) + 1 for name, elements in owned.items()}
        assert {name: len(elements) for name, elements in owned.items()} == sizes
        assert sum(sizes.values()) > 12 * 2 * 16**2


def planted(one: Run, changed: Any, first: dict[Run, list[Any]], data: Path) -> Compared:
    return compared(certificate(one, first[one]), certificate(one, on_ranks(changed, [one], data)[one]))


@pytest.mark.parametrize("one", [RUNS[7], RUNS[9], RUNS[10]], ids=lambda one: str(one.plan)[5:60])
def test_a_flipped_bit_is_found(one: Run, first: dict[Run, list[Any]], data: Path) -> None:
    last = one.plan.world_size - 1
    found = planted(one, with_another_gradient, first, data)
    assert found.equal_steps == AT
    assert found.first is not None
    assert (found.first.step, found.first.of, found.first.ranks, found.first.differing) == (AT, "gradient", [last], 1)
    assert found.first.tensor == first[one][last][1][0][0]
    assert found.first.sums[0] != found.first.sums[1]

    found = planted(one, with_another_weight, first, data)
    assert found.first is not None
    assert (found.first.step, found.first.of, found.first.ranks, found.first.differing) == (AT, "weight", [0], 1)
    assert found.first.tensor == first[one][0][1][0][0]


def test_other_configurations_are_not_compared(first: dict[Run, list[Any]]) -> None:
    serial, parallel = certificate(RUNS[0], first[RUNS[0]]), certificate(RUNS[1], first[RUNS[1]])
    with pytest.raises(ValueError, match=r"plan\.dp 1 and 2; other plans sum in another order"):
        compared(serial, parallel)
    other = replace(RUNS[0], seed=1)
    with pytest.raises(ValueError, match="seed 0 and 1; valid"):
        compared(serial, certificate(other, first[RUNS[0]]))
    found = compared(serial, certificate(replace(RUNS[0], threads=2), first[RUNS[0]], cpu_capability="AVX512"))
    assert found.first is None
    assert [(change.what, bool(change.why)) for change in found.changes] == [
        ("cpu_capability", True),
        ("threads", True),
    ]


def test_a_number_is_of_all_bits_and_finite_or_none() -> None:
    tensor = torch.arange(300_000, dtype=torch.bfloat16)
    assert numbers(tensor)[0] == numbers(tensor.clone())[0]
    zero = torch.zeros(5)
    assert numbers(zero)[1:] == (0.0, 0.0)
    assert numbers(zero)[0] != numbers(-zero)[0]
    assert numbers(torch.tensor([3.0, 4.0]))[1:] == (5.0, 7.0)
    assert numbers(torch.tensor([1.0, torch.nan]))[1:] == (None, None)
