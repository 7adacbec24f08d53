"""Ranks on two nodes that torchrun starts, both on this machine: the same records as local ranks', and clear ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.rank.torchrun import Agents
from tests.documents import ROOT
from tests.harness.calls import call, refused

TRAIN = [
    *("train", "--model", "gpt-0.5m", "--model.num-layers", "2", "--plan.dp", "2", "--train.steps", "6"),
    *("--train.global-batch", "4", "--train.microbatch", "2", "--evaluation.sequences", "8", "--out"),
]


@pytest.fixture(autouse=True)
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSCALE_TURNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def started(words: list[str]) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun, of one process each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *common, f"--master-port={port}", f"--node-rank={node}", "-m", "harness", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]


def ended(agents: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        texts = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *text) for agent, text in zip(agents, texts, strict=True)]


def record(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("train/small/records/*.json")
    return json.loads(path.read_text())


def test_two_nodes_of_torchrun_train_what_local_ranks_do(tmp_path: Path) -> None:
    words = [*TRAIN, "nodes", "--on", "torchrun"]
    (status, output, _), (other, silence, _) = ended(started(words))
    assert (status, other, silence) == (0, 0, "")
    assert "Throughput" in output
    assert call(*TRAIN, "here").status == 0
    nodes, here = record(tmp_path / "nodes"), record(tmp_path / "here")
    assert nodes.keys() == here.keys()
    assert nodes["id"] == here["id"]
    of_steps = lambda found: [{**step, "seconds": len(step["seconds"])} for step in found["steps"]]
    assert of_steps(nodes) == of_steps(here)
    assert nodes["evaluations"] == here["evaluations"]
    counted = ("rank", "traffic", "state_bytes", "activation_bytes")
    of_ranks = lambda found: [{key: rank[key] for key in counted} for rank in found["ranks"]]
    assert of_ranks(nodes) == of_ranks(here)


def test_a_rank_that_is_lost_on_another_node_is_named_in_one_line(tmp_path: Path) -> None:
    agents = started([*TRAIN, "nodes", "--on", "torchrun", "--train.steps", "100000", "--retries", "0"])
    end = time.monotonic() + 100
    while time.monotonic() < end and not (
        found := list(tmp_path.glob("nodes/train/small/attempts/*/rank-1.steps.jsonl"))
    ):
        time.sleep(0.2)
    of_rank_1 = [str(found[0].parent.resolve()), "1"]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "harness.rank.worker" in words and words[-5:-3] == of_rank_1:
            process.send_signal(signal.SIGKILL)
    (status, _, errors), (other, _, _) = ended(agents)
    assert (status, other) == (1, 0), errors
    kept = record(tmp_path / "nodes")
    assert (kept["status"], kept["cause"]) == ("failed", "killed")
    assert kept["reason"] == "rank 1 was killed by SIGKILL"
    assert len([line for line in errors.splitlines() if kept["reason"] in line]) == 1


def test_a_plan_of_more_ranks_than_torchrun_started_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    alone |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    words = [*TRAIN, "nodes", "--on", "torchrun", "--plan.dp", "4", "--train.microbatch", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], env=os.environ | alone | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == ["error: the plan needs 4 ranks, torchrun has started 1; valid: a plan of 1"]
    assert not (tmp_path / "nodes").exists()


def test_without_torchrun_it_is_refused() -> None:
    error = refused("run", "quickstart", "--on", "torchrun")
    assert error.startswith("error: --on torchrun: RANK is not set, so torchrun has not started this; valid: torchrun ")


def test_ranks_fill_nodes_in_order() -> None:
    agents = Agents(8, 4, ("first", "second"))
    assert agents.of_ranks(4) == ("first",)
    assert agents.of_ranks(8) == ("first", "second")
    assert agents.why_invalid(2) is None
    assert "evenly" in str(agents.why_invalid(6))
    assert "torchrun has started 8" in str(agents.why_invalid(16))
