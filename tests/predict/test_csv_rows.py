"""`predict --rows`: a table comes back with predictions, in order, from constants fitted to rows of its own."""

import csv
import io
from pathlib import Path

import pytest

from harness.predict.csv_rows import COUNTS, OPTIONAL, read_rows
from harness.predict.held_out import STEPS
from harness.predict.systems import FOLDER, load_system
from tests.harness.calls import call, document, refused

HEAD = "split,gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iteration_time_s\n"
ROWS = (
    "calibrate,2,4,1,1024,16,20,1024,2,1,1,0.283879\n"
    "calibrate,2,16,4,2048,16,20,1024,1,1,2,0.594914\n"
    "calibrate,4,8,2,2048,16,24,1024,2,2,1,0.253429\n"
    "check,4,8,1,1024,16,16,1024,1,4,1,0.118953\n"
    ",8,8,1,1024,16,16,1024,2,2,2,\n"
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + ROWS)
    return path


def predict(path: Path, *more: str) -> tuple[str | Path, ...]:
    return ("predict", "--rows", path, "--system", "a100_cluster", *more)


def test_rows_come_back_in_order_with_predictions(table: Path):
    answer = call(*predict(table, "--json"))
    assert answer.status == 0
    found = document(answer.output)
    assert [row["split"] for row in found["rows"]] == ["calibrate"] * 3 + ["check", ""]
    for row in found["rows"]:
        assert row["low_s"] < row["predicted_s"] < row["high_s"]
        assert 1 < row["model_tflops_per_gpu"] < row["hardware_tflops_per_gpu"] < 312
        assert 1e9 < row["memory_bytes"] < 80e9
        assert row["fits"] is True
        assert row["problem"] is None
    assert found["errors"]["calibrate"]["mape"] < 5
    assert found["errors"]["check"]["mape"] < 25
    assert found["calibration"]["rows"][0] == "2 4 1 1024 16 20 1024 2 1 1"
    assert found["stack"].startswith("Megatron-DeepSpeed")


@pytest.mark.parametrize(
    ("cell", "problem"), [("2 2 1", None), ("(2, 2, 1)", None), ("4", "valid: the degrees of x, y")]
)
def test_degrees_of_three_axes_are_a_list(cell: str, problem: str | None, table: Path):
    head, line = table.read_text().splitlines()[:2]
    fields = dict(zip(head.split(","), line.split(","), strict=True))
    fields |= {"split": "", "gpus": "4", "tp": "4", "dp": "1", "pp": "1"}
    rows = [[*fields, "tp3"], [*fields.values(), f'"{cell}"'], [*fields.values(), ""]]
    table.write_text("\n".join(map(",".join, rows)) + "\n")
    row, _ = document(call(*predict(table, "--json")).output)["rows"]
    assert (row["problem"] is None) == (problem is None)
    assert problem is None or problem in row["problem"]


def test_the_table_is_printed_as_csv_and_left_out_and_unknown_columns_are_named(table: Path):
    head, *lines = table.read_text().splitlines()
    head += ",compile,recompute"
    table.write_text("\n".join([head, *(f"{line},true,none" for line in lines)]) + "\n")
    found = document(call(*predict(table, "--json")).output)
    assert found["ignored"] == ["compile"]
    assert "recompute" not in found["left_out"]
    assert (found["left_out"]["precision"], found["left_out"]["vocab"]) == (["fp16"], [51200])
    answer = call(*predict(table))
    rows = list(csv.DictReader(io.StringIO(answer.output)))
    assert len(rows) == 5
    assert list(rows[0])[:14] == head.split(",")
    assert "fitted on 3 rows" in answer.errors
    assert "calibrate: 3 rows, which constants were fitted to; in percent: " in answer.errors
    assert "check: 1 row;" in answer.errors
    assert "columns that predictions ignore: compile\n" in answer.errors
    assert "what they stand for: vocab 51200, family gpt, " in answer.errors


def test_an_impossible_plan_is_told_in_its_row(tmp_path: Path):
    path = tmp_path / "rows.csv"
    plans = ("8,8,1", "8,8,3", "9,8,1", "8,nan,1")
    path.write_text(HEAD + "".join(f",{plan},1024,16,16,1024,2,2,2,\n" for plan in plans))
    rows = document(call(*predict(path, "--json")).output)["rows"]
    assert rows[0]["predicted_s"] > 0
    assert "is not divisible by train.microbatch 3" in rows[1]["problem"]
    assert (rows[2]["problem"], rows[2]["predicted_s"]) == ("gpus 9 is not tp x dp x pp, 8", None)
    assert rows[3]["problem"] == "global_batch is empty; valid: a positive integer"


def test_optional_columns_change_the_run(tmp_path: Path):
    path = tmp_path / "rows.csv"
    more = {"chunks": 2, "zero_stage": 1, "recompute": "selective", "vocab": 32000}
    more |= {"sequence_parallel": "true", "precision": "bf16", "dropout": 0}
    path.write_text(",".join([*COUNTS, *more]) + "\n8,32,1,1024,16,16,1024,2,1,4," + ",".join(map(str, more.values())))
    [row] = read_rows(path, load_system("a100_cluster"))
    assert row.asked is not None
    run, plan, model = row.asked.done, row.asked.done.plan, row.asked.done.model
    assert (plan.chunks, plan.schedule, plan.zero_stage, plan.recompute) == (2, "interleaved", 1, "selective")
    assert (model.vocab_size, plan.sequence_parallel, run.precision, model.dropout) == (32000, True, "bf16", 0)
    assert row.problem is None


def test_a_row_of_an_impossible_plan_says_why_in_its_place_and_the_rest_is_predicted(tmp_path: Path):
    path, cells = tmp_path / "rows.csv", "32,1,1024,16,16,1024,2,1,4"
    rows = ("8", "1,"), ("16", "2,"), ("8", ","), ("16", "2,ulysses"), ("8", "2,"), ("8", "two,"), ("24", "3,")
    lines = [f"{gpus},{cells},{cp}" for gpus, cp in rows]
    path.write_text("\n".join([",".join([*COUNTS, "cp", "cp_attention"]), *lines]) + "\n")
    answer = call("predict", "--rows", path, "--system", "h100", "--json")
    whole, ring, unsaid, ulysses, few, word, third = document(answer.output)["rows"]
    assert whole["predicted_s"] == unsaid["predicted_s"]
    assert len({one["predicted_s"] for one in (whole, ring, ulysses)}) == 3
    assert few["problem"] == "gpus 8 is not tp x dp x pp x cp, 16"
    assert word["problem"] == "cp 'two'; valid: a positive integer"
    assert third["problem"].startswith("plan.cp 3, plan.cp_attention ring has to divide half of model.seq_len 1024; ")
    assert few["predicted_s"] is word["predicted_s"] is third["predicted_s"] is None
    assert "3 of 7 rows cannot be predicted" in call("predict", "--rows", path, "--system", "h100").errors


def test_zero_divides_within_nodes_of_the_system_where_a_row_says_so(tmp_path: Path):
    """Nodes of 8: 4 data-parallel neighbours with tp 2, of 2 no more than both, 1 with a tp that fills more nodes."""
    path = tmp_path / "rows.csv"
    given = [(2, 32, "node"), (2, 2, "node"), (16, 2, "node"), *((2, 32, to) for to in ("all", "", "16", "rack"))]
    lines = [f"{tp * dp},64,1,1024,16,16,1024,{tp},{dp},1,1,{group}" for tp, dp, group in given]
    path.write_text("\n".join([",".join([*COUNTS, "zero_stage", "zero_group"]), *lines]))
    *rows, wrong = read_rows(path, load_system("h100"))
    assert [row.asked and row.asked.done.plan.zero_group for row in rows] == [4, 2, 1, None, None, 16]
    assert wrong.problem == "zero_group 'rack'; valid: all, node, or a positive integer"


def test_a_row_may_be_a_llama(tmp_path: Path):
    """Llama 2 7B: the block's columns set the block's fields; other words and numbers say what would be valid."""
    block = {"kv_heads": 8, "ffn": 11008, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "tied": "false"}
    block |= {"biases": "no", "vocab": 32000}
    wrong = [{"mlp": "mish"}, {"kv_heads": 5}, {"positions": "alibi"}, {"tied": "perhaps"}]
    path, cells = tmp_path / "rows.csv", "8,32,1,4096,32,32,4096,2,1,4"
    lines = [",".join([cells, *map(str, (block | change).values())]) for change in ({}, *wrong)]
    path.write_text("\n".join([",".join([*COUNTS, *block]), *lines]) + "\n")
    row, *problems = read_rows(path, load_system("h100"))
    assert row.asked is not None
    model = row.asked.done.model
    assert (model.kv_heads, model.mlp_inner, model.mlp, model.norm) == (8, 11008, "swiglu", "rmsnorm")
    assert (model.positions, model.tied, model.biases) == ("rotary", False, False)
    said = [str(row.problem) for row in problems]
    for text, word in zip(
        said, ("squared_relu", "kv_heads 5 does not divide", "rotary", "valid: true, false"), strict=True
    ):
        assert word in text


def test_a_row_may_name_its_system(tmp_path: Path):
    path, own = tmp_path / "rows.csv", tmp_path / "own.yaml"
    own.write_text((FOLDER / "selene.yaml").read_text())
    cells = "2,4,1,1024,16,20,1024,2,1,1"
    systems = ["h100", "selene", str(own), "", "h1000"]
    path.write_text(",".join([*COUNTS, "system"]) + "\n" + "".join(f"{cells},{name}\n" for name in systems))
    found = document(call("predict", "--rows", path, "--system", "h100", "--json").output)
    seconds = [row["predicted_s"] for row in found["rows"]]
    assert seconds[0] == seconds[3] != seconds[1] == seconds[2]
    assert [one["system"] for one in found["systems"]] == ["h100", "selene", "selene", "h100"][: len(found["systems"])]
    assert found["rows"][4]["problem"].startswith("system 'h1000' does not exist; did you mean h100?")
    [*_, none, _] = document(call("predict", "--rows", path, "--json").output)["rows"]
    assert none["problem"].startswith("the row has no system")
    assert "predict needs --system" in refused("predict", "--model", "gpt-355m")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no rows"),
        ("gpus,tp\n8,1\n", "has no column global_batch"),
        (HEAD.replace("layers", "layer") + ROWS, "has no column layers; it has split, gpus"),
        (HEAD.replace(",", ";") + ROWS, "it has split;gpus;"),
        (HEAD + "check,x,8,1,1024,16,16,1024,2,2,2,1\n", "line 2: gpus 'x'; valid: a positive integer"),
        (HEAD + "check,8,8,1,1024,16,16,1024,2,2,2,-1\n", "line 2: iteration_time_s '-1'; valid: positive seconds"),
        (HEAD + "calibrate,8,8,1,1024,16,16,1024,2,2,2,\n", "rows of split calibrate need the seconds measured"),
        (HEAD + "calibrate,8,8,1,1024,16,16,1024,2,2,2,1e-300\n", "valid: positive seconds, 1e-09 to 1e+09"),
        (HEAD + "check,8,8,1,1,024,16,16,1024,2,2,2,.5\n", "cell '.5' has no column; valid: a cell with a comma in"),
        (HEAD.replace("split", "tp") + ROWS, "has column tp more than once; valid: each column once"),
        (HEAD + "check,8,8,1,1000,16,16,1024,2,2,2,1\n", "num_heads 16 does not divide hidden_size 1000"),
        (",".join([*COUNTS, "recompute"]) + "\n8,8,1,1024,16,16,1024,2,2,2,most\n", "recompute 'most'"),
        (",".join([*COUNTS, "zero_stage"]) + "\n8,8,1,1024,16,16,1024,2,2,2,7\n", "zero_stage 7"),
        (",".join([*COUNTS, "sequence_parallel"]) + "\n8,8,1,1024,16,16,1024,2,2,2,ja\n", "valid: true, false"),
        (",".join([*COUNTS, "precision"]) + "\n8,8,1,1024,16,16,1024,2,2,2,fp64\n", "precision fp64 is not known"),
        (HEAD + ",9,8,1,1024,16,16,1024,2,2,2,\n", "no row can be predicted"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert problem in refused(*predict(path))


def test_columns_that_are_not_read_come_back_as_they_are(table: Path):
    """A name, a hash or a version that reads as a number is none."""
    head, line = table.read_text().splitlines()[:2]
    table.write_text(f"{head},name,commit,version\n{line},007,12e4567,24.10\n")
    found = document(call(*predict(table, "--json")).output)
    assert [found["rows"][0][column] for column in ("name", "commit", "version")] == ["007", "12e4567", "24.10"]
    assert found["calibration"]["rows"] == ["007"]


def test_bytes_are_no_table(tmp_path: Path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refused(*predict(tmp_path / "bytes.csv"))


@pytest.mark.parametrize(
    ("columns", "cells", "encoding"),
    [
        (",".join(OPTIONAL), "," * (len(OPTIONAL) - 1), "utf-8"),
        ("zero_stage,sequence_parallel", "nan,0.0", "utf-8-sig"),  # as other programs write numbers
    ],
)
def test_empty_cells_and_numbers_of_any_form_are_valid(table: Path, columns: str, cells: str, encoding: str):
    other = table.with_name("other.csv")
    head, *lines = table.read_text().splitlines()
    text = "\n".join([f"{head},{columns}", *(f"{line},{cells}" for line in lines)])
    other.write_text(text.replace(",1024,", ",1024.0,") + "\n", encoding=encoding)
    system = load_system("a100_cluster")
    assert [row.asked for row in read_rows(other, system)] == [row.asked for row in read_rows(table, system)]


def test_the_case_of_calibrate_does_not_matter(table: Path):
    table.write_text(table.read_text().replace("calibrate,", "Calibrate,"))
    found = document(call(*predict(table, "--json")).output)
    assert [row["split"] for row in found["rows"]][:3] == ["Calibrate"] * 3
    assert found["errors"]["calibrate"]["fitted_to"] == len(found["calibration"]["rows"]) == 3
    assert found["errors"]["check"]["fitted_to"] == 0


def test_rows_that_a_packaged_systems_constants_were_fitted_to_are_not_scored_as_unseen(tmp_path: Path):
    head, *lines = (STEPS / "ptdp2021_table1.csv").read_text().replace(",calibrate,", ",,").splitlines()
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    answer = call("predict", "--rows", path, "--system", "selene")
    assert "measured: 3 rows, which constants were fitted to; in percent: " in answer.errors
    assert "check: 7 rows; in percent: " in answer.errors
    path.write_text("\n".join([head, *(line.replace(",check,", ",,") for line in lines)]) + "\n")
    answer = call("predict", "--rows", path, "--system", "selene")
    assert "measured: 10 rows, 3 of which constants were fitted to; in percent: " in answer.errors
