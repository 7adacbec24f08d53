"""The verb `bench`: what is slower and what is faster than a baseline; nothing is really timed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import render
from harness.bench import bench
from harness.bench.bench import Report, compared
from harness.bench.reports import name_of
from tests.bench.test_engines import all_notes, in_order, kept_in
from tests.harness.calls import call, document, refused

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"processor": "a processor", "cores": 2, "packages": {"torch": "2.13.0"}}


def written(medians: dict[str, float], **environment: Any) -> dict[str, Any]:
    """A report as pytest-benchmark writes it, in the parts that are read."""
    benchmarks = [
        {"fullname": f"tests/bench/{name}", "stats": {"median": each, "iqr": each / 100, "rounds": 10, "data": [each]}}
        for name, each in medians.items()
    ]
    machine = {"node": "a name", "environment": ENVIRONMENT | environment}
    return {"machine_info": machine, "benchmarks": benchmarks, "version": "5"}


def report(medians: dict[str, float], **environment: Any) -> Report:
    return Report.model_validate(written(medians, **environment))


def verdicts(now: Report, before: Report, tolerance: float = 0.15, **options: bool) -> dict[str, str]:
    frame = compared(now, before, tolerance, **options).frame
    return dict(zip((name.removesuffix("::") for name in frame["name"]), frame["verdict"], strict=True))


def test_both_directions_ask_for_a_look():
    before = report({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "gone": 1.0})
    now = report({"a": 1.14, "b": 1.16, "c": 1 / 1.14, "d": 1 / 1.16, "more": 1.0})
    same = {"a": "", "c": "", "more": "new"}
    assert verdicts(now, before) == same | {"b": "slower", "d": "faster", "gone": "not measured"}
    assert verdicts(now, before, 0.2, all_of_them=False) == same | {"b": "", "d": ""}
    table = compared(now, before, 0.15)
    assert sum(table.frame["asks for a look"]) == 2
    text = render.markdown(table)
    assert "beyond 15% either way" in text
    assert "2 of 6 benchmarks changed" in text
    assert "None changed" in render.markdown(compared(before, before, 0.15))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"processor": "another"}, "processor another before, a processor now"),
        ({"cores": 64}, "cores 64 before, 2 now"),
        ({"packages": {"torch": "2.14.0"}}, "torch 2.14.0 before, 2.13.0 now"),
        ({"packages": {}}, "torch unknown before, 2.13.0 now"),
    ],
)
def test_another_machine_makes_no_verdict(other: dict[str, Any], words: str):
    table = compared(report({"a": 9.0}), report({"a": 1.0}, **other), 0.15)
    assert list(table.frame["verdict"]) == [""]
    assert not any(table.frame["asks for a look"])
    text = render.markdown(table)
    assert words in text
    assert "No verdict" in text
    assert "9,000" in text


ONE_MEDIAN = '{"machine_info": %s, "benchmarks": [{"fullname": %s, "stats": {"median": %s, "iqr": 0, "rounds": 9}}]}'


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "[" * 100_000,
        '{"benchmarks": []}',
        '{"machine_info": {}, "benchmarks": []}',
        '{"machine_info": {}, "benchmarks": [{"fullname": "a", "stats": {"median": 1}}]}',
        ONE_MEDIAN % ("{}", '"a"', "NaN"),
        ONE_MEDIAN % ("{}", '"a"', "-1"),
        ONE_MEDIAN % ("{}", "1", "1"),
    ],
)
def test_a_baseline_that_is_none_is_refused(content: str | None, tmp_path: Path):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    error = refused("bench", "--compare", path)
    assert f"--compare {path}" in error
    assert ("no such file" if content is None else "no whole report") in error
    assert "--keep DIR" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tolerance 0", "--tolerance 0"),
        ("--tolerance nan", "--tolerance nan"),
        ("--tolerance some", "'some'"),
        ("--onyl a", "did you mean --only?"),
        ("extra", "extra"),
        ("--compare .", "no whole report of benchmarks"),
        ("--compare nothing.json", "no such file"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, words: str):
    assert words in refused("bench", *arguments.split())


def test_benchmarks_and_what_runs_them_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(bench, "NEEDED", ("pytest", "no_such_benchmark"))
    assert re.search(r"need no_such_benchmark: .*\.\[dev\]", refused("bench"))
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    assert "in the repository, not in the installed package" in refused("bench")


# A made-up folder of benchmarks, which pytest really runs -----------------------------------------------------------

BENCHMARKS = """
import time
import pytest

@pytest.mark.parametrize("name", ["one", "two"])
def test_nap(name, benchmark):
    benchmark.pedantic(time.sleep, (0.001,), rounds=3)

def test_once(benchmark):
    benchmark.pedantic(time.sleep, (0.001,), rounds=1)
"""
FAULT = """
def test_fault(benchmark):
    benchmark.pedantic(int, rounds=3)
    assert False, "slower than it has to be"
"""
LONG = """
import os, time
from pathlib import Path

naps = iter((0.0, 60.0))

def test_long(benchmark):
    (Path(__file__).parent / "begun").write_text(str(os.getpid()))
    benchmark.pedantic(lambda: time.sleep(next(naps)), rounds=2)
"""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests" / "bench" / "conftest.py").read_text())
    (folder / "test_naps.py").write_text(BENCHMARKS)
    monkeypatch.setattr(bench, "FOLDER", folder)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # beside others nothing is measured
        monkeypatch.delenv(name, raising=False)
    return folder


NAPS = ["test_naps.py::test_nap[one]", "test_naps.py::test_nap[two]"]


def test_benchmarks_are_run_and_kept(made_up: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (made_up / "test_fault.py").write_text(FAULT)
    keep = tmp_path / "kept"
    answer = call("bench", "--keep", keep, "--json")
    shown = capfd.readouterr()
    assert answer.status == 1
    assert shown.out == "", "standard output is the document's"
    assert "test_nap[two] PASSED" in shown.err, "where it is, is shown"
    assert "slower than it has to be" in shown.err
    told = document(answer.output)
    assert [row["name"] for row in told["benchmarks"]] == ["test_fault.py::test_fault", *NAPS], "one round is not told"
    assert all(row["rounds"] == 3 and 0 < row["median"] < 1 for row in told["benchmarks"])
    assert told["files"] == [str(keep / "baseline.json")]
    kept = json.loads((keep / "baseline.json").read_text())
    assert [list(row) for row in kept["benchmarks"]] == [["fullname", "commit", "stats"]] * 4
    assert kept["machine_info"]["environment"]["packages"]["torch"]


@pytest.mark.parametrize(
    ("failed", "medians", "status", "words"),
    [
        (0, {"a": 1.0, "b": 2.0}, 0, "None changed"),
        (0, {"a": 1.5, "b": 2.0}, 1, "slower"),
        (0, {"a": 0.5, "b": 2.0}, 1, "faster"),
        (1, {"a": 1.0, "b": 2.0}, 1, "None changed"),
        (0, {"a": 1.0}, 0, "not measured"),
    ],
)
def test_the_exit_status_says_whether_to_look(
    failed: int, medians: dict[str, float], status: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    now, then = report(medians), tmp_path / "then.json"
    then.write_text(json.dumps(written({"a": 1.0, "b": 2.0})))
    monkeypatch.setattr(bench, "_chosen", lambda only: ["a", "b"])
    monkeypatch.setattr(bench, "_measured", lambda names, keep, quiet: (failed, now))
    keep = tmp_path / "kept"
    answer = call("bench", "--compare", then, "--keep", keep)
    assert answer.status == status
    assert words in answer.output
    assert call("bench", "--compare", keep / "baseline.json").status == failed, "it can be read again"
    partly = call("bench", "--only", "a", "--json", "--compare", then)
    assert document(partly.output)["compared"]["rows"][0]["before"] == 1.0


@pytest.mark.parametrize(("processor", "kept"), [("Xeon", {"a": 3.0, "b": 2.0}), ("Epyc", {"a": 3.0})])
def test_a_baseline_is_made_bit_by_bit_on_one_machine(
    processor: str, kept: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(bench, "_chosen", lambda only: ["a", "b"])
    for medians, at in (({"a": 1.0, "b": 2.0}, "Xeon"), ({"a": 3.0}, processor)):
        now = report(medians, processor=at)
        monkeypatch.setattr(bench, "_measured", lambda names, keep, quiet, now=now: (0, now))
        assert call("bench", "--keep", tmp_path).status == 0
    found = json.loads((tmp_path / "baseline.json").read_text())["benchmarks"]
    assert {row["fullname"][-1]: row["stats"]["median"] for row in found} == kept


def test_nothing_measured_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "_chosen", lambda only: ["a"])
    monkeypatch.setattr(bench, "_measured", lambda names, keep, quiet: (1, None))
    answer = call("bench")
    assert (answer.status, answer.output) == (1, "")
    assert "no benchmark was measured" in answer.errors
    once = {"fullname": "a", "stats": {"median": 1.0, "iqr": 0.0, "rounds": 1}}
    now = Report.model_validate({"machine_info": {}, "benchmarks": [once]})
    monkeypatch.setattr(bench, "_measured", lambda names, keep, quiet: (0, now))
    assert call("bench").status == 0, "one round is a benchmark, too"


def test_what_matches_nothing_is_refused(made_up: Path):
    error = refused("bench", "--only", "no-such-thing")
    assert "'no-such-thing' matches no benchmark" in error
    assert "test_naps.py::test_nap, test_naps.py::test_once" in error
    (made_up / "test_broken.py").write_text("import no_such_module")
    assert "cannot be read" in refused("bench")


def test_an_interrupt_stops_all_of_it_and_keeps_what_had_ended(made_up: Path, tmp_path: Path):
    (made_up / "test_long.py").write_text(LONG)
    program = f"""if True:
        import sys
        from pathlib import Path
        from harness.bench import bench
        from harness.cli import main
        bench.FOLDER = Path({str(made_up)!r})
        bench._chosen = lambda only: ["test_naps.py::test_once", "test_long.py::test_long"]
        sys.exit(main.main(["bench", "--keep", {str(tmp_path)!r}]))
    """
    verb = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    begun, deadline = made_up / "begun", time.monotonic() + 180
    while not begun.exists() or not begun.read_text():
        assert time.monotonic() < deadline
        assert verb.poll() is None, verb.communicate()
        time.sleep(0.05)
    verb.send_signal(signal.SIGINT)
    output, errors = verb.communicate(timeout=60)
    assert verb.returncode == 130
    kept = tmp_path / "baseline.json"
    assert errors.splitlines()[-1] == f"interrupted; all ranks stopped, what had been measured is in {kept}"
    ended = json.loads(kept.read_text())["benchmarks"]
    assert [name_of(one["fullname"]) for one in ended] == ["test_naps.py::test_once"]
    assert "Traceback" not in output + errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_cells_that_a_run_leaves_out_stay_with_the_commit_they_are_from(tmp_path: Path) -> None:
    old, new = {"commit": "0" * 40, "dirty": False}, {"commit": "1" * 40, "dirty": True}
    cell = lambda plan, **more: {"precision": "fp32", "plan": plan, **more}
    assert kept_in(tmp_path) == []
    document = {"environment": {"git": old}, "cells": [cell("dp"), cell("gpipe"), cell("1f1b", git=new)]}
    (tmp_path / "engines.json").write_text(json.dumps(document))
    kept = kept_in(tmp_path)
    assert [one["git"] for one in kept] == [old, old, new]
    again = in_order([*kept, cell("gpipe", git=new)])
    assert [(one["plan"], one["git"]) for one in again] == [("dp", old), ("gpipe", new), ("1f1b", new)]
    told = all_notes(
        [{**one, "peers": {}, "device": {"torch_threads": 1, "backend": "", "device_name": ""}} for one in again]
    )
    assert "0000000: dp fp32; 1111111 and changes: gpipe fp32, 1f1b fp32." in told[-1]
