"""Records, archives and links in folders of results are data: no command runs, follows or loads what they name."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from harness.cli import report
from harness.experiment.loading import load
from harness.records.store import Store
from impl import own_code
from impl.run import from_dict
from tests.harness.calls import call, refused, report_little
from tests.harness.made_up_records import document, record, record_of, with_pipeline

NAME = "ptdp2021/pipeline_schedules"
TOP = "ptdp2021-pipeline_schedules"
EVIL = "named_by_a_record:rows"
MEMORY = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "buffers", "rest"), 2**20)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs with timeline and memory, of which one names a module that lies beside the results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, EVIL.partition(":")[0], raising=False)
    monkeypatch.setattr(own_code, "_trusted", set())
    monkeypatch.setattr(report, "experiment_ids", lambda: [NAME])
    report_little(monkeypatch)
    (tmp_path / "named_by_a_record.py").write_text(
        "open('imported', 'w')\nfrom impl.pipeline.schedules import gpipe as rows\n"
    )
    out = tmp_path / "results"
    for batch, schedule in ((4, "gpipe"), (8, EVIL)):
        plan: dict[str, Any] = {"plan__pp": 2, "plan__schedule": "gpipe", "train__microbatch": 1}
        full = document(with_pipeline(record(train__global_batch=batch, train__steps=9, **plan)))
        for rank in full["ranks"]:
            rank["memory"] = MEMORY
        full["resolved"]["head_positions"] = 128
        full["config"]["plan"]["schedule"] = schedule
        full["id"] = from_dict(full["config"]).id
        Store(out, NAME, "smoke").write(full | {"experiment": NAME})
    return out


def id_of_evil(results: Path) -> str:
    return next(r.id for r in Store(results, NAME, "smoke").records() if r.run.plan.schedule == EVIL)


@pytest.mark.parametrize("verb", ["table", "claims", "export"])
def test_a_schedule_that_only_a_record_names_is_not_imported(verb: str, results: Path) -> None:
    evil = id_of_evil(results)
    answer = call(verb, NAME, "--results" if verb == "export" else "--out", results)
    assert (answer.status, answer.errors) == (0, "")
    assert not Path("imported").exists()
    if verb == "claims":
        assert "5 claims" in answer.output
    elif verb == "export":
        with zipfile.ZipFile(f"{TOP}.zip") as archive:
            assert f"{evil} ({EVIL})" in archive.read(f"{TOP}/results/{NAME}/smoke/tables/throughput.md").decode()
    else:
        told = " ".join(answer.output.split())
        assert f"{evil} ({EVIL})" in told
        assert "schedule=gpipe" in told
        assert f"schedule={EVIL}" in told
        assert list((results / NAME / "smoke" / "figures").glob("timeline_*gpipe*.png"))
        assert not list((results / NAME / "smoke" / "figures").glob("timeline_*named*"))


def test_a_schedule_is_imported_where_the_command_names_it(results: Path) -> None:
    evil = next(p for p in (results / NAME / "smoke" / "records").iterdir() if EVIL in p.read_text())
    assert f"{evil}: plan.schedule '{EVIL}' is named by data" in refused("timeline", "--record", evil)
    assert not Path("imported").exists()
    answer = call("timeline", "--record", evil, "--plan.schedule", EVIL)
    assert answer.status == 0, answer.errors
    assert "predicted: step" in answer.output
    assert Path("imported").exists()


def test_a_table_of_configurations_names_no_code_either(results: Path) -> None:
    Path("rows.csv").write_text(
        "hidden,layers,heads,seq_len,vocab,gpus,tp,pp,dp,global_batch,micro_batch,schedule\n"
        f"1024,24,16,1024,51200,8,1,8,1,64,1,{EVIL}\n"
    )
    answer = call("predict", "--system", "selene", "--rows", "rows.csv")
    assert "is named by data" in answer.output + answer.errors
    assert not Path("imported").exists()


def test_an_archive_has_nothing_that_a_link_leads_to(results: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.diff").write_text("a secret")
    store = Store(results, NAME, "smoke")
    first = sorted(store.recorded.glob("*.json"))[0]
    first.rename(outside / first.name)
    first.symlink_to(outside / first.name)
    store.changes.symlink_to(outside)
    answer = call("export", NAME, "--results", results)
    assert answer.status == 0
    assert sorted(line.split(": ")[:2] for line in answer.errors.splitlines()) == [
        ["left out", str(store.changes / "a.diff")],
        ["left out", str(first)],
    ]
    with zipfile.ZipFile(f"{TOP}.zip") as archive:
        assert not any(b"a secret" in archive.read(name) or first.stem in name for name in archive.namelist())


def spoil(results: Path, text: str) -> None:
    """Put a text into all that tables show of records, of a run of the experiment too, which `status` shows."""
    failed = record_of(load(NAME).runs["smoke"][0], status="failed", reason=text)
    for full in (failed, record(seed=4, device_name=text)):
        Store(results, NAME, "smoke").write(document(full) | {"experiment": NAME})


def test_a_report_imports_and_loads_nothing_that_a_record_names(results: Path) -> None:
    spoil(results, "![y](http://evil.example/z.png) <img src=http://evil.example/y.png> [a](http://evil.example)")
    answer = call("report", "--results", results)
    assert (answer.status, answer.errors) == (0, "")
    assert not Path("imported").exists()
    assert f"{id_of_evil(results)} ({EVIL})" in Path(f"site/results/{NAME}/index.html").read_text()
    for page in Path("site").rglob("*.html"):
        assert '"http://evil' not in page.read_text(), page
        assert "<img src=http" not in page.read_text(), page
    assert call("table", NAME, "--out", results).status == 0
    tables = "".join(path.read_text() for path in (results / NAME / "smoke" / "tables").glob("*.md"))
    assert "\\![y](http://evil" in tables
    assert "![y]" not in tables.replace("\\!", "")
    assert "<img" not in tables.replace("\\<", "")


@pytest.mark.parametrize("verb", ["status", "table"])
def test_control_characters_of_a_record_do_not_reach_the_terminal(verb: str, results: Path) -> None:
    spoil(results, "\x1b]0;title\x07\x1b[31mred\u202e\x9b31m")
    more = ["--format", "csv"] if verb == "table" else []
    answers = [call(verb, NAME, "--out", results), call(verb, NAME, "--out", results, *more)]
    for answer in answers:
        assert answer.status == 0
        assert not set("\x1b\x07\u202e\x9b") & set(answer.output + answer.errors)
    assert "?[31mred" in " ".join(answers[0].output.split())
