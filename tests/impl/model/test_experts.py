"""Experts: as a plain sum over all of them says, and in every layout as in one process."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impl.evaluation_config import EvaluationConfig
from impl.expert_parallel import ExpertParallel
from impl.model.config import ModelConfig
from impl.model.experts import LOAD, Experts
from impl.model.mlp_functions import FUNCTIONS
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from impl.train import Trainer
from tests.impl import parity
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import assert_equal_first_steps, first_step, steps

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, seq_len=8, vocab_size=300, biases=False, tied=False, mlp="swiglu",
    mlp_size=24, experts=4, experts_per_token=2,
)  # fmt: skip
BALANCED = replace(MODEL, balance_loss=0.1, balance_bias=0.01)
MODELS = {
    "top 2, balanced": BALANCED,
    "top 1 of 2 prototypes, every other layer, shared expert": replace(
        MODEL, experts_per_token=1, expert_prototypes=2, experts_every=2, shared_expert_size=8, expert_size=12,
        balance_loss=0.1, mlp="gelu", biases=True, tied=True,
    ),
    "one of 8": replace(MODEL, experts=8, experts_per_token=1, balance_loss=0.1),
    "capacity": replace(BALANCED, expert_capacity=0.75, dropout=0.1),
}  # fmt: skip
PLANS = [
    Plan(dp=2),
    Plan(dp=2, ep=2),
    Plan(dp=4, ep=2),
    Plan(dp=4, ep=4, zero_stage=1, bucket_bytes=1000),
    Plan(dp=4, ep=2, zero_stage=2, overlap_grad_reduce=False),
    Plan(dp=4, ep=2, zero_stage=3, bucket_bytes=1000),
    Plan(dp=4, ep=2, zero_stage=3, zero_group=2),
    Plan(tp=2),
    Plan(tp=2, sequence_parallel=True),
    Plan(tp=2, dp=2, ep=2, sequence_parallel=True, zero_stage=3),
    Plan(tp=2, dp=2, ep=2, recompute="full"),
    Plan(pp=2, dp=2, ep=2, schedule="zb_h1"),
    Plan(pp=2, dp=2, ep=2, chunks=2, schedule="interleaved", recompute="selective", offload_optimizer=True),
    Plan(pp=2, tp=2, dp=2, ep=2, sequence_parallel=True, schedule="zb_h1", zero_stage=2),
]
ROUTED = [Plan(cp=2, ep=2), Plan(cp=2, ep=2, cp_attention="ulysses"), Plan(cp=2, dp=2, ep=4, zero_stage=3)]
"""Plans in which ranks have parts of sequences; not for the last model, whose experts take so many of a sequence."""


def a_run(model: ModelConfig, plan: Plan) -> Run:
    recipe = Recipe(global_batch=8, microbatch=1 if plan.pp > 1 else 2, steps=3, warmup_steps=0, clip_norm=0.5)
    few = replace(model, num_layers=2 * plan.pp)
    return Run(model=few, plan=plan, train=recipe, precision="fp64", evaluation=EvaluationConfig(sequences=8))


def test_parallel_equals_serial(data: Path, subtests: pytest.Subtests) -> None:
    """Each model with a quarter of the plans; `tests/impl/test_parity.py` has experts in random runs, too."""
    plans = {model: PLANS[i::4] + ROUTED[i::4] for i, model in enumerate(MODELS.values())}
    runs = [a_run(model, plan) for model in plans for plan in plans[model]]
    answers = on_ranks(first_step, [*runs, *map(parity.serial, runs)], data)
    for run in runs:
        with subtests.test(str(run)):
            assert_equal_first_steps(answers[run], run.plan.tp, answers[parity.serial(run)][0])


def test_steps_go_on_equally(data: Path) -> None:
    run = a_run(BALANCED, Plan(dp=2, ep=2, tp=2, sequence_parallel=True))
    answers = on_ranks(steps, [run, parity.serial(run)], data)
    for found in answers[run]:
        assert found == [pytest.approx(step, rel=1e-9) for step in answers[parity.serial(run)][0]]


# A plain sum ---------------------------------------------------------------------------------------------------------


def plain(layer: Experts, config: ModelConfig, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """The output, and the loss of balance, by loops over tokens and experts."""
    of = config.experts // config.expert_prototypes
    function, out, balance = FUNCTIONS[config.mlp], [], x.new_zeros(())
    mlps: list[Any] = list(layer.experts.values())
    most = torch.inf
    if config.expert_capacity is not None:
        most = -(-config.expert_capacity * seq_len * config.choices // config.experts)
    for sequence in x.split(seq_len):
        taken, got = [0] * config.experts, torch.zeros(config.experts)
        p = (sequence @ layer.router.weight.t()).view(seq_len, -1, of).softmax(-1)
        for token, of_token in zip(sequence, p, strict=True):
            y = torch.zeros_like(token) if layer.shared is None else _mlp(layer.shared, function, token)
            for prototype, probabilities in enumerate(of_token):
                best = sorted(range(of), key=lambda e: -probabilities[e].item())[: config.experts_per_token]
                total = sum(probabilities[e] for e in best) if len(best) > 1 else 1.0
                for e in best:
                    which = prototype * of + e
                    got[which] += 1
                    if taken[which] < most:
                        y = y + probabilities[e] / total * _mlp(mlps[which], function, token)
                    taken[which] += 1
            out.append(y)
        share = got.view(-1, of) / (seq_len * config.experts_per_token)
        balance = balance + of * (share * p.mean(0)).sum() / config.expert_prototypes
    return torch.stack(out), balance / (len(x) // seq_len)


def _mlp(mlp: Any, function: Any, x: Tensor) -> Tensor:
    return mlp.down.weight @ function((mlp.up.weight @ x)[None])[0]


def test_the_kernel_for_all_experts_gives_what_one_after_the_other_does(
    serial: TensorParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel of GPUs, where it runs on CPUs: in fp32; an expert without rows is among them."""
    layer = Experts(MODELS["one of 8"], replace(serial, experts=ExpertParallel()))
    random = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=random)
    layer.router.weight.data[3] = 0.0
    layer.router.weight.data[3, 0] = -100.0
    x = torch.randn(24, 16, generator=random)
    x[:, 0] = x[:, 0].abs() + 1
    found = list[list[Tensor]]()
    for is_grouped in (False, True):
        monkeypatch.setattr("impl.model.experts.is_grouped", lambda *_, answer=is_grouped: answer)
        taken = x.clone().requires_grad_()
        out = layer(taken, 8)
        found.append([out, *torch.autograd.grad(out.square().sum(), [taken, *layer.parameters()], allow_unused=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_a_plain_sum(name: str, serial: TensorParallel) -> None:
    """The router's gradient has that of the loss of balance too, the bias's is the experts' excess of tokens."""
    config, seq_len = MODELS[name], 8
    layer = Experts(config, replace(serial, experts=ExpertParallel(loss_share=0.3))).double()
    generator = torch.Generator().manual_seed(1)
    for one in layer.parameters():
        one.data = torch.randn(one.shape, dtype=torch.float64, generator=generator) * (0.3 if one.dim() > 1 else 0.0)
    x, factor = torch.randn(2, 3 * seq_len, config.hidden_size, dtype=torch.float64, generator=generator)
    x = x.clone().requires_grad_()
    out = layer(x, seq_len)
    mine = torch.autograd.grad((out * factor).sum(), [x, *layer.parameters()])
    expected, balance = plain(layer, config, x, seq_len)
    loss = (expected * factor).sum() + 0.3 * config.balance_loss * balance
    named = [name for name, _ in layer.named_parameters() if name != "router.bias"]
    theirs = torch.autograd.grad(loss, [x, *map(layer.get_parameter, named)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = dict(zip(["x", *(name for name, _ in layer.named_parameters())], mine, strict=True))
    for name, gradient in zip(["x", *named], theirs, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    if "router.bias" in found:
        excess = found["router.bias"] / LOAD
        assert excess.sum() == 0 < excess.abs().max()


def test_bias_moves_choices_and_no_weights(serial: TensorParallel) -> None:
    config = replace(MODEL, experts_per_token=1, balance_bias=0.01)
    layer = Experts(config, serial).double()
    assert layer.router.bias is not None
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(8, config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    routing = layer.router(x, 8)
    assert routing.counts.tolist() == [0, 0, 8, 0]
    softmax = (x @ layer.router.weight.t()).softmax(-1)
    torch.testing.assert_close(routing.weights[:, 0], softmax[:, 2])


def test_a_capacity_larger_than_any_count_leaves_nothing_out(serial: TensorParallel) -> None:
    for capacity in (1e20, 1e308):
        layer = Experts(replace(MODEL, expert_capacity=capacity), serial).double()
        torch.nn.init.zeros_(layer.router.weight)  # all tokens choose the same
        assert layer.router(torch.ones(8, 16, dtype=torch.float64), 8).counts.sum() == 8 * MODEL.choices


def test_a_router_of_no_numbers_gives_a_loss_of_none_and_no_error(serial: TensorParallel) -> None:
    layer = Experts(BALANCED, serial).double()
    for one in layer.parameters():
        torch.nn.init.constant_(one, torch.nan if one is layer.router.weight else 0.1)
    out = layer(torch.randn(16, 16, dtype=torch.float64), 8)
    assert out.isnan().all()


def test_ranks_whose_router_is_nan_go_on_sending_rows(data: Path) -> None:
    """The rate drives the weights out of range; so none waits, and the run ends with the status of its loss."""
    recipe = Recipe(global_batch=2, microbatch=1, steps=6, warmup_steps=0, lr=1e30, clip_norm=0.0, weight_decay=0.0)
    run = Run(model=MODEL, plan=Plan(dp=2, ep=2), train=recipe)
    first, second = on_ranks(steps, [run], data)[run]
    losses = [loss for loss, _ in first]
    assert math.isfinite(losses[0])
    assert not math.isfinite(losses[-1])
    np.testing.assert_array_equal(losses, [loss for loss, _ in second])


def test_a_rank_without_tokens_waits_for_none(data: Path) -> None:
    """All tokens choose the first expert of four, so that one of two ranks computes nothing."""
    run = a_run(replace(MODEL, experts_per_token=1), Plan(dp=2, ep=2))
    for norm, missing in on_ranks(of_one_expert, [run], data)[run]:
        assert norm > 0
        assert missing == 0


def of_one_expert(one: Trainer) -> tuple[float, float]:
    """Norm of a step's gradients, and of those of all experts but the first."""
    for module in one.model.modules():
        if isinstance(module, Experts):
            module.router.register_forward_pre_hook(lambda _, args: (args[0].abs() + 1.0, args[1]))
            with torch.no_grad():
                module.router.weight.zero_()
                module.router.weight[0] = 1.0
    one.backward(0)
    others = [
        gradient.norm().item()
        for parameter, gradient in one.gradients.of.items()
        for name, named in one.model.named_parameters()
        if named is parameter and ".experts." in name and ".experts.0." not in name
    ]
    assert others
    return one.gradients.norm().item(), max(others)


def test_bias_balances_the_experts(data: Path) -> None:
    """With it, tokens of a router that prefers some experts are soon divided more evenly."""
    model = replace(MODEL, experts_per_token=1)
    recipe = Recipe(global_batch=64, microbatch=64, steps=40, warmup_steps=0, lr=1e-5)
    runs = [Run(model=replace(model, balance_bias=bias), train=recipe) for bias in (0.0, 0.002)]
    (without,), (balanced,) = on_ranks(largest_share, runs, data).values()
    assert balanced < 0.8 * without


def largest_share(one: Trainer) -> float:
    """Tokens that the fullest expert of all layers gets after all steps, over the mean."""
    counts: list[Tensor] = []
    for i in range(one.run.train.steps):
        one.step(i)
    routers = [module.router for module in one.model.modules() if isinstance(module, Experts)]
    hooks = [router.register_forward_hook(lambda _, __, routing: counts.append(routing.counts)) for router in routers]
    one.backward(one.run.train.steps)
    for hook in hooks:
        hook.remove()
    by_layer = torch.stack(counts).view(-1, len(routers), one.run.model.experts).sum(0)
    return (by_layer.max(1).values / by_layer.double().mean(1)).max().item()


# Models that cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"experts": 0}, "experts_per_token 2 is about experts, of which there are none"),
        ({"expert_prototypes": 3}, "expert_prototypes 3 is no divisor of 4; valid: 1, 2, 4"),
        ({"experts_per_token": 5}, "experts_per_token 5 of 4 experts; valid: 1 to 4"),
        ({"experts_every": 5}, "experts_every 5 of 4 layers"),
        ({"norm_placement": "sub"}, "norm_placement sub has a norm within MLPs"),
    ],
)
def test_models_that_cannot_be_are_said(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        replace(MODEL, **fields)
