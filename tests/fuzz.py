"""Calls every verb with malformed options, files and records: `python -m tests.fuzz --calls 2000 --seed 1`.

Each call is a fork with its own folder and bounds on time and memory, that ends where it would start ranks. It must
end by itself, never be silent for 10 s, computing or waiting, with a status that is documented, at most one line of
error, and no file half-written. `--skip I --calls 1` with the same seed is call I again.
"""

import collections
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import tyro

from harness.cli.main import LONGEST_MESSAGE, TRACEBACK
from harness.cli.main import main as lmscale
from harness.cli.verb_table import SIZED, VERBS, function_of
from harness.experiment.loading import load
from harness.launch import turn
from harness.predict.systems import FOLDER
from harness.records.printable import CONTROL
from harness.records.store import with_digest
from harness.report import planner
from harness.report.zipped import pack, unpack
from impl.data.make_tokenizer import parse
from impl.errors import InputError
from tests.cli.test_fuzz import CODE_JUNK, changed, damaged, with_its_id
from tests.crafted import old_checkpoint
from tests.harness.made_up_records import certified, document, record_of
from tests.harness.small_runs import write_tokens

PROCESSOR_SECONDS, BYTES, FILE_BYTES = 10, 8 * 2**30, 2**28
SILENT_SECONDS, SECONDS = 10, 60
"""Longest time without a word, and until the end, less what a call has waited for a processor that others used."""
STARTED, CRASHED = 100, 101
"""Exit statuses of a fork that would start ranks, and of one that an exception has left."""
LONG = {"accuracy": 25, "claims": 3, "list": 3, "report": 15, "tune": 3, "--ghost": 5}
"""Verbs and options whose work is long, and how many times as long calls may compute and take: they show progress.

Where no folder of records is named, some read and judge all committed ones."""
UNDRAWN = ("--laws",)
"""Options that are for an hour of work, and say so."""
RECORDS, CERTIFIED = (f"{folder}/quickstart/smoke/records" for folder in ("results", "certified"))
CALLS = [
    line.split()
    for line in f"""\
list --markdown --out results
list megatron
new experiment mine
new schedule mine
new system mine
run own_experiment.py --dry-run
show PTD-P figure 12 --out results
show megatron table 3 --json
run quickstart --out results --dry-run
run quickstart --out results --on slurm --site site.toml --dry-run
run quickstart --out results --data tokens
status quickstart --out results
watch quickstart --out results
cancel quickstart --out results
run quickstart --out results --dry-run --ghost
run quickstart --out results --dry-run --sweep plan.tp=1,2 train.lr=1e-3,2e-3 seed=0,1
status quickstart --out results --sweep model.norm_placement=pre,post
run quickstart --out results --dry-run --certify
run quickstart --out certified --certify
train --out out --data.dataset tokens --train.steps 2 --certify
certify results certified
certify certified certified
certify {CERTIFIED}/RECORD {CERTIFIED}/RECORD
certify {CERTIFIED}/RECORD {RECORDS}/RECORD
table quickstart --out results --format csv
table quickstart --out results
claims quickstart --out results
claims --out results --calibration
export quickstart --results results
import archive.zip
import archive.zip --out results --json
report --results results --out site
train --out out --data.dataset tokens --train.steps 2 --plan.schedule own:rows
train --config run.toml --out out --train.steps 2
memory --config {RECORDS}/RECORD --plan.tp 2
timeline --plan.pp 2 --plan.schedule own:rows
timeline --record {RECORDS}/RECORD --out figure
memory --model gpt-2m --plan.pp 2
ghost --model gpt-0.5m --plan.pp 2 --plan.dp 2 --train.global-batch 4 --train.microbatch 1
ghost --model gpt-0.5m --plan.tp 2 --device cpu --device-memory 1GB
predict --system system.yaml --model gpt-2m
predict --system system.yaml --rows rows.csv
predict quickstart --system system.yaml
calibrate --out system.yaml
tune --model gpt-0.5m --system system.yaml --gpus 2 --global-batch 4
accuracy --json further
evaluate --checkpoint checkpoints --data tokens --texts text.txt --lambada text.jsonl
import-hf --weights checkpoints --data tokens --out imported
export-hf --checkpoint checkpoints --out exported
prepare --text text.jsonl --tokenizer bpe:300 --out prepared
prepare --text text.txt --tokenizer gpt2:encoder.json,vocab.bpe --valid text.jsonl --out prepared
bench --only parts --compare {RECORDS}/RECORD
doctor --out results --site site.toml""".splitlines()
]
VALUES = [
    *("0", "-1", "1", "2", "3", "4", "1e9", "nan", "inf", "10000000001", "999999937", "9" * 400, "x" * 5000, "", "\n"),
    *("\x1b]0;x\x07", "é", "../x", "*", "\udc80", "math:pow", "own:none", "own:rows", "None", "True", "gpt-2m", "auto"),
    *("fifo", "zero", "deep.json", "empty", "results", "tokens", "checkpoints", "rows.csv", "system.yaml", "text.txt"),
    *("text.jsonl", "own.py", "/dev/full", "/proc/self/mem", "nowhere", "quickstart", "small", "paper", "json", "bf16"),
]
JUNK = [*CODE_JUNK, *VALUES[:19], *("[" * 100_000, "x" * 140_000, "a: &a [x]\nb: *a", "2020-01-01", "=1+1", "!!bool x")]


class Started(BaseException):
    """Ranks would have been started."""


def template(folder: Path) -> None:
    """Write a valid file of every kind that a verb reads, and some that are none."""
    old_checkpoint(folder)
    shutil.rmtree(folder / "tokens")
    write_tokens(folder / "tokens")
    for name, made in ((RECORDS, document), (CERTIFIED, certified)):
        (folder / name).mkdir(parents=True)
        for run in load("quickstart").runs["smoke"][:4]:
            found = made(record_of(run)) | {"experiment": "quickstart"}
            (folder / name / f"{run.id}.json").write_text(with_digest(json.dumps(found, indent=1)))
    records = {path.relative_to(folder).as_posix(): path.read_bytes() for path in (folder / RECORDS).iterdir()}
    (folder / "archive.zip").write_bytes(pack("quickstart", records))
    parse("bpe:300").build(["some words to read " * 9]).save(folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    texts = {
        "system.yaml": (FOLDER / "h100.yaml").read_text(),
        "rows.csv": "gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp\n4,16,1,512,8,4,128,2,1,2\n",
        "site.toml": 'partition = "gpu"\nranks_per_node = 8\nsetup = ["true"]\n',
        "run.toml": 'seed = 3\n[model]\nnum_layers = 2\n[plan]\ndp = 2\n[data]\ndataset = "tokens"\n',
        "own.py": "from impl.pipeline.schedules import gpipe as rows\nnone = lambda p, m: None\n",
        "own_experiment.py": "from harness.experiment.kit import *\nEXPERIMENT = Experiment(runs=[Run()])\n",
        "text.txt": "some words to read\n = a title = \n" * 200,
        "text.jsonl": '{"text": "some words to read"}\n' * 50,
        "encoder.json": json.dumps(content["vocab"]),
        "vocab.bpe": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in content["merges"]),
        "deep.json": "[" * 100_000,
        "empty": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "zero").symlink_to("/dev/zero")


def words_of(chance: random.Random, options: dict[str, list[str]], folder: Path, only: tuple[str, ...]) -> list[str]:
    """Return a call, of one of these verbs if any, with up to three of its words changed, and further options."""
    record = min(path.name for path in (folder / RECORDS).iterdir())
    words = [
        word.replace("RECORD", record)
        for word in chance.choice([call for call in CALLS if not only or call[0] in only])
    ]
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        at = chance.randrange(len(words) + 1)
        kind = chance.random()
        if kind < 0.5:
            words += [chance.choice(options[words[0]])] if words and words[0] in options else []
            words += [chance.choice(VALUES)] * (chance.random() < 0.8)
        elif kind < 0.9 and 0 < at < len(words):
            words[at] = chance.choice(VALUES)
        else:
            words[at : at + 1] = [chance.choice(VALUES)] * (chance.random() < 0.5)
    return [word for word in words if "\0" not in word]


def damage(chance: random.Random, folder: Path) -> None:
    """Do something to one file of the folder."""
    path = chance.choice([path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()])
    kind = chance.random()
    if path.parent.name == "records" and kind < 0.8 and path.stat().st_size:
        found = with_its_id(changed(json.loads(path.read_bytes().split(b",\n", 1)[1].join((b"{\n", b""))), chance))
        path.write_text(with_digest(json.dumps(found, indent=1)))
    elif path.suffix == ".zip" and kind < 0.5:
        with contextlib.suppress(InputError):  # it was damaged before
            path.write_bytes(repacked(path.read_bytes(), chance))
    elif kind < 0.6:
        text = path.read_bytes().decode("latin-1")
        path.write_bytes(damaged(text, chance, JUNK).decode(errors="surrogateescape").encode("latin-1", "replace"))
    else:
        path.unlink()
        chance.choice([Path.mkdir, os.mkfifo, lambda at: at.symlink_to("/dev/zero"), Path.touch])(path)


def repacked(archive: bytes, chance: random.Random) -> bytes:
    """Return an archive with something done to one of its files, and checksums that agree."""
    name, inside = unpack(archive)
    with tempfile.TemporaryDirectory() as scratch:
        for path, data in inside.items():
            (Path(scratch) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / path).write_bytes(data)
        damage(chance, Path(scratch))
        left = [path for path in Path(scratch).rglob("*") if path.is_file() and not path.is_symlink()]
        return pack(name, {path.relative_to(scratch).as_posix(): path.read_bytes() for path in left})


def refuse_python(event: str, args: tuple[Any, ...]) -> None:
    """Stop a call where it would start ranks; for `sys.addaudithook`."""
    if event == "subprocess.Popen" and "python" in str(args[:2]):
        raise Started


def in_fork(words: list[str], folder: Path, logs: Path) -> None:
    """Carry out a call in this process, and end it."""
    status = CRASHED
    try:
        seconds = PROCESSOR_SECONDS * times_as_long(words)
        for kind, most in (("CPU", seconds), ("AS", BYTES), ("FSIZE", FILE_BYTES)):
            above = most + (kind == "CPU")  # at that limit it would be killed as for taking too long
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, above))
        sys.stdout, sys.stderr = (open(logs / name, "w", encoding="utf-8") for name in ("out", "err"))  # noqa: SIM115
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(stream.fileno(), number)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.addaudithook(refuse_python)
        status = lmscale(words)
    except Started:
        status = STARTED
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            print(end="", flush=True)
            print(end="", flush=True, file=sys.stderr)
        os._exit(status)


def call(words: list[str], folder: Path, logs: Path) -> tuple[int, str, str]:
    """Carry out a call in a fork, which is killed if it hangs; returns its exit status, output and errors."""
    began, heard, size = time.monotonic(), 0.0, 0
    for name in ("out", "err"):
        (logs / name).write_bytes(b"")
    child = os.fork()
    if child == 0:
        in_fork(words, folder, logs)
    longest = SECONDS * times_as_long(words)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        seconds = time.monotonic() - began - seconds_in_queue(child)
        written = sum((logs / name).stat().st_size for name in ("out", "err"))
        if written != size:
            heard, size = seconds, written
        if seconds - heard > SILENT_SECONDS or seconds > longest:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    output, errors = ((logs / name).read_text("utf-8", "backslashreplace") for name in ("out", "err"))
    return os.waitstatus_to_exitcode(ended[1]), output, errors


def times_as_long(words: list[str]) -> int:
    """Return how many times as long as most calls this one may take."""
    named = {*words[:1], *(word for word in words if word.startswith("--"))}
    return max(LONG.get(name, 1) for name in {"", *named})


def seconds_in_queue(process: int) -> float:
    """Return for how long a process has been ready to run, and others have run."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9


def problems(status: int, output: str, errors: str, before: set[str], after: set[str]) -> list[str]:
    """Return what is wrong with the way in which a call ended, from the files that were and are there, too."""
    if status == STARTED:
        return []
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    both = re.sub(r"[\n\t]", "", output + errors)
    found = {
        f"silent for {SILENT_SECONDS} s, or no end": -status == signal.SIGKILL,
        "too long for the processor": -status == signal.SIGXCPU,
        f"ended by {status}": -status not in (-2, -1, 0, signal.SIGKILL, signal.SIGXCPU),
        "traceback": "Traceback" in both,
        "internal error": TRACEBACK in both,
        "not one error": len(told) > 1 or (status == 2 and not told) or (status == 0 and bool(told)),
        "a long line": any(len(line) > LONGEST_MESSAGE + 100 for line in told),
        "control characters": bool(CONTROL.search(both)),
        "half-written": any(name.endswith(".part") for name in after),
        "refused, and wrote": status == 2 and after != before,
    }
    return [what for what, is_so in found.items() if is_so]


def files(folder: Path) -> set[str]:
    """Return the names of all files below a folder but of compiled modules."""
    return {str(path) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def main(calls: int = 2000, seed: int = 1, skip: int = 0, only: tuple[str, ...] = ()) -> int:
    """Return 0 if every call ended as it should.

    Args:
        calls: How many.
        seed: Of all choices.
        skip: Number of the first call.
        only: Verbs to call; all where none is named.
    """
    os.environ |= {"PATH": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    options = {name: options_of(name) for name in only or VERBS}
    ends, faults = collections.Counter[int](), collections.Counter[str]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        whole, folder, logs = (Path(scratch) / name for name in ("whole", "call", "logs"))
        whole.mkdir()
        logs.mkdir()
        template(whole)
        os.environ |= {"LMSCALE_CACHE": str(Path(scratch) / "cache"), turn.FOLDER: scratch}  # waits for no other run
        for number in range(skip, skip + calls):
            chance = random.Random(f"{seed}:{number}")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder, symlinks=True)
            os.mkfifo(folder / "fifo")
            for _ in range(chance.choice((0, 1, 1, 2))):
                damage(chance, folder)
            words, before = words_of(chance, options, folder, only), files(folder)
            if words[:1] == ["report"]:  # else each would take half a minute for tables that are always the same
                planner.embedded(whole / "results")
            status, output, errors = call(words, folder, logs)
            found = problems(status, output, errors, before, files(folder))
            ends[status] += 1
            faults.update(found)
            if found:
                shown = " ".join(word if len(word) < 80 else f"{word[:20]}[...]" for word in map(repr, words))
                print(f"seed {seed}, call {number}: {', '.join(found)}: {shown}\n  {errors[-600:]!r}", flush=True)
            elif number % 100 == 99:
                print(f"{number + 1} calls", flush=True)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    print(f"{calls} calls from {skip}, seed {seed}; exit statuses ({STARTED}: would start ranks): {statuses}")
    print("faults: " + (", ".join(f"{count} {what}" for what, count in faults.items()) or "none"))
    return int(bool(faults))


def options_of(verb: str) -> list[str]:
    """Return the options of a verb, after importing it."""
    function_of(verb)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        lmscale([verb, "--help"])
    found = {*re.findall(r"--[a-z][\w.-]*", shown.getvalue()), *["--model", "--config"] * (verb in SIZED)}
    return sorted(found.difference(UNDRAWN))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
