"""Where the time goes: made-up events, and steps that are really taken."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.rank.profile import PARTS, STEP, Event, attribute, part_of, parts_of, profiled
from harness.rank.roofline import roofline
from impl.cost.place import Place
from impl.cost.traffic import step_traffic
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.engines import make
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.ranks import run_ranks

MAIN, WORKER = 1, 2


def on_main(name: str, start: float, end: float, id: int = 0) -> Event:
    return Event(name, start, end, MAIN, id)


def gloo(name: str, start: float, end: float, thread: int = WORKER) -> Event:
    return Event(f"gloo:{name}", start, end, thread, is_async=True)


def kernel(name: str, start: float, end: float, launched_by: int) -> Event:
    return Event(name, start, end, 7, launched_by, on_device=True)


EVENTS: dict[str, tuple[list[Event], dict[str, float]]] = {
    "the outermost operator counts with all that it calls": (
        [
            on_main("autograd::engine::evaluate_function: AddmmBackward0", 0, 20),
            on_main("AddmmBackward0", 1, 19),
            on_main("aten::mm", 5, 15),
            on_main("aten::empty", 5, 6),
            on_main("Optimizer.step#AdamW.step", 30, 50),
            on_main("aten::_fused_adamw_", 31, 49),
            on_main("aten::add_", 60, 70),
            on_main("aten::mm", 61, 62),
            on_main("aten::scaled_dot_product_attention", 80, 90),
            on_main("aten::bmm", 81, 85),
        ],
        {"products": 10, "optimizer": 20, "operators": 10, "attention": 10, "rest": 50},
    ),
    "what prepares a product is none": (
        [
            on_main("aten::linear", 0, 30),
            on_main("aten::t", 0, 5),
            on_main("aten::copy_", 5, 10),
            on_main("aten::addmm", 10, 30),
        ],
        {"operators": 10, "products": 20, "rest": 70},
    ),
    "other threads and other steps do not count": (
        [
            Event("aten::mm", 0, 50, WORKER),
            on_main("aten::mm", -20, 10),
            on_main("aten::mm", 95, 130),
            gloo("all_reduce", -30, -20),
        ],
        {"products": 15, "rest": 85},
    ),
    "a collective beside operators costs only the wait for its end": (
        [
            on_main("c10d::allreduce_", 0, 2),
            gloo("all_reduce", 1, 40),
            on_main("aten::mm", 3, 30),  # Python takes what is between
            on_main("aten::mm", 43, 100),
        ],
        {"communication": 12, "products": 84, "rest": 4},
    ),
    "what is under way while Python runs is not waited for": (
        [on_main("c10d::send", 0, 5), gloo("send", 5, 95, MAIN), on_main("aten::mm", 20, 100)],
        {"communication": 5, "products": 80, "rest": 15},
    ),
    "a wait that ends with the step counts": ([gloo("recv", 0, 99, MAIN)], {"communication": 99, "rest": 1}),
    "time in compiled layers is their kernels but for the products": (
        [
            on_main("Torch-Compiled Region: 0/0", 0, 60),
            on_main("## Call CompiledFxGraph fybqdczs6thp ##", 10, 50),
            on_main("aten::addmm", 10, 30),
        ],
        {"operators": 20, "products": 20, "rest": 60},
    ),
    "kernels are what launched them, and NCCL counts where it is alone": (
        [
            on_main("aten::linear", 0, 3, id=1),
            on_main("aten::addmm", 1, 2, id=2),
            Event("aten::_flash_attention_backward", 3, 4, WORKER, id=3),
            on_main("Optimizer.step#AdamW.step", 4, 9, id=4),
            on_main("aten::_foreach_add_", 5, 6, id=5),
            kernel("nvjet_tst_128x256", 10, 40, launched_by=2),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, 50, launched_by=9),
            kernel("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 45, 60, launched_by=3),
            kernel("multi_tensor_apply_kernel", 70, 75, launched_by=5),
            kernel("triton_poi_fused_gelu_0", 80, 90, launched_by=0),
        ],
        {"products": 30, "communication": 5, "attention": 15, "optimizer": 5, "operators": 10, "rest": 35},
    ),
}


@pytest.mark.parametrize(("events", "expected"), EVENTS.values(), ids=EVENTS)
def test_a_steps_time_is_that_of_its_parts(events: list[Event], expected: dict[str, float]) -> None:
    """Of a step from 0 to 100."""
    found = parts_of([Event(STEP, 0, 100, MAIN), *events])
    assert found["seconds"] == 100
    assert math.fsum(found["parts"].values()) == pytest.approx(100)
    assert found["parts"] == dict.fromkeys(PARTS, 0.0) | expected


def test_the_largest_operators_are_named_with_their_calls() -> None:
    events = [Event(STEP, 0, 100, MAIN), on_main("aten::mm", 0, 10), on_main("aten::mm", 10, 30)]
    largest = parts_of([*events, on_main("aten::add_", 50, 55)])["largest"]
    assert largest == [
        {"part": "products", "name": "aten::mm", "seconds": 30, "calls": 2},
        {"part": "operators", "name": "aten::add_", "seconds": 5, "calls": 1},
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_efficient_attention_backward", "attention"),
        ("_c10d_functional::wait_tensor", "communication"),
        ("aten::_softmax", "operators"),
        ("FSDP::pre_forward", None),
        ("cudaLaunchKernel", None),
    ],
)
def test_operators_are_known_by_their_names(name: str, part: str | None) -> None:
    assert part_of(name) == part


spans = st.builds(
    lambda part, start, length: Event("", start, start + length, part=part),
    *(st.sampled_from(PARTS[:-1]), st.integers(0, 50), st.integers(0, 50)),
)


@given(st.lists(spans))
def test_every_moment_is_the_first_part_that_goes_on(found: list[Event]) -> None:
    expected = dict.fromkeys(PARTS, 0)
    for moment in range(100):
        now = {span.part for span in found if span.start <= moment < span.end}
        expected[next((part for part in PARTS if part in now), "rest")] += 1
    assert attribute(found, 0, 100) == expected


RECIPE = Recipe(steps=2, global_batch=8, microbatch=2, warmup_steps=0)
MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, seq_len=32)
RUNS = [
    Run(model=MODEL, train=RECIPE, plan=Plan(dp=2, zero_stage=3, bucket_bytes=10_000), precision="bf16"),
    Run(model=MODEL, train=RECIPE, plan=Plan(tp=2, sequence_parallel=True)),
    Run(model=MODEL, train=RECIPE, plan=Plan(pp=2, recompute="full")),
    Run(model=MODEL, train=RECIPE, plan=Plan(dp=2), engine="torch"),
    Run(model=MODEL, train=RECIPE, plan=Plan(dp=2, zero_stage=1, zero_group=1)),
]


def look(folder: str) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    found = []
    for run in RUNS:
        mesh = build_mesh(run.plan, "cpu")
        trainer = make(run, TokenFolder.open(Path(folder)), mesh, cpu)
        profile = profiled(lambda trainer=trainer: trainer.step(0).loss.item(), cpu)
        found.append({"profile": profile, "limit": roofline(run, trainer.vocab_size, mesh, cpu)})
    return found


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of every rank, by run."""
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return [list(ranks) for ranks in zip(*run_ranks(2, look, str(folder)), strict=True)]


def test_a_real_steps_parts_add_up_to_it_and_none_is_missing(looks: list[list[dict[str, Any]]]) -> None:
    for profile in (rank["profile"] for ranks in looks for rank in ranks):
        assert sum(profile["parts"].values()) == pytest.approx(profile["seconds"])
        assert min(profile["parts"].values()) > 0


def test_the_limit_has_every_collective_of_the_step_and_its_sums(looks: list[list[dict[str, Any]]]) -> None:
    for run, ranks in zip(RUNS, looks, strict=True):
        for rank, found in enumerate(look["limit"] for look in ranks):
            place = Place(run, run.model.vocabulary(257), rank if run.plan.pp > 1 else 0)
            traffic = step_traffic(place, run.model.seq_len)
            calls = {(axes, op): count.calls for axes, ops in traffic.items() for op, count in ops.items()}
            assert {(c["axes"], c["op"]): c["calls"] for c in found["collectives"]} == calls
            for kind, rows in (("gemm", "products"), ("attention", "attention"), ("collective", "collectives")):
                assert found[rows]
                assert all(row["seconds"] > 0 for row in found[rows])
                total = math.fsum(row["calls"] * row["seconds"] for row in found[rows])
                assert found[f"{kind}_seconds"] == pytest.approx(total)


def test_the_limit_counts_what_is_recomputed_again(looks: list[list[dict[str, Any]]]) -> None:
    first = looks[2][0]["limit"]
    up = {product["pass"]: product["calls"] for product in first["products"] if product["name"] == "mlp.up"}
    assert up == {"forward": 2 * up["weight gradient"], "input gradient": up["weight gradient"], **up}
    assert [row["calls"] for row in first["attention"]] == [2 * up["weight gradient"], up["weight gradient"]]
