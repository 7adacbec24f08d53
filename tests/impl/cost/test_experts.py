"""What runs with experts keep, send and need: formulas against what ranks do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.cost.activations import layer_bytes, stage_bytes
from impl.cost.memory import state_bytes
from impl.cost.parameters import count_parameters, named_parameters
from impl.cost.place import Place
from impl.cost.traffic import step_traffic
from impl.instruments import state_bytes as held
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.cost.test_activations import kept
from tests.impl.cost.test_memory_measured import far
from tests.impl.cost.test_traffic import step
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(
    num_layers=4, hidden_size=32, num_heads=4, seq_len=16, vocab_size=512, biases=False, tied=False, mlp="swiglu",
    mlp_size=40, norm="rmsnorm", experts=4, experts_per_token=2, balance_loss=0.01, balance_bias=0.001,
)  # fmt: skip
PROTOTYPES = replace(
    MODEL, experts_per_token=1, expert_prototypes=2, experts_every=2, shared_expert_size=24, expert_size=16,
    balance_bias=0.0, mlp="gelu", biases=True, tied=True, dropout=0.1,
)  # fmt: skip
ALONE: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"tp": 2, "precision": "bf16"},
    {"tp": 2, "sequence_parallel": True},
    {"recompute": "selective"},
    {"recompute": "full", "precision": "bf16"},
    {"pp": 2, "recompute": "full"},
    {"pp": 2, "schedule": "zb_h1"},
    {"dp": 2, "zero_stage": 3},
]
SHARED: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "zero_stage": 3, "precision": "bf16"},
    {"dp": 4, "ep": 4, "zero_stage": 1},
    {"dp": 4, "ep": 2, "zero_stage": 2, "zero_group": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"cp": 2, "ep": 2},
    {"cp": 2, "ep": 2, "recompute": "selective"},
    {"cp": 2, "ep": 2, "recompute": "full", "cp_attention": "ulysses"},
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb_h1", "zero_stage": 2},
]


def runs(ways: list[dict[str, Any]], **model: Any) -> list[Run]:
    found = []
    for way in ways:
        plan = Plan(bucket_bytes=10_000, **{name: value for name, value in way.items() if name != "precision"})
        recipe = Recipe(steps=1, global_batch=4 * plan.dp, microbatch=2)
        for one in (MODEL, PROTOTYPES):
            rate = 0.0 if plan.is_ring else None
            config = replace(one, attention_dropout=rate, **{"num_layers": 2 * plan.pp} | model)
            found.append(Run(model=config, plan=plan, train=recipe, precision=way.get("precision", "fp32")))
    return found


def measured(one: Trainer) -> tuple[list[tuple[str, tuple[int, ...]]], Any, Any, Any]:
    named = [(name, tuple(p.shape)) for name, p in one.model.named_parameters()]
    return named, held(one), kept(one), step(one)


def test_ranks_have_keep_and_send_what_the_formulas_say(data: Path) -> None:
    """What is sent is what leaves tokens' ranks and comes back, however they choose; what is kept depends on that
    where ranks share experts."""
    alone = runs(ALONE)
    for run, ranks in on_ranks(measured, [*alone, *runs(SHARED)], data).items():
        plan = run.plan
        for i, (named, states, (pp_rank, positions, keeps), sends) in enumerate(ranks):
            place = Place(run, 512, pp_rank)
            expected = named_parameters(run.model, None, plan.tp, place.stages, plan.ep)
            first = i // plan.tp % plan.ep * (run.model.experts // plan.ep)
            renamed = [_renamed(p.name, first) for p in expected]
            assert named == [(name, p.shape) for name, p in zip(renamed, expected, strict=True)]
            if not plan.zero_stage:
                of = {"tp": plan.tp, "precision": run.precision, "stages": place.stages, "ep": plan.ep}
                assert states == state_bytes(run.model, 512, **of)
            assert sends.counts == step_traffic(place, sends.head_positions), plan
            if run in alone:
                parts = [stage_bytes(run, 512, stage, positions) for stage in place.stages]
                of_last = layer_bytes(run, of_experts=run.model.has_experts(place.stages[-1].layers[-1]))
                assert (keeps.model, keeps.layer) == (sum(sum(each.values()) for each in parts), of_last), (run, parts)
        if plan == replace(Plan(), bucket_bytes=plan.bucket_bytes):
            assert count_parameters(run.model) == sum(p.size for p in named_parameters(run.model, None, 1))


def _renamed(name: str, first: int) -> str:
    """The name of the same expert of a rank whose first one is this."""
    if ".experts." not in name:
        return name
    before, expert, after = name.split(".experts.")[0], *name.split(".experts.")[1].split(".", 1)
    return f"{before}.experts.{first + int(expert)}.{after}"


def test_memory_is_what_is_predicted(data: Path) -> None:
    """Of ranks that have all experts: what others get depends on the choices."""
    size = {"num_layers": 4, "hidden_size": 64, "seq_len": 64, "mlp_size": 96}
    in_turn = [run for i, run in enumerate(runs(ALONE, **size)) if i % 4 in (0, 3)]  # either model with each way
    first = far(in_turn, data)
    again = far(first, data)  # more collectives are alive at a time on a busy machine
    assert not again, "\n".join(again.values())
