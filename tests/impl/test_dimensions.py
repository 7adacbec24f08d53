"""What stands out in what layers hand on: one that is planted is found, on any layout, and is worth what it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from impl.dimensions import dimensions
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
RUN = Run(
    model=MODEL,
    train=Recipe(steps=2, global_batch=4, microbatch=2),
    evaluation=EvaluationConfig(sequences=4, dimensions=True),
)
PLANTED = 5


def looked(trainer: Trainer) -> Any:
    """Dimensions before and after training ends, and the loss of a step after that."""
    trainer.step(0)
    return dimensions(trainer, final=False), dimensions(trainer, final=True), trainer.step(1).loss.item()


def trained(trainer: Trainer) -> float:
    trainer.step(0)
    return trainer.step(1).loss.item()


def with_one_planted(trainer: Trainer) -> Any:
    """A dimension that every token's embedding has much of, and a weight of a norm that is far from the others."""
    trunk = trainer.model.trunk
    with torch.no_grad():
        assert trunk.positions is not None
        trunk.positions.weight[:, PLANTED] += 3.0
        for layer in trunk.layers.values():
            for name, module in layer.named_modules():
                if name == "mlp_norms.input" and isinstance(module, torch.nn.LayerNorm):
                    module.weight[PLANTED + 1] = 9.0
    return dimensions(trainer, final=True)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_what_is_planted_is_found(family: str, data: Path) -> None:
    run = replace(RUN, model=replace(MODEL, family=family))
    found = on_ranks(with_one_planted, [run], data)[run][0]
    for sizes in found["layers"].values():
        assert max(range(len(sizes)), key=lambda i: sizes[i]) == PLANTED
    assert {name for name in found["norms"] if "mlp_norms" in name} == {f"{i}.mlp_norms.input" for i in range(2)}
    assert all(norm["weight"][1] == PLANTED + 1 for name, norm in found["norms"].items() if "mlp" in name)
    assert all(norm["weight"][0] == 0 for name, norm in found["norms"].items() if "attention" in name)
    (strongest, without), (average, almost) = found["zeroed"]
    assert strongest == PLANTED != average
    assert abs(without - found["nats"]) > 3 * abs(almost - found["nats"])


def test_all_layouts_see_the_same_and_looking_changes_no_training(data: Path) -> None:
    plans = [Plan(), Plan(dp=2), Plan(tp=2), Plan(dp=2, zero_stage=3)]
    runs = [replace(RUN, plan=plan, precision="fp64") for plan in plans]
    found = on_ranks(looked, runs, data)
    first, last, loss = found[runs[0]][0]
    assert [loss] == on_ranks(trained, runs[:1], data)[runs[0]]
    assert "zeroed" not in first
    assert set(last) == {"layers", "norms", "nats", "zeroed"}
    for run in runs[1:]:
        for _, of_rank, _ in found[run]:
            assert of_rank["nats"] == pytest.approx(last["nats"], rel=1e-7)
            assert of_rank["layers"] == {i: pytest.approx(sizes, rel=1e-3) for i, sizes in last["layers"].items()}
            assert [one[0] for one in of_rank["zeroed"]] == [one[0] for one in last["zeroed"]]
