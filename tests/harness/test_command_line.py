"""The command line as users and scripts see it: results on standard output, one line for what is wrong."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import verbs
from harness.cli import main
from harness.experiment import TIERS, Experiment, experiment_ids, load
from harness.store import SCHEMA
from impl.run import Run
from tests.harness.small_runs import small, write_tokens

ROOT = Path(__file__).resolve().parents[2]
VERBS = ("list", "run", "status", "table", "train", "prepare")


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


class Started(Exception):  # noqa: N818  (nothing went wrong)
    """Training would have begun."""


def call(*arguments: str | Path) -> Answer:
    """The command line in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0
    return Answer(status, output.getvalue(), errors.getvalue())


def refused(*arguments: str | Path) -> str:
    """What is wrong with a command, after checking how it is said."""
    answer = call(*arguments)
    assert answer.status == 2, answer
    assert answer.output == ""
    return the_error(answer.errors)


def the_error(errors: str) -> str:
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: "), errors
    assert errors.endswith("\n")
    assert len(errors) > len("error: \n")
    assert "Traceback" not in errors
    return errors.strip()


def document(text: str) -> Any:
    """The one JSON document in a text; NaN and the like are not JSON."""

    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no_json)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the project's own results."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.validity.gpu_count", lambda: 0)

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(verbs, "_sweep", start)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", ("no verb", *VERBS)),
        ("nonsense", ("nonsense", *VERBS)),
        ("--json", ("--json", *VERBS)),
        ("run", ("experiment",)),
        ("run nosuch", ("'nosuch'", "quickstart", "ours/data_parallel_scaling", "megatron2019/layernorm_placement")),
        ("run quikstart", ("did you mean quickstart",)),
        ("status nosuch", ("quickstart",)),
        ("table nosuch", ("quickstart",)),
        ("run quickstart --tier huge", ("huge", "smoke", "small", "paper")),
        ("run quickstart --on moon", ("moon", "local", "slurm")),
        ("table quickstart --format html", ("html", "md", "csv", "tex", "json")),
        ("run quickstart --frobnicate", ("--frobnicate",)),
        ("run quickstart --tiers smoke", ("--tiers", "did you mean --tier?")),
        ("run quickstart extra", ("extra",)),
        ("list --jsn", ("--jsn", "did you mean --json?")),
        ("run quickstart --only nothing-like-it", ("nothing-like-it", "points:", "norm=post", "dp=2")),
        ("run quickstart --jobs 0", ("--jobs 0",)),
        ("run quickstart --jobs -1", ("--jobs -1",)),
        ("run quickstart --jobs two", ("--jobs", "'two'")),
        ("run quickstart --jobs", ("--jobs",)),
        ("run quickstart --time-limit nan", ("--time-limit nan",)),
        ("run quickstart --time-limit inf", ("--time-limit inf",)),
        ("run quickstart --time-limit 0", ("--time-limit 0",)),
        ("run quickstart --ranks-per-node 0", ("--ranks-per-node 0",)),
        ("run quickstart --data no/where", ("no token folder no/where", "harness prepare")),
        ("run quickstart --model gpt-2m", ("--model",)),
        ("table quickstart", ("no records", "harness run quickstart")),
        ("train --model.hiden-size 8", ("--model.hiden-size", "did you mean --model.hidden-size?")),
        ("train --model.hidden-size many", ("--model.hidden-size", "'many'")),
        ("train --model.hidden-size 30 --model.num-heads 4", ("model: num_heads 4", "hidden_size 30", "1, 2, 3, 5")),
        ("train --model.norm-placement middle", ("model.norm_placement", "middle", "pre", "post", "sandwich")),
        ("train --model.family lstm", ("lstm", "gpt", "bert")),
        ("train --model.dropout 1", ("model.dropout", "less than 1")),
        ("train --model.vocab-size 1", ("model.vocab_size", "2")),
        ("train --model gpt-9t", ("gpt-9t", "nearest", "gpt-2m")),
        ("train --model=gpt-9t", ("gpt-9t", "nearest")),
        ("train --model", ("--model", "value")),
        ("train --train.global-batch 7", ("train.global_batch 7", "train.microbatch 8", "valid microbatches: 1, 7")),
        ("train --plan.dp 3", ("train.global_batch 16", "plan.dp 3", "must divide 16")),
        ("train --plan.dp 0", ("plan.dp", "greater than 0")),
        ("train --train.lr nan", ("train.lr", "finite", "nan")),
        ("train --train.lr inf", ("train.lr", "finite")),
        ("train --train.lr -1", ("train.lr", "greater than 0")),
        ("train --train.lr 0x10", ("train.lr", "0x10")),
        ("train --train.steps -1", ("train.steps", "greater than 0")),
        ("train --train.steps 1.5", ("train.steps", "1.5")),
        ("train --train.clip-norm -1", ("train.clip_norm", "greater than or equal to 0")),
        ("train --train.decay sudden", ("sudden", "cosine", "linear", "constant")),
        ("train --seed -3", ("seed", "-3")),
        ("train --threads 0", ("threads", "0")),
        ("train --precision fp8", ("fp8", "fp64", "fp32", "bf16")),
        ("train --evaluation.overlap 128", ("evaluation.overlap 128", "model.seq_len 128")),
        ("train --evaluation.texts no/where.txt", ("no/where.txt",)),
        ("train --model.family bert --evaluation.texts a.txt", ("evaluation.texts", "gpt")),
        ("train --model.vocab-size 100", ("model.vocab_size 100", "257")),
        ("train --plan.dp 100000 --train.global-batch 100000 --train.microbatch 1", ("100000 ranks", "GiB")),
        ("train --data.dataset no/where", ("no token folder no/where",)),
        ("train --time-limit nan", ("--time-limit nan",)),
        ("prepare", ("--text", "--tokenizer", "--out")),
        ("prepare --text no.txt --tokenizer byte --out tokens", ("no.txt",)),
    ],
)
@pytest.mark.usefixtures("no_start")
def test_bad_input_is_one_line_that_names_it_and_what_is_valid(arguments: str, told: tuple[str, ...], tmp_path: Path):
    where = ["--out", "out"] if arguments.startswith("train") else []
    message = refused(*arguments.split(), *where)
    for part in told:
        assert part in message
    for noise in ("pydantic", "tyro", "──", "---", "type=", "Error parsing __"):
        assert noise not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run quickstart", "train"])
def test_an_output_folder_that_cannot_be_is_named(verb: str, tmp_path: Path, tokens: Path):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        assert f"{out}/" in refused(*verb.split(), "--out", out)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments",
    ["table quickstart --out NAME", "train --out NAME", "train --data.dataset NAME", "run quickstart --data NAME"],
)
@pytest.mark.usefixtures("no_start")
def test_a_name_too_long_for_the_machine_is_told(arguments: str):
    assert "xxx" in refused(*arguments.replace("NAME", "x" * 5000).split())


@pytest.mark.parametrize("verb", ["run quickstart --data DATA", "train --data.dataset DATA"])
@pytest.mark.parametrize("damage", ["truncated", "sha256", "manifest.json", "valid.bin is missing", "tokenizer.json"])
@pytest.mark.usefixtures("no_start")
def test_a_damaged_token_folder_is_told_before_anything_is_written(
    verb: str, damage: str, tokens: Path, tmp_path: Path, out: Path
):
    data = tmp_path / "tokens"
    shutil.copytree(tokens, data)
    train = data / "train.bin"
    if damage == "truncated":
        train.write_bytes(train.read_bytes()[:-2])
    elif damage == "sha256":
        train.write_bytes(bytes([train.read_bytes()[0] ^ 1]) + train.read_bytes()[1:])
    else:
        (data / damage.split()[0]).unlink()
    assert damage in refused(*verb.replace("DATA", str(data)).split(), "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "arguments", "told"),
    [
        (None, "--text TEXT --tokenizer byte", "no file or folder"),
        (b"", "--text TEXT --tokenizer byte", "is empty"),
        (b" \n \n", "--text TEXT --tokenizer byte", "is empty"),
        (b"abc\n\xff\xfe", "--text TEXT --tokenizer byte", "not UTF-8: byte 4, line 2"),
        (b"one", "--text TEXT --tokenizer byte", "too little text"),
        (b"some words here", "--text TEXT --tokenizer words", "byte, gpt2:VOCAB,MERGES"),
        (b"some words here", "--text TEXT --tokenizer bpe:many", "bpe:VOCAB_SIZE"),
        (b"some words here", "--text TEXT --tokenizer bpe:3", "257"),
        (b"some words here", "--text TEXT --tokenizer gpt2:a,b", "no file a"),
        (b"some words here", "--text TEXT --tokenizer byte --valid no.txt", "no.txt"),
        (b"some words here", "--text TEXT --tokenizer byte --valid-fraction nan", "nan"),
        (b"some words here", "--text TEXT --tokenizer byte --valid-fraction 2", "2"),
        (b"some words here", "--text TEXT --tokenizer byte --out TEXT", "is a file"),
        (b"some words here", "--text TEXT --tokenizer byte --out TEXT/below", "cannot be written"),
        (b"some words here", "--text . --tokenizer byte --out .", "not empty"),
    ],
)
def test_what_cannot_be_prepared_leaves_nothing(content: bytes | None, arguments: str, told: str, tmp_path: Path):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    where = [] if "--out" in arguments else ["--out", "out"]
    assert told in refused("prepare", *arguments.replace("TEXT", str(text)).split(), *where)
    assert sorted(tmp_path.rglob("*")) == before


def test_slurm_is_refused_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch on this machine; valid here: local" in refused("run", "quickstart", "--on", "slurm")
    assert "no sbatch" in refused("train", "--on", "slurm")
    for name, answer in {"sbatch": "exit 0", "sinfo": "echo 'slurm: Unable to contact controller' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    assert "no cluster answers (slurm: Unable to contact controller)" in refused("train", "--on", "slurm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sbatch", "sinfo"]


def test_a_results_folder_with_something_in_the_way_is_an_error_of_the_machine(tmp_path: Path, out: Path):
    put_record(out, "quickstart", load("quickstart").runs["smoke"][0], status="failed", reason="no luck")
    (out / "quickstart" / "smoke" / "tables").write_text("")
    assert "tables" in refused("table", "quickstart", "--out", out)


@pytest.mark.parametrize("program", [[sys.executable, "-m", "harness"], [str(Path(sys.executable).parent / "lmscale")]])
@pytest.mark.parametrize("arguments", ["run nosuch", "train --model.hidden-size 7"])
def test_the_programs_say_the_same(program: list[str], arguments: str, tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, *arguments.split()], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert the_error(done.stderr) == refused(*arguments.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--help", *(f"{verb} --help" for verb in VERBS)])
def test_help_is_no_error(arguments: str):
    answer = call(*arguments.split())
    assert (answer.status, answer.errors) == (0, "")
    assert "usage" in answer.output.lower()


# Anything at all ----------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *VERBS, "quickstart", "layernorm_placement", "megatron2019/layernorm_placement", "smoke", "paper", "md", "json",
        "--tier", "--json", "--no-json", "--out", "--only", "--jobs", "--format", "--data", "--on", "--model", "--text",
        "--tokenizer", "--model.num-heads", "--train.lr", "--plan.dp", "--seed", "--compile", "--evaluation.texts",
        "--time-limit", "--valid-fraction", "--", "-", "-h", "--help", "=", "", "0", "-1", "1e9", "nan", "text.txt",
        "slurm", "local", "byte", "bpe:300", "gpt-2m", "gpt2:a,b", "None", "--json=1", "--tier=smoke", "../x", "*", "[",
    ]
)  # fmt: skip
garbage = st.text(st.characters(exclude_characters="\0"), max_size=8)
commands = st.lists(WORDS | garbage, max_size=6) | st.builds(
    lambda verb, rest: [verb, *rest], st.sampled_from(VERBS), st.lists(WORDS | garbage, max_size=5)
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=commands)
@example(arguments=["prepare", "--text", "text.txt", "--tokenizer", "byte", "--out", "tokens"])
@example(arguments=["list", "--" + "-" * 200])
@example(arguments=["train", "\ud800"])
@example(arguments=["status", "quickstart", "--out", "\n"])
@pytest.mark.usefixtures("no_start")
def test_any_command_is_done_or_refused_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "text.txt").write_text("some words to be read " * 20)
    try:
        answer = call(*arguments)
    except Started:
        return
    assert answer.status in (0, 2), answer
    if answer.status == 2:
        the_error(answer.errors)
        assert answer.output == ""
    else:
        assert "error" not in answer.errors


# Results for scripts ------------------------------------------------------------------------------------------------


def put_record(out: Path, experiment: str, run: Run, **fields: Any) -> Path:
    record = {"schema": SCHEMA, "id": run.id, "experiment": experiment, "tier": "smoke", "source": "measured"}
    record |= {"config": json.loads(json.dumps(dataclasses.asdict(run))), "status": "ok", "reason": None}
    path = out / experiment / "smoke" / "records" / f"{run.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | fields))
    return path


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
    assert f"1 failed, {1 + len(rest)} missing, 1 ok" in shown


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=80) | nonsense.map(lambda value: json.dumps(value).encode()), cut=st.integers(0, 3000)
)
def test_whatever_lies_where_a_record_should_be_is_none(content: bytes, cut: int, out: Path):
    first, second, *_ = runs = load("quickstart").runs["smoke"]
    put_record(out, "quickstart", first).write_bytes(content)
    path = put_record(out, "quickstart", second)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    (path.parent / "notes.json").write_bytes(content)
    found = document(call("status", "quickstart", "--json", "--out", out).output)
    assert found["counts"] == {"missing": len(runs)}
    assert "no records" in refused("table", "quickstart", "--out", out)


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
    return [
        small(tokens, dp=2),
        small(tokens, seed=1, lr=1e30, steps=20),
        small(tokens, seed=2, microbatch=3),
    ]


@pytest.fixture(scope="module")
def ran(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Answer]]:
    """`run --json` of a point that is well, one whose loss is not a number, and one that cannot be."""
    made_up = Experiment(
        id="made_up",
        question="Does it run?",
        source="none",
        expectation="none",
        cost=dict.fromkeys(TIERS, "a moment"),
        runs=dict.fromkeys(TIERS, runs),
    )
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "load", lambda name: made_up)
        patch.setattr(verbs, "gpu_count", lambda: 0)
        patch.setattr("harness.validity.gpu_count", lambda: 0)
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
    assert document(path.read_text()) == record


def test_a_second_run_and_table_and_status_only_read(ran: tuple[Path, Answer], runs: list[Run], monkeypatch: Any):
    out, answer = ran
    monkeypatch.setattr("harness.launch.Site.submit", None)
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


def test_train_prints_the_record_with_the_loss_of_every_step(tokens: Path, tmp_path: Path):
    command = [sys.executable, "-m", "harness", "train", "--json", "--data.dataset", str(tokens)]
    shape = "--model.num-layers 1 --model.hidden-size 16 --model.num-heads 1 --model.seq-len 16 --train.steps 4"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *shape.split()], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    record = document(done.stdout)
    assert record["status"] == "ok"
    assert [step["step"] for step in record["steps"]] == [0, 1, 2, 3]
    assert all(0 < step["loss"] < 10 for step in record["steps"])
    assert record["config"]["model"]["hidden_size"] == 16
    assert "[1/1]" in done.stderr
    assert list(tmp_path.iterdir()) == []
