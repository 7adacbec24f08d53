"""What the documents say is so: links, commands, targets, versions, examples, and EXPERIMENTS.md as a whole."""

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import pre_tokenizers

from harness import cli, verbs
from harness.document import anchor, experiments_markdown
from harness.experiment import TIERS, Experiment, experiment_ids, load, points
from harness.store import Store
from impl.data.tokenizer import END_OF_TEXT
from impl.model.norm_placement import PLACEMENTS, NormPlacement
from impl.pipeline.schedule import Schedule
from impl.pipeline.schedules import check
from impl.pipeline.simulate import simulate, uniform
from impl.run import Run
from tests.harness.made_up_records import record

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "EXPERIMENTS.md", "notebooks/README.md")
HARNESS = re.compile(r"^(?:\$ )?(?:python -m harness|lmscale) (.*)$", re.MULTILINE)


def fences(text: str, language: str = "") -> Iterator[str]:
    """The contents of the fenced blocks with this language."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if found[1] == language:
            yield found[2]


COMMANDS = [shlex.split(line, comments=True) for block in fences(README) for line in HARNESS.findall(block)]


@pytest.fixture
def idle_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's verbs with their options, doing nothing."""

    def idle(verb: Callable[..., int]) -> Callable[..., int]:
        return functools.wraps(verb)(lambda *_, **__: 0)

    table_of = verbs.table_of
    monkeypatch.setattr(verbs, "table_of", lambda default: {n: idle(v) for n, v in table_of(default).items()})
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def commands(*words: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[0] in words]


def run(arguments: list[str], folder: Path) -> str:
    """Standard output of a command of its own in a folder, which has to end well."""
    command = [sys.executable, "-m", "harness", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_experiments_markdown_is_what_the_registry_and_the_records_say() -> None:
    expected = experiments_markdown(ROOT / "results")
    assert (ROOT / "EXPERIMENTS.md").read_text() == expected, "python -m harness list --markdown > EXPERIMENTS.md"


@pytest.mark.parametrize("name", experiment_ids())
def test_every_experiment_says_what_it_is_and_has_all_tiers(name: str) -> None:
    experiment = load(name)
    assert experiment.question.endswith("?")
    assert experiment.source
    assert experiment.expectation
    for tier in TIERS:
        assert experiment.cost[tier]
        assert points(experiment.runs[tier])
        assert [run.why_invalid() for run in experiment.runs[tier] if run.why_invalid()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    assert links or name.startswith("notebooks")
    for link in links:
        path, _, fragment = link.partition("#")
        assert not link.startswith("http"), f"{link}: documents work offline"
        assert not path or (document.parent / path).exists(), link
        assert not fragment or fragment in anchors, link


def test_files_that_the_readme_names_exist() -> None:
    named_files = re.findall(r"`((?:impl|harness|experiments|results|notebooks)/[a-z0-9_/.]*)`", README)
    assert len(named_files) > 10
    assert [f for f in named_files if not (ROOT / f).exists()] == ["experiments/ours/batch_size.py"]  # the reader's


def test_every_verb_has_an_example() -> None:
    assert {command[0] for command in COMMANDS} == set(verbs.table_of(Run()))


@pytest.mark.usefixtures("idle_verbs")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_have_these_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 0, capsys.readouterr().err
    assert cli.main([*command, "--not-an-option", "1"]) == 2


@pytest.mark.parametrize("command", commands("run", "status", "table"), ids=" ".join)
def test_experiments_and_points_that_are_named_exist(command: list[str]) -> None:
    experiment, tier = load(command[1]), option(command, "--tier") or "smoke"
    assert points(experiment.runs[tier], option(command, "--only"))  # pyright: ignore[reportArgumentType]


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


@pytest.mark.parametrize("command", [*commands("list", "status"), ["table", "--help"]], ids=" ".join)
def test_commands_that_only_look_end_well(command: list[str], tmp_path: Path) -> None:
    assert run(command, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", commands("table"), ids=" ".join)
def test_tables_are_made_of_records(command: list[str], tmp_path: Path) -> None:
    Store(tmp_path / "results", "quickstart", "smoke").write(record() | {"experiment": "quickstart"})
    assert "tokens/s" in run(command, tmp_path)


@pytest.mark.parametrize("command", [c for c in commands("prepare") if "hf:NAME" not in c], ids=" ".join)
def test_text_is_prepared(command: list[str], tmp_path: Path) -> None:
    write_text(tmp_path)
    assert "vocabulary" in run(command, tmp_path)
    assert (tmp_path / "data").is_dir()


def write_text(folder: Path) -> None:
    """The files that the README's commands read, each small."""
    text = "the cat sat on the mat and looked at the rain; " * 200
    (folder / "corpus.txt").write_text(text)
    (folder / "held_out.txt").write_text(text[:2000])
    (folder / "corpus.jsonl").write_text('{"text": "one document"}\n' * 50)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "on", "ne", END_OF_TEXT]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\no n\nn e\n")


def test_a_few_steps_are_trained(tmp_path: Path) -> None:
    [command] = [c for c in commands("train") if "--train.steps" in c]
    assert int(option(command, "--train.steps") or 0) <= 20
    assert "Throughput" in run(command, tmp_path)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))
    assert {"quickstart", "test", "bench", "lint"} <= used
    assert used <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


def test_the_citation_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_experiment_in_the_readme_is_complete() -> None:
    _, placement, source = fences(README, "python")
    assert isinstance(eval(f"{{{placement}}}", {"NormPlacement": NormPlacement})["output"], NormPlacement)
    assert "output" not in PLACEMENTS
    module = ModuleType("batch_size")
    exec(compile(source, "README.md", "exec"), vars(module))
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert module.__doc__
    assert module.__doc__.splitlines()[0].endswith("?")
    for tier in TIERS:
        assert [p.label for p in points(experiment.runs[tier])] == [f"batch={b}" for b in (8, 16, 32)]
        assert not [run.why_invalid() for run in experiment.runs[tier] if run.why_invalid()]


def test_the_schedule_in_the_readme_is_drawn_as_shown_and_runs(tmp_path: Path) -> None:
    source, *_ = fences(README, "python")
    (tmp_path / "my_schedules.py").write_text(source)
    drawn = {" ".join(command): run(command, tmp_path) for command in commands("timeline")}
    assert any("my_schedules:in_groups" in command for command in drawn)
    shown = [block for block in fences(README) if block.startswith("zb_h1")]
    assert shown == [text for command, text in drawn.items() if "zb_h1" in command]
    own = vars(ModuleType("my_schedules"))
    exec(compile(source, "README.md", "exec"), own)
    schedule = Schedule("in_groups", tuple(map(tuple, own["in_groups"](2, 8))))
    check(schedule, 2, 8)
    assert simulate(schedule, uniform()).bubble == Fraction(1, 2)  # (p - 1) / p: that of each group
    assert {path.name for path in tmp_path.iterdir()} >= {"interleaved.png", "interleaved.svg"}


def test_the_ablation_in_the_readme_is_where_it_says() -> None:
    [line] = re.findall(r"`(NORMS = \(.*?\))`", README)
    source = (ROOT / "experiments/megatron2019/layernorm_placement.py").read_text()
    assert line in source
    for value in re.findall(r"`(for lr in \(.*?\))`", README):
        assert value in source
