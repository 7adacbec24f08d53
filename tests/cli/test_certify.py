"""The verb `certify`: certificates of real runs from two allocations, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.records.store import read_checked, with_digest
from tests.harness.calls import Answer, call, document, refused
from tests.harness.made_up_records import certified, record
from tests.harness.small_runs import write_tokens

SMALL = ["--model.num-layers", "1", "--model.hidden-size", "16", "--model.num-heads", "2", "--model.seq-len", "16"]
SMALL += ["--plan.tp", "2", "--train.steps", "2", "--train.global-batch", "2", "--train.microbatch", "1"]
SMALL += ["--evaluation.sequences", "4", "--device", "cpu"]
RECORDS = "train/small/records"
pytestmark = pytest.mark.usefixtures("forked_ranks")


def trained(data: Path, out: Path, *options: str) -> Answer:
    answer = call("train", *SMALL, "--data.dataset", data, "--out", out, *options)
    assert answer.status == 0, answer
    return answer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a` and `b` with the certified run of two commands, `c` with the record of another instruction set."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_tokens(folder / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert "1 run is certified and not timed" in trained(data, folder / "a", "--certify").output
        trained(shutil.copytree(data, folder / "elsewhere"), folder / "b", "--certify")
    (folder / "c" / RECORDS).mkdir(parents=True)
    default = lambda whole: [rank["numerics"].update(cpu_capability="DEFAULT") for rank in whole["ranks"]]
    changed(of(folder / "a"), folder / "c" / RECORDS / of(folder / "a").name, default)
    return folder


def of(folder: Path) -> Path:
    [path] = (folder / RECORDS).glob("*.json")
    return path


def changed(path: Path, into: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a record with something changed into another file."""
    whole = read_checked(path)
    change(whole)
    into.write_text(with_digest(json.dumps(whole)))
    return into


def test_runs_of_two_commands_are_equal_and_not_timed(runs: Path) -> None:
    answer = call("certify", of(runs / "a"), of(runs / "b"))
    assert (answer.status, answer.errors) == (0, "")
    assert "equal bit for bit over 2 steps" in answer.output
    assert "data.dataset" in answer.output
    assert not call("certify", runs / "a", of(runs / "b")).status
    whole = read_checked(of(runs / "a"))
    assert whole["certified"]
    assert all(step["seconds"] is None for step in whole["steps"])
    assert "--certify" in refused("train", "--certify")
    assert not list((runs / "a/train/small").glob("tables/throughput*"))


def test_another_instruction_set_and_other_nodes_are_named(runs: Path, tmp_path: Path) -> None:
    answer = call("certify", runs / "a" / RECORDS, runs / "c")
    lines = [line for line in answer.output.splitlines() if line.startswith("  cpu_capability ")]
    assert len(lines) == 1
    assert "DEFAULT" in lines[0].upper()
    assert "changes bits: kernels sum by vectors of its width" in lines[0]

    other = changed(
        of(runs / "a"), tmp_path / "other.json", lambda whole: whole["ranks"][1]["numerics"].update(host="x")
    )
    answer = call("certify", of(runs / "a"), other, "--json")
    [found] = document(answer.output)
    assert (answer.status, found["equal_steps"], found["first"]) == (0, 2, None)
    nodes = {change["what"]: (change["values"], change["why"]) for change in found["changes"]}
    assert nodes["ranks per node"] == (["2", "1"], "")


def test_a_difference_is_named_by_step_tensor_and_rank(runs: Path, tmp_path: Path) -> None:
    def change(whole: dict[str, Any]) -> None:
        hashes = whole["certificate"][1]
        hashes[1] = json.loads(json.dumps(hashes[0] if isinstance(hashes[1], int) else hashes[1]))
        hashes[1]["gradient"][2] = ["0" * 16, 1.0, None]

    answer = call("certify", of(runs / "a"), changed(of(runs / "a"), tmp_path / "other.json", change))
    name = read_checked(of(runs / "a"))["ranks"][1]["pieces"][2][0]
    assert answer.status == 1
    assert f"differ first in step 1: gradient of {name}, elements 0 to" in answer.output
    assert ", on rank 1\n" in answer.output
    assert "sum: not finite" in answer.output
    assert "environments do not differ in anything that is recorded" in answer.output


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "none": (lambda whole: whole.pop("certificate"), "it has no certificate"),
    "a text": (lambda whole: whole.update(certificate="x"), "certificate: Input should be a valid list"),
    "a rank is missing": (lambda whole: whole["certificate"][1].pop(), "certificate.1: 1 of 2 ranks"),
    "no such rank": (lambda whole: whole["certificate"][0].__setitem__(0, 7), "certificate.0.0: no earlier rank 7"),
    "a tensor is missing": (lambda whole: whole["certificate"][0][0]["weight"].pop(), "certificate.0.0: not of 2"),
    "a loss": (lambda whole: whole["certificate"][0][0].update(loss="x"), "'x' is no number"),
    "a hash": (lambda whole: whole["certificate"][0][1]["gradient"][0].__setitem__(0, "x"), "certificate.0.1"),
    "ranks": (lambda whole: whole.update(ranks=[]), "ranks: 0 of 2"),
    "a plan": (lambda whole: whole["config"]["plan"].update(dp=0), "config.plan.dp"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_certificate_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(with_digest(json.dumps(certified(record(plan__dp=2)))))
    assert call("certify", "whole.json", "whole.json").status == 0
    change, words = MALFORMED[name]
    changed(tmp_path / "whole.json", tmp_path / "other.json", change)
    message = refused("certify", "whole.json", "other.json")
    assert words in message
    assert "other.json" in message


def test_what_is_not_there_or_comparable_is_refused(tmp_path: Path) -> None:
    for name, dp in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(with_digest(json.dumps(certified(record(plan__dp=dp)))))
    assert "plan.dp 1 and 2; other plans sum in another order" in refused("certify", "one", "two")
    assert "nowhere: No such file or directory" in refused("certify", "one", "nowhere")
    assert "'0123456789ab' has no records" in refused("certify", "one", "0123456789ab")
    (tmp_path / "cut").write_text((tmp_path / "one").read_text()[:-9])
    assert "SHA-256 differs" in refused("certify", "cut", "one")
    assert "not timed" in refused("run", "quickstart", "--certify", "--out", "own", "--profile")
    assert "needs --out" in refused("run", "quickstart", "--certify")
    assert "valid with native" in call("run", "engines", "--certify", "--out", "own", "--only", "engine=torch").output
