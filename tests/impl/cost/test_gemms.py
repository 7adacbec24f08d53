"""The list of matrix products against the formulas' FLOPs, and against those that a real model does."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from impl.cost.flops import hardware_flops, model_flops
from impl.cost.gemms import core, products
from impl.cost.place import Place
from impl.model.bert import BERT
from impl.model.build import build_model
from impl.model.config import ModelConfig, padded_vocabulary
from impl.pipeline.stage import split
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from tests.impl.model.through import through


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Of any shape, on any mix of degrees."""
    tp, pp, dp, chunks = (draw(st.integers(1, 4)) for _ in range(4))
    chunks = chunks if pp > 1 else 1
    layers, heads = draw(st.integers(pp * chunks, 12 + pp * chunks)), tp * draw(st.integers(1, 3))
    model = ModelConfig(
        family=draw(st.sampled_from(["gpt", "bert"])),
        num_layers=layers,
        hidden_size=heads * draw(st.integers(1, 9)),
        num_heads=heads,
        seq_len=draw(st.integers(5, 40)),
        vocab_size=draw(st.integers(2, 2000)),
        shared_layers=pp == 1 and draw(st.booleans()),
    )
    size = draw(st.integers(1, 3))
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "one_f_one_b",
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )
    batch = size * dp * pp * draw(st.integers(1, 3))
    return Run(model=model, plan=plan, train=Recipe(global_batch=batch, microbatch=size))


@given(runs(), st.data())
def test_all_ranks_products_are_the_formulas_flops(run: Run, data: st.DataObject):
    assume(not run.problems())
    model, plan = run.model, run.plan
    positions = model.seq_len if model.family == "gpt" else data.draw(st.integers(1, model.seq_len))
    assert model.vocab_size is not None
    gemms = attention = anew = 0
    for stages in (Place(run, model.vocab_size, pp_rank).stages for pp_rank in range(plan.pp)):
        for product in products(run, model.vocab_size, stages, positions):
            gemms += product.flops * (plan.tp if product.is_split else 1)
        of_stages = core(run, stages)
        attention += of_stages.flops * plan.tp
        anew += of_stages._replace(forwards=of_stages.forwards - of_stages.backwards, backwards=0).flops * plan.tp
    replicas = run.microbatches * plan.dp
    padded = replace(model, vocab_size=padded_vocabulary(model.vocab_size, plan.tp))
    args = padded, run.train.global_batch, None, positions
    assert replicas * (gemms + attention) == hardware_flops("palm_12", *args, recompute=plan.recompute)
    if model.family == "gpt" and plan.recompute == "none":
        assert replicas * (2 * gemms + attention) == 2 * model_flops("causal_6", *args)
    if plan.recompute != "full":
        assert replicas * (gemms + attention - anew) == model_flops("palm_12", *args)


class Multiplied(TorchDispatchMode):
    """Counts the shapes [m, n, k] that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.shapes[len(a), b.shape[1], b.shape[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "shared"), [("gpt", False), ("gpt", True), ("bert", False)])
def test_a_real_model_multiplies_these_shapes(family: Any, shared: bool, serial: TensorParallel):
    model = ModelConfig(family=family, num_layers=3, hidden_size=24, num_heads=2, seq_len=20, shared_layers=shared)
    run, vocab = Run(model=model, train=Recipe(global_batch=4, microbatch=2)), 300
    (stage,) = split(model, vocab, 1)
    built = build_model(model, vocab, 0, torch.float32, serial)
    tokens = torch.randint(vocab, (2, 20))
    positions = torch.tensor([[1, 5, 9], [0, 2, 19]])
    with Multiplied() as counted:
        types = torch.zeros_like(tokens) if family == "bert" else None
        x = through(built.trunk, stage, None, (tokens, types), 20, None)
        loss_of(built, x, tokens, positions).backward()
    expected: Counter[tuple[int, int, int]] = Counter()
    for product in products(run, vocab, [stage], 20 if family == "gpt" else 3):
        expected[product.m, product.n, product.k] += product.count
    assert counted.shapes == expected


def loss_of(model: Any, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    if isinstance(model, BERT):
        return model.loss(x, tokens.gather(1, positions), positions, torch.tensor([0, 1]))
    return model.loss(x, tokens)
