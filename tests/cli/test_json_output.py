"""The command line as a script sees it: one JSON document on standard output, all else on standard error."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import sweeps
from harness.experiment.experiment import TIERS
from harness.experiment.loading import experiment_ids, load
from impl.cost.place import Place
from impl.cost.traffic import step_traffic
from impl.pipeline.schedule import Action, Schedule
from impl.pipeline.schedules import build
from impl.run import Run, from_dict
from tests.harness.calls import Answer, Started, answer_every_name, call, document, made_up, put_record
from tests.harness.small_runs import small

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_list_tells_every_experiment_with_its_tiers():
    found = document(call("list", "--json").output)
    assert [e["id"] for e in found] == experiment_ids()
    for e in found:
        assert e["question"].endswith("?")
        assert e["source"]
        assert all(e["tiers"][tier]["points"] > 0 and e["tiers"][tier]["expected"] for tier in TIERS)
    shown = call("list").output
    assert all(e["id"] in shown for e in found)


def test_status_tells_of_every_point_what_became_of_it(out: Path):
    first, second, third, *rest = load("quickstart").runs["smoke"]
    put_record(out, "quickstart", first)
    put_record(out, "quickstart", second, status="failed", reason="rank 1 was killed by SIGKILL")
    put_record(out, "quickstart", third).write_text('{"schema": 1, "status": "ok"')
    put_record(out, "quickstart", rest[0], tier="small")
    found = document(call("status", "quickstart", "--json", "--out", out).output)
    assert [p["status"] for p in found["points"]] == ["ok", "failed", *["missing"] * (1 + len(rest))]
    assert found["points"][1]["reason"] == "rank 1 was killed by SIGKILL"
    assert found["counts"] == {"ok": 1, "failed": 1, "missing": 1 + len(rest)}
    shown = call("status", "quickstart", "--out", out).output
    assert "rank 1 was killed by SIGKILL" in shown
    assert f"1 of {3 + len(rest)} points finished: 1 ok, 1 failed, {1 + len(rest)} missing" in shown


def test_fields_of_the_plan_replace_those_of_every_point(out: Path):
    runs = load("quickstart").runs["smoke"]
    plans = [replace(run.plan, tp=2, dp=1, overlap_grad_reduce=False, sequence_parallel=True) for run in runs]
    changed = [replace(run, plan=plan) for run, plan in zip(runs, plans, strict=True)]
    put_record(out, "quickstart", changed[0])
    given = ["--plan.tp", "2", "--plan.dp=1", "--plan.no-overlap-grad-reduce", "--plan.sequence_parallel"]
    found = document(call("status", "quickstart", "--json", "--out", out, *given).output)
    ids = [point["id"] for point in found["points"]]
    assert ids == list(dict.fromkeys(run.id for run in changed))
    assert len(ids) < len(runs), "the points that differed in dp alone are one"
    assert [point["status"] for point in found["points"]] == ["ok", *["missing"] * (len(ids) - 1)]
    # a default is a value like any other
    default = document(call("status", "quickstart", "--json", "--out", out, "--plan.dp", "1").output)
    assert {point["id"] for point in default["points"]} == {replace(r, plan=replace(r.plan, dp=1)).id for r in runs}


def test_prepare_tells_the_manifest_and_the_folder_can_be_trained_on(tmp_path: Path, no_start: None):
    (tmp_path / "text.txt").write_text("some words to be read " * 200)
    command = ["prepare", "--text", "text.txt", "--tokenizer", "byte", "--out", "tokens"]
    answer = call(*command, "--json")
    assert answer.errors == ""
    manifest = document(answer.output)
    assert manifest == json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert "dataset" in call(*command).output
    with pytest.raises(Started):
        call("train", "--data.dataset", "tokens")
    with pytest.raises(Started):
        call("train", "--model=gpt-0.5m", "--data.dataset", "tokens", "--out", "out")


# Whole runs, with processes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tokens: Path) -> list[Run]:
    return [small(tokens, dp=2), small(tokens, seed=1, lr=1e30, steps=20), small(tokens, seed=2, microbatch=3)]


@pytest.fixture(scope="module")
def ran(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Answer]]:
    """`run --json` of a point that is well, one whose loss is not a number, and one that cannot be."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        answer_every_name(patch, made_up(runs))
        patch.setattr(sweeps, "gpu_count", lambda: 0)
        patch.setattr("harness.launch.slurm.gpu_count", lambda: 0)
        yield out, call("run", "made_up", "--jobs", "3", "--json", "--out", out)


def test_run_answers_with_one_document_and_says_how_it_goes_elsewhere(ran: tuple[Path, Answer], runs: list[Run]):
    out, answer = ran
    found = document(answer.output)
    assert answer.status == 0, answer.errors
    assert [r["id"] for r in found["records"]] == [run.id for run in runs]
    assert [r["status"] for r in found["records"]] == ["ok", "nan", "invalid"]
    assert (found["id"], found["tier"]) == ("made_up", "smoke")
    assert {t["name"] for t in found["tables"]} >= {"throughput"}
    assert all(Path(file).stat().st_size > 0 for file in found["files"])
    assert "[3/3]" in answer.errors
    assert "Traceback" not in answer.errors
    assert list((out / "made_up" / "smoke" / "attempts").iterdir()) == []


def test_an_invalid_point_is_a_row_with_its_reason(ran: tuple[Path, Answer], runs: list[Run]):
    out, answer = ran
    invalid = document(answer.output)["records"][2]
    assert "not divisible" in invalid["reason"]
    written = (out / "made_up" / "smoke" / "tables").glob("*.md")
    assert any("not divisible" in path.read_text() for path in written)


def test_a_loss_that_is_not_a_number_ends_the_run_with_a_record(ran: tuple[Path, Answer], runs: list[Run]):
    out, answer = ran
    record = document(answer.output)["records"][1]
    assert "loss is" in record["reason"]
    assert 1 <= len(record["steps"]) < 20
    assert record["steps"][0]["loss"] > 0
    assert record["steps"][-1]["loss"] is None
    path = out / "made_up" / "smoke" / "records" / f"{runs[1].id}.json"
    assert {key: value for key, value in document(path.read_text()).items() if key != "sha256"} == record


def test_a_second_run_and_table_and_status_only_read(ran: tuple[Path, Answer], runs: list[Run], monkeypatch: Any):
    out, answer = ran
    monkeypatch.setattr("harness.launch.slurm.Site.submit", None)
    again = call("run", "made_up", "--json", "--out", out)
    assert again.status == 0, again.errors
    assert document(again.output)["tables"] == document(answer.output)["tables"]
    table = document(call("table", "made_up", "--json", "--out", out).output)
    assert table["tables"] == document(answer.output)["tables"]
    assert document(call("table", "made_up", "--format", "json", "--out", out).output) == table
    for kind, sign in {"md": "|", "csv": ",", "tex": "\\toprule"}.items():
        assert sign in call("table", "made_up", "--format", kind, "--out", out).output
    counts = document(call("status", "made_up", "--json", "--out", out).output)["counts"]
    assert counts == {"ok": 1, "nan": 1, "invalid": 1}
    for verb in ("status", "table"):
        assert call(verb, "made_up", "--out", out).output


SHAPE = (
    "--model.num-layers 4 --model.hidden-size 16 --model.num-heads 2 --model.seq-len 16 --train.steps 3 "
    "--train.global-batch 6 --train.microbatch 1 --train.warmup-steps 1 --evaluation.sequences 6"
)


def trained(tokens: Path, *options: str | Path) -> dict[str, Any]:
    answer = call("train", *SHAPE.split(), "--data.dataset", tokens, *options, "--json")
    assert answer.status == 0, answer.errors
    assert "[1/1]" in answer.errors
    return document(answer.output)


@pytest.fixture(scope="module")
def serial_record(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As it is printed without --out, which leaves no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "gpu_count", lambda: 0)
        patch.chdir(here := tmp_path_factory.mktemp("serial"))
        record = trained(tokens)
    assert list(here.iterdir()) == []
    return record


def test_train_prints_the_record_with_the_loss_of_every_step(serial_record: dict[str, Any]):
    assert serial_record["status"] == "ok"
    assert [step["step"] for step in serial_record["steps"]] == [0, 1, 2]
    assert all(0 < step["loss"] < 10 for step in serial_record["steps"])
    assert serial_record["config"]["model"]["hidden_size"] == 16
    assert serial_record["engine"]["name"] == "native"
    assert sum(serial_record["engine"]["bucket_bytes"]) >= 4 * serial_record["resolved"]["parameters"]


@pytest.mark.usefixtures("no_gpu")
def test_train_with_a_pipeline_tells_who_did_what_when(tokens: Path, out: Path, serial_record: dict[str, Any]):
    record = trained(tokens, "--plan.pp=2", "--plan.tp=2", "--plan.schedule=zb_h1", "--out", out)
    run = from_dict(record["config"])
    assert record["status"] == "ok"
    shown = [rank["timeline"] for rank in record["ranks"] if rank["timeline"]]
    assert len(record["ranks"]) == run.plan.world_size
    assert len(shown) == run.plan.pp, "one rank of each pipeline rank"
    assert_follows(shown, build(run.plan.schedule, run.plan.pp, run.microbatches))
    for i, rank in enumerate(record["ranks"]):  # pipeline ranks are the mesh's first axis
        pp_rank = i // (run.plan.dp * run.plan.tp)
        place = Place(run, record["resolved"]["vocab_size"], pp_rank)
        expected = step_traffic(place, record["resolved"]["head_positions"])["pp"]
        assert rank["traffic"]["pp"] == {op: asdict(count) for op, count in expected.items()}
    for one, other in zip(record["steps"], serial_record["steps"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    [found], [expected] = record["evaluations"], serial_record["evaluations"]
    assert found["nats"] == pytest.approx(expected["nats"], rel=1e-5)
    assert found | {"nats": 0} == expected | {"nats": 0}
    drawn = document(call("timeline", "--record", *out.rglob(f"records/{record['id']}.json"), "--json").output)
    assert [[text for text, _, _ in row] for row in drawn["measured"]["spans"]] == drawn_actions(shown)


def drawn_actions(rows: list[list[list[Any]]]) -> list[list[str]]:
    return [[text for text, _, _ in row] for row in rows]


def assert_follows(rows: list[list[list[Any]]], schedule: Schedule) -> None:
    """In the table's order, one at a time, and each after all that it needs, on other ranks too."""
    assert drawn_actions(rows) == [[str(action) for action in row] for row in schedule.rows]
    span_of = {Action.parse(text): (start, end) for row in rows for text, start, end in row}
    for row in rows:
        times = [time for _, *both in row for time in both]
        assert times == sorted(times)
        assert all(start < end for _, start, end in row)
    for action, (start, _) in span_of.items():
        for need in schedule.needs(action):
            assert span_of[need][1] <= start, f"{action} before {need}"


def test_a_run_without_a_pipeline_has_no_timeline(serial_record: dict[str, Any]):
    assert [rank["timeline"] for rank in serial_record["ranks"]] == [None]
    assert serial_record["ranks"][0]["traffic"] == {}
