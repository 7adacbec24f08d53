"""Malformed experiments, site files and records: one clear line and exit 2, never a traceback."""

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import experiments
from harness.experiment.experiment import TIERS, points
from harness.experiment.loading import load
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import Document
from harness.report import results
from impl.errors import InputError
from impl.run import from_dict
from tests.harness.calls import refused, stop_before_training
from tests.harness.made_up_records import document, record

EXPERIMENTS, RECORDS = 700, 460
TOGETHER = 12
"""Records in one table."""
ROOT = Path(__file__).parents[2]


def one_line(error: InputError) -> None:
    """Check that bad input is told in one line of a useful length."""
    text = str(error)
    assert len(text.splitlines()) == 1, text
    assert 10 < len(text) < 2000, text
    assert "Traceback" not in text


def damaged(text: str, chance: random.Random, junk: list[str]) -> bytes:
    """A text with one to three things done to it that editors, disks and people do."""
    for _ in range(chance.randint(1, 3)):
        text = once(text, chance, junk)
    raw = text.encode()
    return raw + b"\xff\xfe" if chance.random() < 0.02 else raw


def once(text: str, chance: random.Random, junk: list[str]) -> str:
    """A text with one thing done to it."""
    lines, place, other = text.split("\n"), chance.randrange(len(text) + 1), chance.choice(junk)
    at = chance.randrange(len(lines))
    before, line, behind = lines[:at], lines[at], lines[at + 1 :]
    name, indent = line.partition("=")[0], line[: len(line) - len(line.lstrip())]
    done: list[Callable[[], str]] = [
        lambda: "\n".join(before + behind),
        lambda: "\n".join([*before, line, line, *behind]),
        lambda: text[:place],
        lambda: text[:place] + other + text[place:],
        lambda: text[:place] + text[place + chance.randint(1, 9) :],
        lambda: "\n".join([*before, f"{indent}{other}", line, *behind]),
        lambda: "\n".join([*before, f"{name}= {other}", *behind]),
        lambda: "\n".join([*before, f"{name}= {other},", *behind]),
    ]
    return chance.choice(done)()


# All verbs -----------------------------------------------------------------------------------------------------------


def test_a_few_calls_of_the_fuzz_that_is_a_command_end_well() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--calls", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


HUNG = """
import pathlib, sys, time
from tests import fuzz

CALLS = {
    "waits": lambda: time.sleep(60),
    "computes": lambda: sum(iter(int, 1)),
    "talks without end": lambda: [print(time.sleep(0.05), flush=True) for _ in range(1000)],
    "is slow and talks": lambda: [print(time.sleep(0.2), flush=True) for _ in range(4)],
}
fuzz.SILENT_SECONDS, fuzz.SECONDS = 0.6, 2
fuzz.lmscale = lambda words: (CALLS[words[0]](), 0)[1]
for name in CALLS:
    print(f"{name}:", *fuzz.problems(*fuzz.call([name], pathlib.Path(), pathlib.Path(sys.argv[1])), set(), set()))
"""


def test_the_fuzz_finds_calls_that_hang(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUNG, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    hangs = "silent for 0.6 s, or no end"
    assert done.stdout.splitlines() == [
        f"waits: {hangs}",
        f"computes: {hangs}",
        f"talks without end: {hangs}",
        "is slow and talks:",
    ]


# Experiments --------------------------------------------------------------------------------------------------------

EXPERIMENT = '''"""Does a larger batch reach a lower loss?

The global batch varies.
"""

from harness.experiment.claims import Claim
from harness.experiment.experiment import Experiment
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run


def batches(steps, dp=1):
    return [
        Run(plan=Plan(dp=dp), train=Recipe(steps=steps, global_batch=batch, microbatch=4))
        for batch in (8, 16, 32)
    ]


EXPERIMENT = Experiment(
    source="our own",
    expectation="loss falls",
    cost={"smoke": "1 min", "small": "10 min", "paper": "10 min, 2 GPUs"},
    runs={
        "smoke": batches(steps=100),
        "small": batches(steps=400, dp=2),
        "paper": batches(steps=2000),
    },
    claims=(Claim(text="it falls", source="our own", check=lambda rows: None),),
    table=None,
    profiles=False,
    deviations="",
)
'''
CODE_JUNK = [
    "None", "5", "-1", "'x'", "[]", "{}", "()", "object()", "lambda: 0", "1 / 0", "nowhere", "float('nan')", "[None]",
    "{'smoke': 5}", "Run", "Run()", "[Run()] * 2", "10 ** 400", "'../../x'", "raise ValueError('no\\nluck')", "exit()",
    "__import__('sys').exit(3)", "import nowhere", "from impl import nowhere", "def f(): return f()", "eval('(' * 999)",
    "'\\ud800'", "b'x'", "...", "\x00", "\t", "(", "}", "\"\"\"", "\\", "é = 1", "await x", "yield", "class X: pass",
    "{'smoke': [], 'small': [], 'paper': []}", "{'smoke': [1], 'small': [Run()], 'paper': None}", "Plan(dp=0)",
    "Recipe(steps=-1)", "ModelConfig(hidden_size=7)", "Plan(dp=True)", "(lambda f: f(f))(lambda f: f(f))", "{1: 2}",
    "type('R', (), {'__getattr__': lambda s, n: 1 / 0})()", "assert False, 'an\\nassertion'", "raise SystemExit(2)",
]  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which files are experiments, beside those that are there."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(folder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in [name for name in sys.modules if name.startswith("experiments.fuzzed")]:
        del sys.modules[name]


def looked_at(name: str) -> None:
    """What `list`, `status` and `run` first do with an experiment."""
    found = load(name)
    assert found.question
    for tier in TIERS:
        assert isinstance(found.cost[tier], str)
        for point in points(found.runs[tier]) if found.runs[tier] else ():
            assert point.label
    results.all_tables([], found.claims, table=found.table)


def test_a_malformed_experiment_is_told_in_a_line_that_names_it(mine: Path) -> None:
    chance, told = random.Random(1), 0
    (mine / "fuzzed.py").write_text(EXPERIMENT)
    looked_at("fuzzed")
    for i in range(EXPERIMENTS):
        path = mine / f"fuzzed{i}.py"
        path.write_bytes(damaged(EXPERIMENT, chance, CODE_JUNK))
        try:
            looked_at(path.stem)
        except InputError as error:
            one_line(error)
            told += 1
            if told % 60 == 0:
                assert "Traceback" not in refused("status", path.stem)
        finally:
            path.unlink()
    assert told > EXPERIMENTS // 2


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "has no experiment"),
        ("x = (", "SyntaxError"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("raise SystemExit(0)", "SystemExit"),
        (EXPERIMENT.replace('source="our own"', "source=5", 1), "source"),
        (EXPERIMENT.replace('"small": batches(steps=400, dp=2),', ""), "small"),
        (EXPERIMENT.replace("batches(steps=100)", "[1]"), "smoke"),
        (EXPERIMENT.replace("table=None", "table=5"), "table"),
        (
            EXPERIMENT.replace("batches(steps=100)", "[Run(plan=Plan(dp=0))]"),
            "dp: Input should be greater than 0 (got 0)",
        ),
    ],
)
def test_what_is_wrong_with_an_experiment_is_named(mine: Path, source: str, told: str) -> None:
    (mine / "fuzzed.py").write_text(source)
    assert told in refused("status", "fuzzed")
    assert "fuzzed" in refused("run", "fuzzed")


def test_a_package_of_experiments_that_is_broken_does_not_hide_the_others(mine: Path) -> None:
    (mine / "fuzzed").mkdir()
    (mine / "fuzzed" / "__init__.py").write_text("1 / 0")
    assert load("quickstart").id == "quickstart"


# Site files ---------------------------------------------------------------------------------------------------------


def test_a_site_file_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before_training(monkeypatch)
    site = tmp_path / "site.toml"
    site.write_text("partitoin = 'gpu'")
    for verb in ("run quickstart", "doctor"):
        message = refused(*verb.split(), "--site", site)
        assert "site.toml" in message
        assert "did you mean partition?" in message
    assert list(tmp_path.iterdir()) == [site]


# Records ------------------------------------------------------------------------------------------------------------

VALUES = [
    None, True, False, 0, 1, -1, 3, 10**30, -(10**400), 0.0, -0.5, 1e300, 1e-300, "", "x", "ok", "nan", "../../x", "\n",
    "cpu", [], [0], [None], [[]], [["0F0", 0, 1]], {}, {"a": 1}, {"tp": {"all_reduce": {}}}, "\ud800", "é",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document can be changed."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(whole: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A record with one or two values that are something else, or nothing; the deeper ones are as likely as others."""
    found = copy.deepcopy(whole)
    for _ in range(chance.randint(1, 2)):
        by_length: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for path in places(found):
            by_length.setdefault(path[:1] + ("",) * (len(path) > 1), []).append(path)
        *path, last = chance.choice(chance.choice(list(by_length.values())))
        at = found
        for key in path:
            at = at[key]
        if chance.random() < 0.2:
            del at[last]
        else:
            at[last] = copy.deepcopy(chance.choice(VALUES))  # the next change may be inside of it
    return found


def whole_records() -> list[Document]:
    """Of several kinds, each of few steps."""
    kinds = [{}, {"plan__dp": 2}, {"plan__pp": 2, "train__microbatch": 4}, {"status": "failed", "reason": "no luck"}]
    common: dict[str, Any] = {"train__steps": 6, "train__global_batch": 16}
    return [document(record(**common, seed=i, **kind)) for i, kind in enumerate(kinds)]


def with_its_id(found: Document) -> Document:
    """The record with the id of its configuration, if that is one."""
    try:
        return found | {"id": from_dict(found["config"]).id}
    except (KeyError, ValueError):
        return found


def test_a_malformed_record_is_ignored_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, kinds = random.Random(3), whole_records()
    whole = of_document(kinds[0])
    accepted: list[Record] = []
    for _ in range(RECORDS):
        found = with_its_id(changed(chance.choice(kinds), chance))
        try:
            accepted.append(of_document(found))
        except ValueError as error:
            why = str(error)
            assert len(why.splitlines()) == 1
            assert 5 < len(why) < 400, why
    assert RECORDS // 10 < len(accepted) < RECORDS * 9 // 10
    accepted = [one for one in accepted if one.experiment == "made_up" and one.tier == "smoke"]
    for at in range(0, len(accepted), TOGETHER):
        try:
            results.all_tables([whole, *accepted[at : at + TOGETHER]], ())
        except InputError as error:
            one_line(error)
