"""The main job at its smallest tier: tables, figures, the entropy floor, a second call that reruns nothing.

The larger runs are in the committed records, whose claims are derived again by another test.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.calls import call


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def quickstart(out: Path) -> dict[str, Any]:
    of = ["--tier", "smoke", "--only", "layers=2 norm=pre*", "--json", "--out", str(out)]
    answer = call("run", "quickstart", *of)
    assert answer.status == 0, answer.errors
    return json.loads(answer.output)


@pytest.fixture(scope="module")
def first(out: Path) -> dict[str, Any]:
    return quickstart(out)


def test_a_point_is_ok_and_tables_and_figures_are_written(first: dict[str, Any]) -> None:
    assert {record["status"] for record in first["records"]} == {"ok"}
    tables = {table["name"] for table in first["tables"]}
    assert "throughput" in tables
    assert any(name.startswith("perplexity") for name in tables)
    written = [Path(file) for file in first["files"]]
    assert all(file.stat().st_size > 0 for file in written)
    assert {file.suffix for file in written} == {".md", ".csv", ".tex", ".png", ".svg"}


def test_a_small_model_comes_nearer_to_the_floor_and_never_below(first: dict[str, Any]) -> None:
    [trained] = [record for record in first["records"] if record["evaluations"]]
    sample = trained["resolved"]["data"]["entropy"]["valid"]
    above = [one["nats"] / one["tokens"] - sample["nats_per_token"] for one in trained["evaluations"]]
    # the sample's own code length is known; what is left is which part of it was read
    part = trained["evaluations"][-1]["tokens"] / trained["resolved"]["data"]["valid_tokens"]
    assert min(above) > -4 * sample["standard_error"] / part**0.5
    assert all(later < earlier for earlier, later in itertools.pairwise(above))
    assert above[-1] < above[0] / 2


def test_a_second_call_reruns_nothing(first: dict[str, Any], out: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in out.glob("quickstart/smoke/records/*.json")}
    assert len(files) == len(first["records"])
    again = quickstart(out)
    assert again["records"] == first["records"]
    assert {path: path.stat().st_mtime_ns for path in out.glob("quickstart/smoke/records/*.json")} == files


def test_the_readmes_command_runs_the_small_tier(tmp_path: Path) -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    [words] = re.findall(r"^quickstart:.*\n\t\$\(BIN\)/lmscale (.*)$", makefile, re.MULTILINE)
    assert words == "run quickstart --tier small"
    answer = call(*words.split(), "--dry-run", "--out", tmp_path)
    assert (answer.status, answer.errors) == (0, "")
    assert "7 of 7 points would be run" in answer.output
