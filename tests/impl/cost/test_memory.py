"""Memory formulas against the papers, and against what a rank really holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.published import published
from impl.cost.memory import ELEMENT_BYTES, StateBytes, activation_bytes_per_layer, state_bytes
from impl.cost.traffic import Place
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig, padded_vocabulary
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import ActivationBytes, Trainer
from tests.impl.pipeline.on_ranks import on_ranks
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, dropout=0.1)
PAPER = ("korthikanti-22b", "korthikanti-175b", "korthikanti-530b", "korthikanti-1t")
"""All with t = 8."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


@pytest.mark.parametrize("name", PAPER)
def test_sequence_parallelism_saves_what_figure_7_shows(name: str) -> None:
    rows = published("korthikanti2022", "activation_memory_sequence_parallel").to_dict("records")
    [percent] = [row["value"] for row in rows if row["model"] == name]
    with_it, without = (activation_bytes_per_layer(named(name), 1, tp=8, sequence_parallel=on) for on in (True, False))
    assert 100 * with_it / without == pytest.approx(percent, abs=0.5)  # half a point: read off a bar chart


def test_table_2_in_its_own_letters() -> None:
    model = named("korthikanti-175b")
    s, h, a, b = model.seq_len, model.hidden_size, model.num_heads, 3
    for t in (1, 2, 8):
        scores = 5 * a * s / (h * t)
        alone, split = (activation_bytes_per_layer(model, b, tp=t, sequence_parallel=on) for on in (False, True))
        assert alone == pytest.approx(s * b * h * (10 + 24 / t + scores))
        assert split == pytest.approx(s * b * h * (34 / t + scores))


def held(run: Run, data: Path) -> tuple[StateBytes, ActivationBytes]:
    one = Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))
    activations = one.activation_bytes()
    one.step(0)
    return one.state_bytes(), activations


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_states_are_the_formula_to_the_byte(family: str, precision: Precision, tp: int, data: Path) -> None:
    run = Run(
        model=replace(MODEL, family=family),
        plan=Plan(tp=tp),
        train=Recipe(steps=1, global_batch=2, microbatch=2),
        precision=precision,
    )
    expected = state_bytes(run.model, run.model.vocabulary(257), tp=tp, precision=precision)
    for states, _ in run_ranks(tp, held, run, data):
        assert states == expected


def held_here(one: Trainer) -> tuple[int, StateBytes]:
    """Pipeline rank, and its states after a step."""
    one.step(0)
    return one.pp_group.rank(), one.state_bytes()


STATES: list[tuple[Plan, Precision]] = [
    (Plan(pp=2), "fp32"),
    (Plan(pp=4, schedule="gpipe"), "bf16"),
    (Plan(pp=2, schedule="interleaved", chunks=3), "fp64"),
    (Plan(pp=2, schedule="zb_h1", tp=2), "bf16"),
    (Plan(pp=3, dp=2), "bf16"),
    (Plan(pp=2, schedule="interleaved", chunks=2, tp=2, dp=2, sequence_parallel=True), "fp32"),
    # rank 0 has both ends, and the embedding once
    (Plan(pp=3, schedule="tests.impl.pipeline.own_schedule:two_ways", chunks=2), "bf16"),
]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_states_of_every_pipeline_rank_are_the_formula_to_the_byte(family: str, data: Path) -> None:
    model = replace(MODEL, family=family, num_layers=7, norm_placement="sandwich" if family == "bert" else "pre")
    recipe = Recipe(steps=1, global_batch=12, microbatch=1)
    runs = [Run(model=model, plan=plan, train=recipe, precision=precision) for plan, precision in STATES]
    for run, ranks in on_ranks(held_here, runs, data).items():
        vocab_size, of_rank = run.model.vocabulary(257), {}
        for pp_rank, states in ranks:
            stages = Place(run, vocab_size, pp_rank).stages
            expected = state_bytes(run.model, vocab_size, tp=run.plan.tp, precision=run.precision, stages=stages)
            assert states == expected
            of_rank[pp_rank] = states
        whole = state_bytes(run.model, vocab_size, tp=run.plan.tp, precision=run.precision)
        tied = padded_vocabulary(vocab_size, run.plan.tp) // run.plan.tp * run.model.hidden_size
        twice = tied if ":" not in run.plan.schedule else 0
        each = {"fp64": 32, "fp32": 16, "bf16": 2 + 3 * 4 + 4}[run.precision]
        assert len(of_rank) == run.plan.pp
        assert sum(states.split for states in of_rank.values()) == whole.split + twice * each
        assert sum(states.whole for states in of_rank.values()) == whole.whole


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_a_layer_keeps_what_the_formula_says(
    tp: int, sequence_parallel: bool, family: str, norm: str, data: Path
) -> None:
    run = Run(
        model=replace(MODEL, family=family, norm_placement=norm),
        plan=Plan(tp=tp, sequence_parallel=sequence_parallel),
        train=Recipe(steps=1, global_batch=2, microbatch=2),
        precision="bf16",
    )
    expected = activation_bytes_per_layer(run.model, 2, tp=tp, sequence_parallel=sequence_parallel)
    # what the formula leaves out: a mean and a deviation for every token and norm
    tokens = 2 * run.model.seq_len // (tp if sequence_parallel else 1)
    statistics = 2 * run.model.norms.norms_per_block * tokens * 2 * ELEMENT_BYTES["bf16"]
    for _, (model, layer) in run_ranks(tp, held, run, data):
        assert layer == expected + statistics
        assert model > run.model.num_layers * layer
