"""The verb `ghost`: what it says, its exit status, and what it refuses."""

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from harness.predict import ghost
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.calls import call, document, refused

MANY = ["--model", "gpt-0.5m", "--plan.pp", "2", "--plan.dp", "12", "--train.global-batch", "96"]
MANY += ["--train.microbatch", "1", "--precision", "bf16"]


def test_some_ranks_stand_for_many_and_memory_is_as_predicted() -> None:
    answer = call("ghost", *MANY, "--json")
    assert (answer.status, answer.errors) == (0, "")
    found = document(answer.output)
    assert (found["ranks"], found["executed"]) == (24, [0, 12, 11, 23])
    assert set(found["problems"]) == {"uses", "orders", "equal ranks", "traffic", "schedule", "passes"}
    assert not any(found["problems"].values())
    assert found["passes"] > found["repeated_passes"] > 0
    for memory, formula in zip(found["memory"], found["memory_by_formula"], strict=True):
        assert all(memory[name] == formula[name] for name in ("parameters", "gradients", "optimizer"))
        assert memory["buffers"] <= formula["buffers"]


def test_what_does_not_fit_is_said_by_the_exit_status() -> None:
    answer = call("ghost", *MANY, "--device-memory", "1MiB")
    assert answer.status == 1
    assert "does not fit 1MiB" in answer.output
    assert "inferred: that the others do as the first rank of dp 12, cp 1 and tp 1" in answer.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan.tp", "7"], "plan.tp 7 does not divide"),
        (["--plan.dp", "65536", "--train.global-batch", "524288"], "65,536 ranks would take hours; valid:"),
        (["--train.global-batch", "1000000", "--train.microbatch", "1"], "microbatches of 1,000,000 would take hours"),
        (["--plan.zero-stage", "3", "--train.global-batch", "100000", "--train.microbatch", "1"], "through layers"),
        (["--compile"], "compile True is not executed"),
        (["--plan.offload-optimizer"], "valid: --device cpu"),
        (["--device-memory", "many"], "is no amount of memory"),
    ],
)  # fmt: skip
def test_what_cannot_be_executed_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    assert words in refused("ghost", *arguments)


def test_points_are_looked_at_before_they_are_run() -> None:
    assert "valid with --dry-run" in refused("run", "data_parallel_scaling", "--ghost")
    answer = call("run", "zero_memory", "--only", "stage=3", "--dry-run", "--ghost")
    assert (answer.status, answer.errors) == (0, "")
    assert "ranks fit together" in answer.output


def test_points_whose_ranks_do_the_same_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = list[Run]()

    def examined(run: Run, _device: str) -> dict[str, Any]:
        executed.append(run)
        return {"problems": {"orders": ["a hang"] if run.plan.tp == 2 else []}}

    monkeypatch.setattr(ghost, "examined", examined)
    points = {
        f"{tp} {lr} {seed}": Run(plan=Plan(tp=tp), train=Recipe(lr=lr), seed=seed)
        for tp in (1, 2)
        for lr in (1e-3, 2e-3)
        for seed in (0, 1)
    }
    assert not ghost.all_fit(points, "cpu")
    assert [run.plan.tp for run in executed] == [1, 2]


def test_a_command_that_is_killed_leaves_no_process() -> None:
    command = [sys.executable, "-m", "harness", "ghost", *MANY, "--train.global-batch", "24000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        started: list[psutil.Process] = []
        while len(started) < 4:  # a server, two ranks, and what follows the memory that they share
            time.sleep(0.1)
            started = psutil.Process(driver.pid).children(recursive=True)
            assert driver.poll() is None
        driver.kill()
    gone, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert len(gone) >= 4
