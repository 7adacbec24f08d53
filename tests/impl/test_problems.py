"""Runs that cannot be: each says why in one line, with what is valid."""

from typing import Any

import pytest

from impl.run import Run, with_fields

BASE: dict[str, Any] = {
    "model.num_layers": 4, "model.hidden_size": 32, "model.num_heads": 8, "model.seq_len": 24, "train.global_batch": 4,
    "train.microbatch": 1,
}  # fmt: skip
ULYSSES = {"plan.cp_attention": "ulysses"}
RING = {"plan.cp": 2}
GRID = {"plan.tp": 2, "plan.tp3": (1, 2, 1)}
EXPERTS = {"model.experts": 4}
SHARED = {"model.shared_layers": True}
MUP = {"train.parametrization": "mup", "train.base_hidden_size": 16}
RACE = {"model.family": "bert", "data.race": "synthetic", "train.global_batch": 16, "train.microbatch": 4}
DIMENSIONS = {"evaluation.dimensions": True, "evaluation.sequences": 4}
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    # ranks that share sequences
    (ULYSSES, "plan.cp_attention ulysses is for several ranks; valid with plan.cp above 1"),
    (
        {"plan.cp": 5},
        "plan.cp 5, plan.cp_attention ring has to divide half of model.seq_len 24; valid: 1, 2, 3, 4, 6, 12",
    ),
    (
        ULYSSES | {"plan.cp": 4, "plan.tp": 4, "model.kv_heads": 4},
        "plan.cp 4, plan.cp_attention ulysses has to divide model.seq_len 24, and a rank's 2 heads and 1 of keys "
        "and values; valid: 1",
    ),
    (
        RING | {"model.dropout": 0.1},
        "plan.cp_attention ring has no probabilities at once, and model.attention_dropout is of them; valid: "
        "model.attention_dropout 0, or plan.cp_attention ulysses",
    ),
    (
        {"plan.cp": 4, "plan.tp": 4, "plan.sequence_parallel": True},
        "plan.tp 4 does not divide model.seq_len 6 of plan.cp 4, which plan.sequence_parallel splits; valid degrees: "
        "1, 2",
    ),
    (
        RING | {"plan.zero_stage": 1, "plan.zero_group": 3},
        "plan.zero_group 3 does not divide plan.dp 1 x plan.cp 2; valid: 1, 2",
    ),
    (RING | {"engine": "deepspeed"}, "the deepspeed engine ... has no plan.cp 2"),
    (RING | {"compile": True}, "compile with plan.cp 2 is not built; valid: compile False"),
    # grids of tensor-parallel ranks
    (GRID | {"plan.tp3": (2, 2, 1)}, "has 2 x 2 ranks for a layer's products, plan.tp is 2; valid: plan.tp 4"),
    (
        {"plan.tp": 2, "plan.tp3": (1, 2, 2), "plan.dp": 4, "plan.zero_stage": 3},
        "plan.tp3 (1, 2, 2): 2 data-parallel ranks divide weights, plan.zero_stage is 3 over 4; valid: "
        "plan.zero_stage 3 with plan.zero_group 2",
    ),
    (
        {"plan.tp": 3, "plan.tp3": (1, 3, 1)},
        "plan.tp3 (1, 3, 1): y does not divide model.hidden_size 32; valid: 1, 2, 4, 8, 16, 32",
    ),
    (
        {"plan.tp": 16, "plan.tp3": (16, 1, 1)},
        "plan.tp 16 does not divide model.num_heads 8; valid degrees: 1, 2, 4, 8",
    ),
    (
        {"plan.tp": 6, "plan.tp3": (3, 2, 1)},
        "plan.tp3's x, 3, does not divide model.num_heads 8; valid degrees: 1, 2, 4, 8",
    ),
    (GRID | {"plan.sequence_parallel": True}, "plan.sequence_parallel is not built with y above 1; valid: False"),
    (GRID | {"model.norm": "dyt"}, "model.norm dyt is not built with y above 1; valid: layernorm, rmsnorm"),
    (GRID | {"model.family": "bert"}, "model.family bert is not built with y above 1; valid: gpt"),
    (GRID | {"compile": True}, "compile ... with y above 1"),
    (GRID | {"engine": "torch"}, "engine ... with y above 1"),
    (GRID | DIMENSIONS, "evaluation.dimensions ... with y above 1"),
    # experts
    ({"plan.dp": 2, "plan.ep": 2}, "plan.ep 2 shares experts, of which the model has none; valid: 1, or"),
    (
        EXPERTS | {"plan.dp": 4, "plan.ep": 4, "plan.zero_stage": 1, "plan.zero_group": 2},
        "plan.ep 4 does not divide model.experts 4 and the 2",
    ),
    (
        EXPERTS | {"plan.dp": 8, "plan.ep": 8, "train.global_batch": 8},
        "plan.ep 8 does not divide model.experts 4 and the 8 ranks of plan.dp and plan.cp; ",
    ),
    (EXPERTS | {"model.expert_size": 6, "plan.tp": 4}, "plan.tp 4 does not divide model.expert_size 6; valid: 1"),
    (EXPERTS | RING | {"model.expert_capacity": 1.0}, "model.expert_capacity of whole sequences with plan.cp 2"),
    # the maximal update parametrization
    ({"train.parametrization": "mup"}, "valid: train.base_hidden_size N"),
    ({"train.base_layers": 2}, "valid: train.parametrization mup"),
    (MUP | {"model.norm_placement": "without"}, "valid: model.tied False"),
    (MUP | {"engine": "torch"}, "the torch engine's plain has no train.parametrization 'mup'"),
    # layers that share weights
    (SHARED | {"plan.pp": 2}, "model.shared_layers with plan.pp 2, plan.chunks 1 is not built; valid: 1 and 1"),
    (SHARED | MUP | {"train.base_layers": 2}, "train.base_layers 2 is not built for model.shared_layers; valid: None"),
    (
        SHARED | MUP | {"model.norm_placement": "post"},
        "needs a norm before a tied head alone, norm placement post has none; valid: model.tied False",
    ),
    (SHARED | {"engine": "torch"}, "the torch engine's plain has no model.shared_layers"),
    # RACE
    (RACE | {"model.family": "gpt"}, "valid: model.family bert"),
    (RACE | {"plan.pp": 2}, "data.race with plan.pp 2"),
    (RACE | {"train.global_batch": 8, "train.microbatch": 2}, "valid: multiples of 4"),
    (RACE | {"engine": "torch", "start": "somewhere"}, "start somewhere: the torch engine has no checkpoints"),
    # dimensions that stand out
    (DIMENSIONS | {"plan.pp": 2}, "evaluation.dimensions ... plan.pp above 1"),
    (DIMENSIONS | {"plan.tp": 2, "plan.sequence_parallel": True}, "evaluation.dimensions ... plan.sequence_parallel"),
    (DIMENSIONS | {"compile": True}, "evaluation.dimensions ... compile"),
    (DIMENSIONS | {"engine": "torch"}, "evaluation.dimensions ... engine torch"),
    (DIMENSIONS | {"evaluation.sequences": None}, "evaluation.dimensions ... evaluation.sequences None"),
]


@pytest.mark.parametrize(("fields", "words"), PROBLEMS)
def test_a_run_that_cannot_be_says_why(fields: dict[str, Any], words: str) -> None:
    first, *others = with_fields(Run(), BASE | fields).problems()
    assert all(part in first for part in words.split(" ... ")), first
    assert "\n" not in first
    assert len(others) == ("start" in fields), "the torch engine has no BERT either"
