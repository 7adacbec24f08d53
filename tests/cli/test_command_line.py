"""The command line as a user sees it who does not get everything right: one line for what is wrong, nothing written."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.cli import main, verb_table
from harness.experiment.loading import load
from tests.harness.calls import Started, call, put_record, refused, the_error

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
    *("list", "new", "show", "run", "status", "watch", "cancel", "table", "report"),
    *("train", "timeline", "memory", "prepare", "doctor"),
)
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
FOUR_LAYERS = "train --model.num-layers 4 --train.microbatch 1 --plan.pp 2 --plan.schedule"


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", ("no verb", *VERBS)),
        ("nonsense", ("'nonsense' is no verb; valid: ", *VERBS)),
        ("clams", ("'clams' is no verb; did you mean claims?", *VERBS)),
        ("--json", ("--json", *VERBS)),
        ("run", ("experiment",)),
        ("run nosuch", ("'nosuch'", "quickstart", "ours/data_parallel_scaling", "megatron2019/layernorm_placement")),
        ("run quikstart", ("did you mean quickstart",)),
        ("run quickstart --tier huge", ("huge", "smoke", "small", "paper")),
        ("run quickstart --on moon", ("moon", "local", "slurm")),
        ("table quickstart --format html", ("html", "md", "csv", "tex", "json", "parquet")),
        ("run quickstart --frobnicate", ("--frobnicate",)),
        ("run quickstart --tiers smoke", ("--tiers", "did you mean --tier?")),
        ("run quickstart extra", ("extra",)),
        ("run quickstart --only nothing-like-it", ("nothing-like-it", "points:", "norm=post", "dp=2")),
        ("run quickstart --jobs 0", ("--jobs 0",)),
        ("run quickstart --jobs two", ("--jobs", "'two'")),
        ("run quickstart --jobs", ("--jobs",)),
        ("run quickstart --time-limit nan", ("--time-limit nan",)),
        ("run quickstart --ranks-per-node 0", ("--ranks-per-node 0",)),
        ("run quickstart --data no/where", ("no token folder no/where", "lmscale prepare")),
        ("run quickstart --model gpt-2m", ("--model",)),
        ("table quickstart", ("no records", "lmscale run quickstart")),
        ("claims --out nope", ("nope: no such folder",)),
        ("show PTD-P figure 12 --out nope", ("nope: no such folder",)),
        ("export interleaving --out /proc/x.zip", ("--out: /proc cannot be written",)),
        ("calibrate --out /proc/x.yaml", ("--out: /proc cannot be written",)),
        ("timeline --out /proc/x", ("/proc/x.png: ",)),
        ("train --model.hiden-size 8", ("--model.hiden-size", "did you mean --model.hidden-size?")),
        ("train --model.hidden-size many", ("--model.hidden-size", "'many'")),
        ("train --model.hidden-size 30 --model.num-heads 4", ("model: num_heads 4", "hidden_size 30", "1, 2, 3, 5")),
        ("train --model.norm-placement middle", ("model.norm_placement", "middle", "pre", "post", "sandwich")),
        ("train --model.family lstm", ("lstm", "gpt", "bert")),
        ("train --model.vocab-size 1", ("model.vocab_size", "2")),
        ("train --model gpt-9t", ("gpt-9t", "nearest", "gpt-2m")),
        ("train --model", ("--model", "value")),
        ("train --train.global-batch 7", ("train.global_batch 7", "train.microbatch 8", "valid microbatches: 1, 7")),
        ("train --plan.dp 3", ("train.global_batch 16", "plan.dp 3", "must divide 16")),
        ("train --plan.tp 3", ("plan.tp 3", "model.num_heads 2", "valid degrees: 1, 2")),
        (
            "train --model.hidden-size 96 --model.num-heads 12 --model.kv-heads 4 --plan.tp 6",
            ("plan.tp 6 does not divide model.kv_heads 4 into whole heads, or equal parts of one", "degrees: 1, 2, 4"),
        ),
        ("train --model gpt-25m --plan.tp 16", ("plan.tp 16", "model.num_heads 8", "valid degrees: 1, 2, 4, 8")),
        (
            "train --model gpt-25m --model.seq-len 132 --plan.tp 8 --plan.sequence-parallel",
            ("plan.tp 8", "model.seq_len 132", "plan.sequence_parallel", "valid degrees: 1, 2, 4"),
        ),
        ("train --plan.dp 2 --plan.zero-stage 1 --plan.zero-group 3", ("zero_group 3", "plan.dp 2", "valid: 1, 2")),
        ("train --plan.dp 2 --plan.zero-group 2", ("zero_group 2", "zero_stage 0", "valid with stages 1, 2 and 3")),
        ("run quickstart --plan.tp 0", ("plan.tp", "greater than 0")),
        ("run quickstart --plan.pt 2", ("--plan.pt",)),
        ("run quickstart --plan.tp 2 --only dp=8", ("dp=8", "points:")),
        ("table quickstart --plan.tp 2", ("--plan.tp",)),
        ("train --model.num-layers 4 --plan.pp 8", ("plan.pp x plan.chunks 8", "model.num_layers 4", "1 to 4")),
        (f"{FOUR_LAYERS} interleaved --plan.chunks 4", ("plan.pp x plan.chunks 8", "model.num_layers 4", "1 to 4")),
        (f"{FOUR_LAYERS} interleaved --train.global-batch 3", ("plan.pp 2 microbatches, not 3", "valid: 2 or 4")),
        (f"{FOUR_LAYERS} one_f_one_b --plan.chunks 2", ("one_f_one_b has 1 chunk", "plan.chunks 2", "interleaved")),
        ("train --plan.pp 2 --plan.chunks 0", ("plan.chunks", "greater than 0")),
        (f"{FOUR_LAYERS} nosuch", ("plan.schedule 'nosuch'", *SCHEDULES, "module:name")),
        (f"{FOUR_LAYERS} no.where:rows", ("plan.schedule 'no.where:rows'", "cannot be loaded")),
        ("timeline --plan.chunks 2", ("one_f_one_b has 1 chunk", "plan.chunks 2", "interleaved")),
        ("timeline --plan.schedule interleaved --microbatches 6", ("plan.pp 4 microbatches, not 6", "valid: 4 or 8")),
        ("timeline --microbatches 0", ("microbatches 0", "valid: 1 or more")),
        ("timeline --microbatches many", ("--microbatches", "'many'")),
        ("timeline --forward 0", ("--forward 0", "more than 0")),
        ("timeline --input-gradient nan", ("--input-gradient nan", "more than 0")),
        ("timeline --weight-gradient inf", ("--weight-gradient inf", "1e-09 to 1e+09")),
        ("timeline --forward 1e-320", ("--forward", "1e-09 to 1e+09")),
        ("timeline --transfer -1", ("--transfer -1", "negative")),
        ("timeline --transfer inf", ("--transfer inf", "0 to 1e+09")),
        ("timeline --record no/where.json", ("no/where.json", "valid: a file of a folder `records`")),
        ("timeline --record .", (".", "valid: a file of a folder `records`")),
        ("timeline --out .", ("--out .", ".png")),
        ("timeline --tier smoke", ("--tier",)),
        ("train --train.lr nan", ("train.lr", "finite", "nan")),
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
        ("train --plan.dp 100000 --train.global-batch 100000 --train.microbatch 1", ("100,000 ranks: ", "GiB")),
        ("train --data.dataset no/where", ("no token folder no/where",)),
        ("run quickstart --detach", ("--detach: only jobs of a scheduler",)),
        ("run quickstart --retries -1", ("--retries -1: must be 0 or more",)),
        ("run quickstart --retries one", ("'one'",)),
        ("run quickstart --retry some", ("'some'",)),
        ("run quickstart --hang-seconds 0", ("--hang-seconds 0",)),
        ("run quickstart --hang-seconds nan", ("--hang-seconds nan",)),
        ("run quickstart --site no.toml", ("no.toml",)),
        ("run quickstart --on slurm --partition a;b", ("--partition",)),
        ("train --retries -1", ("--retries -1",)),
        ("train --site no.toml", ("no.toml",)),
        ("watch nosuch", ("'nosuch'",)),
        ("cancel nosuch", ("'nosuch'",)),
        ("cancel quickstart --only nothing-like-it", ("nothing-like-it",)),
        ("cancel quickstart --tier huge", ("huge",)),
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
        assert out in refused(*verb.split(), "--out", out)
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
        (b"some words here", "--text TEXT --tokenizer words", "byte, amino, gpt2:VOCAB,MERGES"),
        (b"some words here", "--text TEXT --tokenizer bpe:many", "bpe:VOCAB_SIZE"),
        (b"some words here", "--text TEXT --tokenizer bpe:3", "257"),
        (b"some words here", "--text TEXT --tokenizer gpt2:a,b", "no file a"),
        (b"some words here", "--text TEXT --tokenizer byte --valid no.txt", "no.txt"),
        (b"some words here", "--text TEXT --tokenizer byte --valid-fraction nan", "nan"),
        (b"some words here", "--text TEXT --tokenizer byte --valid-fraction 2", "2"),
        (b"some words here", "--text TEXT --tokenizer byte --out TEXT", "is a file"),
        (b"some words here", "--text TEXT --tokenizer byte --out TEXT/below", "below: Not a directory"),
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


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ([sys.executable, "-m", "harness"], "run nosuch"),
        ([str(Path(sys.executable).parent / "lmscale")], "train --model.hidden-size 7"),
    ],
)
def test_the_programs_say_the_same(program: list[str], arguments: str, tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, *arguments.split()], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert the_error(done.stderr) == refused(*arguments.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", [[sys.executable, "-m", "harness"], [str(Path(sys.executable).parent / "lmscale")]])
def test_a_module_of_the_working_directory_is_found(program: list[str], tmp_path: Path):
    (tmp_path / "my_schedules.py").write_text("from impl.pipeline.schedules import one_f_one_b as mine\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*program, "timeline", "--plan.pp", "2", "--plan.schedule", "my_schedules:mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "r1 |" in done.stdout


@pytest.mark.parametrize("verb", ["list", "memory --model gpt-2m"])
def test_a_reader_that_leaves_is_no_failure(verb: str):
    program = f"{sys.executable} -m harness {verb} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_may_leave_while_another_error_is_answered(monkeypatch: pytest.MonkeyPatch):
    def answer(*_: object) -> None:
        try:
            raise KeyError
        except KeyError:
            raise BrokenPipeError from None

    monkeypatch.setattr(main, "parse", answer)
    assert main.main(["list"]) == 0


@pytest.mark.parametrize("name", verb_table.VERBS)
def test_help_opens_with_an_example_that_is_valid(name: str, monkeypatch: pytest.MonkeyPatch):
    example = verb_table.VERBS[name].example
    answer = call(name, "--help")
    assert (answer.status, answer.errors) == (0, "")
    assert "usage" in answer.output.lower()
    opening = " ".join(answer.output.partition("Example: ")[2].split())
    assert opening.startswith(f"`lmscale {example}` ")
    if name in ("predict", "memory"):  # which only look: the run exists, too
        assert call(*example.split()).status == 0
    function_of = verb_table.function_of
    idle = lambda *of: functools.wraps(function_of(*of))(lambda *_, **__: 0)
    monkeypatch.setattr(verb_table, "function_of", idle)
    assert call(*example.split()).status == 0


def test_help_of_run_says_what_is_left_as_it_is_and_names_no_none():
    text = " ".join(call("run", "--help").output.replace("│", " ").split())
    assert "--plan.tp INT Tensor-parallel degree: ranks that share the matrices of every layer. (default: each" in text
    assert "--tier {smoke,small,paper} Scale; " in text
    assert "None}|STR" not in text
    assert "('smoke', 'small', 'paper')" in refused("run", "quickstart", "--tier", "None")
    assert "--plan.zero-group {None}|INT" in text, "of a plan None is a value"


def test_the_version_is_printed():
    assert call("--version").output == f"lmscale {version('lmscale')}\n"


def test_the_list_of_verbs_says_how_the_text_of_each_begins():
    for name, verb in verb_table.VERBS.items():
        text = verb_table.function_of(name).__doc__ or ""
        assert " ".join(text.split()).startswith(verb.summary)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["clams"]])
def test_what_runs_nothing_loads_nothing_large(arguments: list[str]):
    program = (
        "import sys; from harness.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "harness.cli.main" in loaded
    assert ("usage: " in done.stdout.lower()) == ("--help" in arguments)
    assert done.returncode == 0 or "--help" not in arguments
    assert not loaded & {"torch", "pandas", "numpy", "matplotlib", "scipy", "submitit"}


@pytest.mark.parametrize("when", ["sys.meta_path.insert(0, Interrupt)", "atexit.register(interrupt)"])
def test_ctrl_c_while_python_imports_or_ends_prints_no_traceback(when: str):
    program = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a test in the background ignores
        "interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "class Interrupt: find_spec = lambda name, *_: interrupt() if name == 'tyro' else None\n"
        f"from harness.cli.installed import main; {when}; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "no-verb"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert "Traceback" not in done.stderr


# Anything at all ----------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *VERBS, "quickstart", "layernorm_placement", "megatron2019/layernorm_placement", "smoke", "paper", "md",
        "json", "--tier", "--json", "--no-json", "--out", "--only", "--jobs", "--format", "--data", "--on", "--model",
        "--text", "--tokenizer", "--model.num-heads", "--train.lr", "--plan.dp", "--plan.sequence-parallel", "--seed",
        "--plan.pp", "--plan.schedule", "--plan.chunks", "zb_h1", "interleaved", "--microbatches", "--forward",
        "--record",
        "--compile", "--evaluation.texts", "--time-limit", "--valid-fraction", "--", "-", "-h", "--help", "=", "",
        "0", "-1", "1e9", "nan", "text.txt", "slurm", "local", "byte", "bpe:300", "gpt-2m", "gpt2:a,b", "None",
        "--json=1", "--tier=smoke", "../x", "*", "[", "--detach", "--dry-run", "--retries", "--retry", "--site", "all",
        "--partition", "--account", "--hang-seconds", "--ranks", "--ranks-per-node", "--wait", "--device", "cuda",
        "--checkpoint-every", "--keep-checkpoints", "2", "inf", "1e400", "9" * 400, "x" * 5000, "\n", "\r", "\x1b[31m",
        "cpu", "é", "\ud800", "/dev/null", "/dev/full", "/proc/self/mem", "nowhere.toml", "$(id)", "; id", "--only=",
    ]
)  # fmt: skip
garbage = st.text(st.characters(exclude_characters="\0"), max_size=8)
commands = st.lists(WORDS | garbage, max_size=6) | st.builds(
    lambda verb, rest: [verb, *rest], st.sampled_from(VERBS), st.lists(WORDS | garbage, max_size=5)
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    monkeypatch.setattr("harness.doctor.doctor._with_ranks", lambda *_: [])
    (tmp_path / "text.txt").write_text("some words to be read " * 20)
    try:
        answer = call(*arguments)
    except Started:
        return
    nothing_runs = "nothing was written" in answer.output or arguments[:1] == ["doctor"]
    assert answer.status in (0, 2) or nothing_runs, answer
    if answer.status == 2:
        the_error(answer.errors)
        assert answer.output == ""
    else:
        assert "error" not in answer.errors
