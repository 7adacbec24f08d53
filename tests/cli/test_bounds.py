"""Input without measure, or of another kind than any: refused in one line before memory or time is spent on it."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main, report
from harness.experiment import published
from harness.experiment.experiment import TIERS
from harness.experiment.loading import load
from harness.predict.systems import names
from harness.records.store import Store, write_atomically
from impl.data.make_tokenizer import parse
from impl.errors import InputError
from impl.fields import divisors
from impl.files import read_bytes
from impl.pipeline.schedules import build
from impl.pipeline.stage import partition
from tests.harness.calls import answer_every_name, call, document, put_record, refused, report_little

HEAD = "gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp"
ROW = "4,16,1,2048,16,24,1024,2,1,2"
GUARD = 120
"""Seconds after which a call that has no end fails its test."""


@pytest.fixture(autouse=True)
def _guarded(no_start: None) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"no end after {GUARD} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(GUARD)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


ABSURD = [
    ("--model.hidden-size 10000000001 --model.num-heads 3", "model.hidden_size"),
    ("--model.hidden-size 999999999 --model.num-heads 2", "num_heads 2 does not divide hidden_size 999999999"),
    ("--model.hidden-size 1000000000 --model.num-heads 1000000000 --plan.tp 7", "plan.tp 7 does not divide"),
    ("--model.num-heads 1000000000000", "model.num_heads"),
    ("--model.num-layers 100000000000", "model.num_layers"),
    ("--model.seq-len 10000000000000", "model.seq_len"),
    ("--plan.pp 10000000", "plan.pp"),
    ("--plan.dp 10000000000", "plan.dp"),
    ("--train.global-batch 10000000000001", "train.global_batch"),
    ("--train.global-batch 999999999 --train.microbatch 2", "valid microbatches: 1, 3, 9"),
    ("--train.global-batch 1000000000 --train.microbatch 1", "1000000000 passes"),
    ("--threads 1000000000", "threads"),
]


@pytest.mark.parametrize("verb", ["memory", "train", "predict --system h100"])
@pytest.mark.parametrize(("arguments", "told"), ABSURD)
def test_absurd_sizes_are_refused_at_once(verb: str, arguments: str, told: str):
    assert told in refused(*verb.split(), *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("timeline --microbatches 1000000000", "4000000000 passes cannot be drawn; valid: up to"),
        ("timeline --plan.pp 100000", "plan.pp"),
        ("tune --system h100 --model gpt-175b --gpus 1000000000", "no plan puts"),
        ("tune --system h100 --model gpt-175b --gpus 1000000000000000000000000", "no plan puts"),
        ("tune --system h100 --model gpt-175b --gpus 8 --global-batch 10000000000001", "global_batch"),
        ("prepare --text text.jsonl --tokenizer bpe:" + 5000 * "9", "valid: byte"),
    ],
)
def test_absurd_sizes_of_other_verbs_too(arguments: str, told: str):
    Path("text.jsonl").write_text('{"text": "a"}\n')
    assert told in refused(*arguments.split(), *(["--out", "out"] if "prepare" in arguments else []))


@pytest.mark.parametrize("arguments", ["run", "memory --model", "memory --train.lr", "memory --plan.schedule"])
def test_a_long_value_comes_back_in_part(arguments: str):
    assert f"{50 * 'x'}[...]{30 * 'x'}" in refused(*arguments.split(), 5000 * "x")


def test_a_word_that_would_control_the_terminal_is_refused():
    assert "'\\x1b]0;x\\x07': control characters" in refused("status", "quickstart", "--out", "\x1b]0;x\x07")


def test_a_message_has_an_end_and_a_path_is_whole():
    assert len(refused("table", "quickstart", f"--{5000 * 'x'}")) < 2100
    path = Path(*"abcd") / (90 * "d") / (90 * "e")
    assert f"no file or folder {path};" in refused("prepare", "--tokenizer", "byte", "--out", "out", "--text", path)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (f"{HEAD}\n1,16,1,10000000001,3,24,1024,1,1,1\n", "line 2: hidden 10000000001"),
        (f"{HEAD}\n1,400000000,1,2048,16,24,1024,1,1,1\n", "400000000 passes"),
        (f"{HEAD},name\n{ROW},{200_000 * 'x'}\n", "line 2: field larger than field limit"),
    ],
)
def test_rows_without_measure_are_refused(rows: str, told: str):
    Path("rows.csv").write_text(rows)
    assert told in refused("predict", "--system", "h100", "--rows", "rows.csv")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("1,400000000,1,2048,16,24,1024,1,1,1", "400000000 passes; valid: up to 1048576"),
        ("1,16,1,10000000001,3,24,1024,1,1,1", "hidden 10000000001"),
    ],
)
def test_a_row_that_is_too_large_leaves_the_others(row: str, problem: str):
    Path("rows.csv").write_text(f"{HEAD}\r{row}\r{ROW}\r")  # a line end of its own
    answer = call("predict", "--system", "h100", "--rows", "rows.csv", "--json")
    assert answer.status == 0
    first, second = document(answer.output)["rows"]
    assert problem in first["problem"]
    assert second["predicted_s"] > 0


@pytest.mark.parametrize("kind", ["device", "link", "pipe"])
@pytest.mark.parametrize("flag", ["--system", "--rows", "--text", "vocabulary", "--compare", "archive"])
def test_pipes_and_devices_are_no_files(flag: str, kind: str, tmp_path: Path):
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file.yaml"
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    Path("a.txt").write_text("text")
    arguments = {
        "--system": ["predict", "--system", path],
        "--rows": ["predict", "--system", "h100", "--rows", path],
        "--text": ["prepare", "--text", path, "--tokenizer", "byte", "--out", "out"],
        "vocabulary": ["prepare", "--text", "a.txt", "--tokenizer", f"gpt2:{path},a.txt", "--out", "out"],
        "--compare": ["bench", "--only", "parts", "--compare", path],
        "archive": ["import", path],
    }[flag]
    assert str(path) in refused(*arguments)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="too long; valid: up to 4 bytes"):
        read_bytes(path, 4)


@pytest.mark.parametrize(
    ("yaml", "told"),
    [
        ("name: !!timestamp x", "line 1: no YAML: 'x' is no timestamp"),
        ("name: a\nstack: !!bool x", "line 2: no YAML: 'x' is no bool"),
        ("name: !!int ''", "'' is no int"),
        ("name: !!float ''", "'' is no float"),
        ("name: !!map ab", "no YAML"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 2: no YAML: alias *a; valid: none"),
        ("name: " + 100_000 * "[", "no YAML"),
        ("name: '" + (2**20) * "x" + "'", "too long; valid: up to 1,048,576 bytes"),
    ],
)
def test_yaml_of_another_kind_is_refused(yaml: str, told: str):
    Path("system.yaml").write_text(yaml)
    assert told in refused("predict", "--system", "system.yaml")
    assert "h100" in names()


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_json_nested_too_deeply_is_told_with_file_and_line(suffix: str, tmp_path: Path):
    import gzip
    import lzma

    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    (tmp_path / f"deep.jsonl{suffix}").write_bytes(pack(b'{"text": "a"}\n' + 100_000 * b"["))
    told = refused("prepare", "--text", f"deep.jsonl{suffix}", "--tokenizer", "byte", "--out", "out")
    assert f"deep.jsonl{suffix}, line 2: not JSON: recursion limit exceeded" in told
    assert not Path("out").exists()


def test_a_vocabulary_nested_too_deeply_is_told():
    Path("encoder.json").write_text(100_000 * "[")
    Path("vocab.bpe").write_text("")
    with pytest.raises(InputError, match=r"encoder\.json is not a JSON vocabulary.*recursion limit exceeded"):
        parse("gpt2:encoder.json,vocab.bpe").build()


OTHERS: list[dict[str, Any]] = [
    {"prediction": "x"},
    {"prediction": {"microbatches_in_flight": "x"}},
    {"environment": 1e17},
    {"environment": {"command": ["lmscale", 1.5]}},
    {"environment": {"packages": 5}},
    {"config": {"model": {"hidden_size": 10000000001, "num_heads": 3}}},
    {"config": {"plan": {"pp": 10**17}}},
    {"config": {"train": {"global_batch": 400_000_000, "microbatch": 1}}},
]


@pytest.fixture
def odd_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], Path]:
    """Records of quickstart, one with each change, and one whole record."""
    quickstart = load("quickstart")
    first = quickstart.runs["smoke"][0]
    ranks = [{"rank": 0, "timeline": [["0F0", 0.0, 1.0], ["0B0", 1.0, 2.0]]}]
    runs = [replace(first, seed=seed) for seed in range(len(OTHERS) + 1)]
    answer_every_name(monkeypatch, replace(quickstart, runs=dict.fromkeys(TIERS, runs)))
    *paths, whole = [put_record(tmp_path, "quickstart", run, ranks=ranks) for run in runs]
    for path, change in zip(paths, OTHERS, strict=True):
        record = json.loads(path.read_text())
        for group, fields in change.get("config", {}).items():
            record["config"][group] |= fields
        path.write_text(json.dumps(record | {name: value for name, value in change.items() if name != "config"}))
    assert Store(tmp_path, "quickstart", "smoke").read(runs[-1].id) is not None
    return paths, whole


@pytest.mark.parametrize("verb", ["table", "status", "claims", "report"])
def test_records_of_another_kind_are_named_and_the_rest_shown(
    odd_records: tuple[list[Path], Path], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "experiment_ids", lambda: ["quickstart"])
    report_little(monkeypatch)
    odd, whole = odd_records
    where = ["--results", tmp_path, "--out", "site"] if verb == "report" else ["quickstart", "--out", tmp_path]
    answer = call(verb, *where)
    assert answer.status == 0, answer
    assert [path for path in odd if f"ignored: {path}: " not in answer.errors] == []
    assert str(whole) not in answer.errors


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2].rpartition(",")[0],
        lambda text: text[: len(text) // 2].rpartition(",")[0] + "\n",
        lambda text: "\x00\xff junk\n" * 3,
        lambda text: "\n",
        lambda text: text.rstrip("\n") + ",x,y\n",
        lambda text: text.replace("value", "worth", 1),
    ],
)
def test_a_published_file_that_is_damaged_is_named(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (published.FOLDER / "zero2019.csv").read_text()
    (tmp_path / "zero2019.csv").write_text(damage(text))
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"zero2019\.csv: .*valid: a CSV file with columns"):
        published.published("zero2019")


@pytest.mark.parametrize("name", ["math:pow", "own_schedule:none", "own_schedule:numbers", "own_schedule:texts"])
def test_a_function_that_is_no_schedule_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_schedule.py").write_text(
        "none = lambda p, m: None\nnumbers = lambda p, m: [[0]]\ntexts = lambda p, m: [[('F', 'x', 0)]]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert f"plan.schedule {name} fails with plan.pp" in refused("memory", "--plan.schedule", name)
    with pytest.raises(InputError, match=r"fails with plan\.pp"):
        build(name, 2, 2)


def test_divisors_are_all_and_many_layers_are_shared_out_at_once():
    assert all(divisors(n) == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 200))
    assert [len(part) for part in partition(4096, 2048)] == 2048 * [2]


# What is left over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), KeyError("x"), TypeError("a\nb")])
def test_a_fault_of_the_program_is_one_line_and_shown_when_asked_for(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> object:
        raise error

    monkeypatch.setattr(main.verb_table, "function_of", fail)
    answer = call("list")
    assert (answer.status, answer.errors.count("\n")) == (1, 1)
    assert answer.errors.startswith(f"error: {type(error).__name__}")
    assert re.search(r"test_bounds\.py, line \d+.*LMSCALE_TRACEBACK=1", answer.errors)
    monkeypatch.setenv(main.TRACEBACK, "1")
    with pytest.raises(type(error)):
        call("list")


@pytest.mark.parametrize(
    ("arguments", "variables", "is_closed"),
    [
        ("table ptdp2021/pipeline_schedules --tier small", {"PYTHONIOENCODING": "ascii"}, False),
        ("list", {}, True),
        ("timeline --out figure", {"MPLBACKEND": "nope"}, False),
    ],
)
def test_what_is_around_a_verb_does_not_end_it(arguments: str, variables: dict[str, str], is_closed: bool):
    command = [sys.executable, "-m", "harness", *arguments.split()]
    line = ["sh", "-c", 'exec "$@" >&-', "sh", *command] if is_closed else command
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2]), **variables}
    done = subprocess.run(line, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) != is_closed


def test_a_reader_of_a_pipe_sees_each_line_at_once(monkeypatch: pytest.MonkeyPatch):
    sent = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sent))
    main.main(["list", "quickstart"])
    before = len(sent.getvalue())
    assert before
    print("one line")  # as of a point that took a minute
    assert sent.getvalue()[before:] == b"one line\n"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as told:
        write_atomically(tmp_path / "record.json", "x")
    assert told.value.filename == str(tmp_path / "record.json")
    assert list(tmp_path.iterdir()) == []
