"""Activation memory: formulas against Korthikanti et al. 2022, and against what a rank really keeps, to the byte."""

from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.experiment.published import published
from impl.cost.activations import has_products, layer_bytes, stage_bytes, working_bytes
from impl.cost.place import Place
from impl.instruments import ActivationBytes, activation_bytes, tracked
from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.model.dropout import DropoutKey
from impl.model.layers import Layer
from impl.model.norm_placement import PLACEMENTS
from impl.model.sizes import named
from impl.pipeline.stage import Stage
from impl.plan import Plan
from impl.recipe import Recipe
from impl.recompute import recompute
from impl.run import Precision, Run
from impl.tensor_parallel.group import TensorParallel
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.on_ranks import on_ranks

# The papers' numbers -------------------------------------------------------------------------------------------------

MICROBATCH = {"korthikanti-22b": 4}
PAPER = {  # table 3: pipeline ranks and chunks of each; all with t = 8
    "korthikanti-22b": (1, 1),
    "korthikanti-175b": (8, 3),
    "korthikanti-530b": (35, 3),
    "korthikanti-1t": (64, 1),
}
WAYS: dict[str, dict[str, Any]] = {
    "sequence_parallel": {"sequence_parallel": True},
    "selective": {"recompute": "selective"},
    "sequence_parallel_selective": {"sequence_parallel": True, "recompute": "selective"},
    "full_recompute": {"recompute": "full"},
}


def paper_run(name: str, **plan: Any) -> Run:
    degree: dict[str, Any] = {"tp": 8}
    recipe = Recipe(microbatch=MICROBATCH.get(name, 1))
    return Run(model=named(name), plan=Plan(**degree | plan), train=recipe, precision="fp16")


def without_statistics(run: Run) -> int:
    """A layer's bytes as the paper counts them, without means and deviations of its norms."""
    tokens = run.train.microbatch * run.model.seq_len // (run.plan.tp if run.plan.sequence_parallel else 1)
    has_norms = run.plan.recompute != "full"
    return layer_bytes(run) - has_norms * run.model.norms.of_tokens * 2 * 2 * tokens


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("name", PAPER)
def test_table_2_in_its_own_letters(name: str, t: int) -> None:
    run = paper_run(name)
    s, b, h, a = run.model.seq_len, run.train.microbatch, run.model.hidden_size, run.model.num_heads
    expected = {
        "": 10 + 24 / t + 5 * a * s / (h * t),
        "sequence_parallel": 34 / t + 5 * a * s / (h * t),
        "selective": 10 + 24 / t,
        "sequence_parallel_selective": 34 / t,
        "full_recompute": 2,
    }
    for way, each in expected.items():
        found = without_statistics(paper_run(name, tp=t, **WAYS.get(way, {})))
        assert found == pytest.approx(s * b * h * each, rel=1e-12)


@pytest.mark.parametrize("name", PAPER)
def test_figure_1(name: str) -> None:
    """The first pipeline rank's layers: equation 5, times 1 + (p - 1) / (p m) for m chunks a rank (section 4.2.3)."""
    p, m = PAPER[name]
    layers = named(name).num_layers * (1 + (p - 1) / (p * m) if m > 1 else 1)
    for quantity, way in (("", {}), ("_sequence_parallel_selective", WAYS["sequence_parallel_selective"])):
        [gib] = published("korthikanti2022", f"activations_gib{quantity}").query("model == @name")["value"]
        assert layers * layer_bytes(paper_run(name, **way)) / 2**30 == pytest.approx(gib, rel=0.005)


def test_ends_of_the_model_keep_what_section_4_3_says() -> None:
    """The embedding's dropout sbh, the last norm 2sbh, the head's input 2sbh and logits in fp32 4sbV; here they are as
    wide as the weights. Index and statistics are a few bytes a token."""
    run = paper_run("korthikanti-22b", sequence_parallel=True)
    model, tokens = run.model, 4 * 2048
    stage = Stage(range(model.num_layers), is_first=True, is_last=True)
    parts = stage_bytes(run, 51200, stage, model.seq_len)
    assert parts["layers"] == model.num_layers * layer_bytes(run)
    assert parts["embedding_norm"] == tokens * model.hidden_size // 8
    assert parts["head"] == pytest.approx(4 * tokens * model.hidden_size // 8, rel=1e-3)
    assert parts["loss"] == pytest.approx(2 * tokens * 51200 // 8, rel=2e-3)


# What is really kept -------------------------------------------------------------------------------------------------

MODEL = ModelConfig(num_layers=3, hidden_size=40, num_heads=10, seq_len=12)
"""Neither its tokens nor its heads are a multiple of the blocks in which masks are drawn."""
RECIPE = Recipe(steps=1, global_batch=6, microbatch=3)
SHARED = [
    Plan(), Plan(tp=2), Plan(tp=2, sequence_parallel=True), Plan(recompute="selective"),
    Plan(tp=2, recompute="selective"), Plan(tp=2, sequence_parallel=True, recompute="selective"),
    Plan(recompute="full"), Plan(tp=2, recompute="full"), Plan(tp=2, sequence_parallel=True, recompute="full"),
    Plan(tp=2, recompute="full", partition_activations=True), Plan(recompute="full", offload_activations=True),
]  # fmt: skip
PIPELINES = [
    Plan(pp=2), Plan(pp=2, schedule="zb_h1"), Plan(pp=2, recompute="selective", schedule="gpipe"),
    Plan(pp=3, recompute="full"), Plan(dp=2, zero_stage=3), Plan(dp=2, zero_stage=3, recompute="full"),
]  # fmt: skip
ULYSSES: dict[str, Any] = {"cp_attention": "ulysses"}
CONTEXT = [
    Plan(cp=2), Plan(cp=2, tp=2, sequence_parallel=True), Plan(cp=3, recompute="selective"), Plan(cp=2, pp=2),
    Plan(cp=2, **ULYSSES), Plan(cp=2, tp=2, sequence_parallel=True, **ULYSSES), Plan(cp=2, recompute="full", **ULYSSES),
    Plan(cp=2, recompute="selective", **ULYSSES),
]  # fmt: skip


def layouts() -> list[Run]:
    """Every plan with other blocks and with norm placements; families, norms, MLPs' functions and so on in turn."""
    rest = cycle(product((0.1, 0.0), ("fp32", "bf16", "fp16", "fp64", "bf16")))  # 10, which 11 is no multiple of
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    blocks = [
        Run(model=replace(model, num_layers=3, seq_len=12), plan=plan, train=RECIPE, precision=precisions[i % 2])
        for (i, plan), (j, model) in product(enumerate([*SHARED, *PIPELINES]), enumerate(BLOCKS.values()))
        if (i + j) % 3 == 0
    ]
    norms, families = cycle(("layernorm", "rmsnorm", "dyt")), cycle(("gpt", "bert", "bert", "gpt"))
    mlps = cycle(("gelu", "relu", "squared_relu", "gelu_erf", "relu"))
    context = [
        Run(
            model=replace(model, seq_len=12, attention_dropout=0.0 if plan.is_ring else None, kv_heads=None),
            plan=plan, train=RECIPE, precision=precisions[i % 2],
        )
        for i, (plan, model) in enumerate(
            product(CONTEXT, (BLOCKS["grouped queries, dropout"], BLOCKS["opt"], BLOCKS["rotary bert"]))
        )
    ]  # fmt: skip
    return blocks + context + [
        Run(
            model=replace(MODEL, family=family, norm_placement=placement, norm=norm, mlp=mlp, dropout=dropout),
            plan=plan, train=RECIPE, precision=precision,
        )
        for (plan, placement), family, norm, mlp, (dropout, precision) in zip(
            [*product(SHARED, PLACEMENTS)][::2] + [(plan, "qk") for plan in PIPELINES],
            families, norms, mlps, rest, strict=False,
        )
    ]  # fmt: skip


def kept(one: Trainer) -> tuple[int, int, ActivationBytes]:
    return one.pp_group.rank(), one.head_positions, activation_bytes(one)


def test_every_rank_of_131_layouts_keeps_what_the_formulas_say_to_the_byte(data: Path) -> None:
    runs = layouts()
    assert len(set(runs)) == 131
    for run, ranks in on_ranks(kept, runs, data).items():
        vocab_size = run.model.vocabulary(257)
        for pp_rank, positions, found in ranks:
            stages = Place(run, vocab_size, pp_rank).stages
            parts = [stage_bytes(run, vocab_size, stage, positions) for stage in stages]
            expected = sum(sum(each.values()) for each in parts), layer_bytes(run)
            assert (found.model, found.layer) == expected, (run, parts)


@pytest.mark.parametrize("microbatch", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("way", ["none", "selective", "full"])
def test_the_backward_pass_of_a_layer_takes_what_the_formula_says(
    way: Any, dropout: float, microbatch: int, serial: TensorParallel
) -> None:
    recipe = replace(RECIPE, microbatch=microbatch)
    run = Run(model=replace(MODEL, dropout=dropout), plan=Plan(recompute=way), train=recipe)
    model = build_model(run.model, 300, 0, torch.float32, serial)
    whole = model.trunk.layers["0"]
    assert isinstance(whole, Layer)
    whole.attention.recompute_core = way == "selective"
    layer = partial(whole, seq_len=run.model.seq_len, key=DropoutKey(0, 0, 0))
    x = torch.randn(microbatch * run.model.seq_len, run.model.hidden_size, requires_grad=True)
    with tracked({"parameters": list(model.parameters())}, x.device) as memory:
        out = recompute(layer, x) if way == "full" else layer(x)
        before = memory.kept
        out.sum().backward(retain_graph=True)
    assert before == layer_bytes(run)
    assert memory.kept - before == working_bytes(run)


runs = st.builds(
    lambda family, norm, heads, width, s, rate, b, t, precision: Run(
        model=ModelConfig(
            family=family, norm_placement=norm, hidden_size=8 * heads * width, num_heads=8 * heads, seq_len=8 * s,
            dropout=rate,
        ),
        plan=Plan(tp=t),
        train=Recipe(microbatch=b),
        precision=precision,
    ),
    *(st.sampled_from(("gpt", "bert")), st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 4), st.integers(1, 64)),
    *(st.integers(1, 64), st.sampled_from((0.0, 0.1)), st.integers(1, 4), st.sampled_from((1, 2, 4, 8))),
    st.sampled_from(("fp32", "bf16", "fp16")),
)  # fmt: skip


@given(runs)
def test_what_is_not_kept_is_worked_with(run: Run) -> None:
    """A layer's bytes are there at its backward pass, wherever they come from."""
    with_plan = lambda **fields: replace(run, plan=replace(run.plan, **fields))
    whole = layer_bytes(run)
    assert working_bytes(run) == 0
    full, partitioned = with_plan(recompute="full"), with_plan(recompute="full", partition_activations=True)
    assert layer_bytes(full) + working_bytes(full) == whole
    assert layer_bytes(partitioned) == layer_bytes(full) / run.plan.tp
    assert working_bytes(partitioned) == whole
    selective = with_plan(recompute="selective")
    assert layer_bytes(full) < layer_bytes(selective) <= whole <= layer_bytes(selective) + working_bytes(selective)
    assert (layer_bytes(selective) == whole) == has_products(run)  # nothing of the core is kept in any case
    split = layer_bytes(with_plan(sequence_parallel=True))
    assert split < whole if run.plan.tp > 1 else split == whole
