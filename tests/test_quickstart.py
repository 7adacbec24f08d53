"""The main job as a user runs it: three tables, figures, the entropy floor, and a second call that reruns nothing."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def quickstart(out: Path) -> dict[str, Any]:
    of = ["--tier", "small", "--only", "norm=pre", "--json", "--out", str(out)]  # half of its points, to save time
    command = [sys.executable, "-m", "harness", "run", "quickstart", *of]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(out: Path) -> dict[str, Any]:
    return quickstart(out)


def test_every_point_is_ok_and_three_tables_and_figures_are_written(first: dict[str, Any]) -> None:
    assert {record["status"] for record in first["records"]} == {"ok"}
    tables = {table["name"] for table in first["tables"]}
    assert {"throughput", "scaling"} <= tables
    assert any(name.startswith("perplexity") for name in tables)
    written = [Path(file) for file in first["files"]]
    assert all(file.stat().st_size > 0 for file in written)
    assert {file.suffix for file in written} == {".md", ".csv", ".tex", ".png", ".svg"}
    assert len([file for file in written if file.suffix == ".png"]) >= 2


def test_the_largest_model_comes_within_a_tenth_of_the_floor_and_none_below(first: dict[str, Any]) -> None:
    best: dict[int, float] = {}
    for record in first["records"]:
        if not record["evaluations"]:
            continue
        sample = record["resolved"]["data"]["entropy"]["valid"]
        last = record["evaluations"][-1]
        above = last["nats"] / last["tokens"] - sample["nats_per_token"]
        # the sample's own code length is known; what is left is which part of it was read
        assert above > -4 * sample["standard_error"]
        size = record["resolved"]["parameters"]
        best[size] = min(best.get(size, math.inf), math.exp(above) - 1)
    assert best[max(best)] < 0.10
    assert best[max(best)] < best[min(best)]


def test_a_second_call_reruns_nothing(first: dict[str, Any], out: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in out.glob("quickstart/small/records/*.json")}
    assert len(files) == len(first["records"])
    again = quickstart(out)
    assert again["records"] == first["records"]
    assert {path: path.stat().st_mtime_ns for path in out.glob("quickstart/small/records/*.json")} == files
