"""The verb `memory`, and the refusal of what cannot fit."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.launch.preflight import Datasets, why_invalid
from harness.launch.slurm import Site
from harness.predict.memory import predicted
from harness.records.store import Store
from harness.terminal import parse_bytes, shown
from impl.cost.parameters import count_parameters
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.calls import call, document, refused

ROOT = Path(__file__).resolve().parents[2]
WITH_PIPELINE = ["--model", "ptdp-39.1b", "--plan.tp", "8", "--plan.pp", "2", "--precision", "bf16"]
WITH_PIPELINE += ["--train.global-batch", "32"]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "rest")


def told(*arguments: str) -> Any:
    answer = call("memory", *arguments, "--json")
    assert (answer.status, answer.errors) == (0, "")
    return document(answer.output)


def test_every_pipeline_rank_by_category() -> None:
    found = told(*WITH_PIPELINE, "--device-memory", "80GB")
    assert found["parameters"] == count_parameters(named("ptdp-39.1b"))
    assert [rank["pipeline_rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["bytes"]["total"] == sum(rank["bytes"][name] for name in CATEGORIES)
    totals = [rank["bytes"]["total"] for rank in found["ranks"]]
    assert found["fullest"] == totals.index(max(totals))
    assert (found["device_memory_bytes"], found["fits"]) == (80e9, False)
    states = sum(found["ranks"][0]["bytes"][name] for name in CATEGORIES[:3])
    assert states == pytest.approx(18 * 39.1e9 / 16, rel=0.02)
    assert told(*WITH_PIPELINE, "--plan.recompute", "full", "--device-memory", "80GB")["fits"] is True
    assert told(*WITH_PIPELINE)["fits"] is None


def test_the_table_says_which_rank_is_fullest_and_what_fits() -> None:
    answer = call("memory", *WITH_PIPELINE, "--device-memory", "40GiB")
    assert answer.status == 0
    for word in ("pipeline rank", *CATEGORIES, "total", "fullest: pipeline rank 0", "does not fit 40GiB"):
        assert word in answer.output
    assert "host" not in answer.output
    offloaded = call("memory", *WITH_PIPELINE, "--plan.offload-optimizer", "--plan.recompute", "full")
    assert "host (GiB)" in offloaded.output
    assert "fits" not in offloaded.output
    perhaps = call("memory", *WITH_PIPELINE, "--plan.recompute", "full", "--device-memory", "60GiB")
    assert "of it); runs had 0 to 15.8 GiB besides their tensors" in perhaps.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model gpt-8.3", ("gpt-8.3", "gpt-8.3b")),
        ("--device-memory much", ("--device-memory 'much'", "80GB")),
        ("--device-memory 0GB", ("--device-memory '0GB'",)),
        ("--device-memory 80XB", ("--device-memory '80XB'",)),
        ("--plan.tp 3", ("plan.tp 3", "valid degrees")),
        ("--plan.zero-stage 4", ("4",)),
        ("--device tpu", ("tpu",)),
        ("--data.dataset no/where", ("no/where",)),
    ],
)
def test_bad_input_is_one_line(arguments: str, words: tuple[str, ...]) -> None:
    error = refused("memory", *arguments.split())
    assert all(word in error for word in words)


def test_amounts_of_memory() -> None:
    assert parse_bytes("80GB") == 80e9
    assert parse_bytes("40 GiB") == 40 * 2**30
    assert parse_bytes("1.5e9") == 1.5e9
    sizes = {512: "0.5 KiB", 3 * 2**20: "3 MiB", 5.25 * 2**30: "5.25 GiB", 2048 * 2**30: "2,048 GiB"}
    assert [shown(size) for size in sizes] == list(sizes.values())


def test_nothing_is_launched_and_pytorch_is_not_loaded() -> None:
    program = (
        "import sys; from harness.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, "memory", "--model", "gpt-8m"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    return Datasets(Store(tmp_path_factory.mktemp("out"), "train", "small").folder)


LARGE = Run(
    model=ModelConfig(num_layers=4, hidden_size=512, num_heads=8, seq_len=512, dropout=0.1),
    plan=Plan(dp=2),
    train=Recipe(global_batch=64, microbatch=32),
)


def test_activations_alone_can_be_too_much(datasets: Datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = predicted(LARGE, 257, "cpu")
    assert one.activations > 20 * one.states
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * one.total))
    reason = why_invalid(LARGE, datasets, Site())
    assert reason is not None
    for word in ("memory of 2 ranks: ", "this machine has", f"activations {shown(one.activations)}", "--allow-oom"):
        assert word in reason
    assert why_invalid(LARGE, datasets, Site(allow_oom=True)) is None
    assert why_invalid(LARGE, datasets, Site(on="slurm")) is None  # a cluster's memory is not known
    recomputed = replace(LARGE, plan=replace(LARGE.plan, recompute="full"))
    assert why_invalid(recomputed, datasets, Site()) is None


def test_a_gpus_memory_is_for_one_rank(datasets: Datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 2)
    total = predicted(LARGE, 257, "cuda")[0].total
    for there, is_refused in ((total, False), (total - 1, True), (None, False)):
        monkeypatch.setattr("harness.launch.preflight.gpu_memory", lambda there=there: there)
        reason = why_invalid(LARGE, datasets, Site(device="cuda"))
        assert (reason is not None) is is_refused
        assert reason is None or ("a GPU here has" in reason and "activations" in reason)
