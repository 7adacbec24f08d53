"""What ranks of a grid have and send: the count of a real step is the formula, and the formula the paper's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.cost.activations import layer_bytes, stage_bytes
from impl.cost.gemms import products
from impl.cost.parameters import named_parameters
from impl.cost.place import Place
from impl.cost.traffic import collectives, step_traffic
from impl.ghost.checks import cast, complaints
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.cost.test_activations import kept
from tests.impl.cost.test_memory_measured import far, normed
from tests.impl.cost.test_memory_measured import run as run_of
from tests.impl.cost.test_traffic import step
from tests.impl.ghost.ranks import ghosts
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, seq_len=16, dropout=0.1)
LLAMA = replace(BLOCKS["llama"], kv_heads=1)
SMALL: dict[str, Any] = {"bucket_bytes": 10_000}
KINDS: list[tuple[ModelConfig, Plan, Precision]] = [
    (MODEL, Plan(tp=2, tp3=(1, 2, 1)), "fp32"),
    (MODEL, Plan(tp=4, tp3=(1, 4, 1), recompute="selective"), "bf16"),
    (MODEL, Plan(tp=4, tp3=(2, 2, 1), recompute="full", partition_activations=True), "bf16"),
    (MODEL, Plan(tp=4, tp3=(2, 2, 2), dp=2, zero_stage=3, **SMALL), "bf16"),
    (replace(MODEL, norm_placement="sub"), Plan(tp=4, tp3=(2, 2, 1), dp=2, zero_stage=2), "fp32"),
    (replace(MODEL, norm_placement="post"), Plan(tp=2, tp3=(1, 2, 1), pp=2, schedule="gpipe"), "fp64"),
    (replace(LLAMA, norm_placement="qk"), Plan(tp=4, tp3=(2, 2, 1), dp=2, zero_stage=1, **SMALL), "bf16"),
    (replace(LLAMA, norm_placement="olmo2"), Plan(tp=2, tp3=(1, 2, 1), dp=4, zero_stage=2, zero_group=2), "fp32"),
    (LLAMA, Plan(tp=4, tp3=(2, 2, 1), pp=2, schedule="zb_h1"), "fp32"),
    (LLAMA, Plan(tp=4, tp3=(2, 2, 1), cp=2), "bf16"),
    (MODEL, Plan(tp=4, tp3=(2, 2, 1), pp=2, scatter_gather=False, recompute="full"), "bf16"),
]
RUNS = [
    Run(model=model, plan=plan, train=Recipe(steps=1, global_batch=2 * plan.dp * plan.pp, microbatch=1), precision=kind)
    for model, plan, kind in KINDS
]


def measured(one: Trainer) -> tuple[list[tuple[str, tuple[int, ...]]], Any, Any]:
    return [(name, tuple(parameter.shape)) for name, parameter in one.model.named_parameters()], kept(one), step(one)


def test_every_rank_has_these_parameters_keeps_these_activations_and_sends_what_the_formulas_say(data: Path) -> None:
    for run, ranks in on_ranks(measured, RUNS, data).items():
        for has, (pp_rank, positions, keeps), sends in ranks:
            place, vocabulary = Place(run, run.model.vocabulary(257), pp_rank), run.model.vocabulary(257)
            named = named_parameters(run.model, vocabulary, run.plan.x, place.stages, y=run.plan.y)
            assert [(p.name, p.shape) for p in named] == has
            parts = [stage_bytes(run, vocabulary, stage, positions) for stage in place.stages]
            expected = sum(sum(each.values()) for each in parts), layer_bytes(run)
            assert (keeps.model, keeps.layer) == expected, (run.plan, parts)
            assert sends.counts == step_traffic(place, sends.head_positions), run.plan


GRID: dict[str, Any] = {"tp": 4, "tp3": (2, 2, 1)}
LAYOUTS = [
    run_of(tp=2, tp3=(1, 2, 1)),
    run_of(recompute="full", partition_activations=True, precision="bf16", **GRID),
    run_of(dp=2, zero_stage=3, tp=4, tp3=(2, 2, 2)),
    run_of(batch=8, pp=2, schedule="zb_h1", precision="bf16", **GRID),
    run_of(normed("sub", "rmsnorm"), tp=4, tp3=(1, 4, 1)),
    run_of(normed("post"), precision="bf16", **GRID),
]


def test_every_rank_needs_what_is_predicted(data: Path) -> None:
    wrong = far(far(LAYOUTS, data), data)
    assert not wrong, "\n".join(wrong.values())


def test_a_layer_sends_the_volumes_of_axonns_three_axes() -> None:
    """A product of [m, k] and [k, n], n divided over x and k over y: its outputs, m n / x, are summed over y, and its
    input's gradient, m k / y, over x; the next one has x and y exchanged. Of each matrix a rank's block, k n / (x y),
    is gathered over z twice, and the sum of its gradients scattered; a part of it is summed over what is left of dp."""
    x, y, z, h, e, e_sum = 4, 2, 8, 128, 2, 4
    model = ModelConfig(num_layers=1, hidden_size=h, num_heads=4, seq_len=64, vocab_size=512, biases=False)
    plan = Plan(tp=x * y, tp3=(x, y, z), dp=2 * z, zero_stage=3, zero_group=z)
    recipe = Recipe(global_batch=2 * plan.dp, microbatch=2)
    run = Run(model=replace(model, norm_placement="without"), plan=plan, train=recipe, precision="bf16")
    assert run.problems() == []
    place, m = Place(run, 512), 2 * 64
    layer = list(collectives(place, "layer", 64))
    assert {one.op for one in layer} == {"all_reduce"}
    sums = {
        (over, when): sorted(one.bytes for one in layer if (one.over, one.when) == (over, when))
        for over in ("tp", "features")
        for when in ("forward", "backward")
    }
    of_elements = lambda *widths: [m * width * e for width in widths]
    assert sums == {
        ("tp", "forward"): of_elements(h // y, h // y),
        ("tp", "backward"): of_elements(h // y, h // y),
        ("features", "forward"): of_elements(3 * h // x, 4 * h // x),
        ("features", "backward"): of_elements(h // x, 4 * h // x),
    }
    block, others = 12 * h * h // (x * y), {"tokens": 3, "embedding": 1}
    sizes: dict[str, int] = {}
    for bucket in place.buckets:
        sizes[bucket.unit] = sizes.get(bucket.unit, 0) + bucket.size
    assert sizes.pop("layers.0") == block
    of_z, whole = step_traffic(place, 64), block + sum(sizes.values())
    assert of_z["zero"]["all_gather"].bytes == (2 * block + sum(sizes[name] * n for name, n in others.items())) * e
    assert of_z["zero"]["reduce_scatter"].bytes == whole * e_sum
    assert of_z["replicas"]["all_reduce"].bytes == whole // z * e_sum
    flops = sum(product.flops for product in products(run, 512, place.stages, 64) if product.name != "head")
    assert flops * x * y == 6 * m * 12 * h * h


def test_ghosts_of_a_grid_do_what_the_formulas_say() -> None:
    for device, backend, runs in (("cpu", "gloo", RUNS[2::3]), ("cuda", "nccl", RUNS[::4])):
        for run, found in ghosts(runs, device=device, backend=backend).items():
            wrong = complaints(run, run.model.vocabulary(257), cast(run.plan), dict(enumerate(found)))
            assert not any(wrong.values()), (run.plan, wrong)
