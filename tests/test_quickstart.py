"""The main job, without its larger model: three tables, figures, the entropy floor, a second call that reruns nothing.

The larger model and post-layernorm are in the committed records, whose claims are derived again by another test.
"""

import itertools
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
    of = [
        "--tier",
        "small",
        "--only",
        "*hidden=[61][49]*norm=pre*",
        "--json",
        "--out",
        str(out),
    ]  # 64 and 192, to save time
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


def test_a_small_model_comes_near_the_floor_and_never_below(first: dict[str, Any]) -> None:
    [trained] = [record for record in first["records"] if record["evaluations"]]
    sample = trained["resolved"]["data"]["entropy"]["valid"]
    above = [one["nats"] / one["tokens"] - sample["nats_per_token"] for one in trained["evaluations"]]
    # the sample's own code length is known; what is left is which part of it was read
    assert min(above) > -4 * sample["standard_error"]
    assert all(later < earlier for earlier, later in itertools.pairwise(above))
    assert math.exp(above[-1]) < 1.5


def test_a_second_call_reruns_nothing(first: dict[str, Any], out: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in out.glob("quickstart/small/records/*.json")}
    assert len(files) == len(first["records"])
    again = quickstart(out)
    assert again["records"] == first["records"]
    assert {path: path.stat().st_mtime_ns for path in out.glob("quickstart/small/records/*.json")} == files
