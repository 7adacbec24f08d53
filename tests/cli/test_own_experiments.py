"""Experiments of one's own: any file, or files in the folder `experiments` of the working directory."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from harness.cli import api
from harness.experiment.loading import experiment_ids, load
from harness.records.store import Store
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.own_code import hashes
from tests.harness.calls import call, refused
from tests.harness.made_up_records import changed, document, record_of

FILE = '''"""Does a wider model learn faster?"""
from harness.experiment.kit import Experiment, Run, named

RUNS = [Run(model=named(size)) for size in ("gpt-0.5m", "gpt-2m")]
EXPERIMENT = Experiment(runs=RUNS)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, of a working directory that is not the checkout."""
    package = importlib.import_module("experiments")
    monkeypatch.setattr(package, "__path__", list(package.__path__))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "experiments"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "__init__.py").touch()
    return folder


@pytest.mark.parametrize("name", ["wider_in_a_test", "mine/wider_in_a_test"])
def test_they_are_found_beside_the_packaged_ones(own: Path, name: str) -> None:
    before = experiment_ids()
    (own / f"{name}.py").write_text(FILE)
    answer = call("run", "wider_in_a_test", "--dry-run")
    assert (answer.status, "2 of 2 points would be run" in answer.output) == (0, True), answer
    assert sorted(experiment_ids()) == sorted([*before, name])


@pytest.mark.usefixtures("own")
def test_python_finds_them_by_name_as_verbs_do() -> None:
    Path("experiments/found_in_python.py").write_text(FILE)
    with pytest.raises(InputError, match="found_in_python: has no records"):
        api.load("found_in_python")
    with pytest.raises(InputError, match="--only 'none' matches no point; points: layers=2"):
        api.run("found_in_python", only="none")


def test_a_package_of_a_packaged_name_has_the_files_of_both(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = importlib.import_module("experiments.zero2019")
    monkeypatch.setattr(packaged, "__path__", list(packaged.__path__))
    (own / "zero2019").mkdir()
    (own / "zero2019" / "__init__.py").touch()
    (own / "zero2019" / "wider_in_a_test.py").write_text(FILE)
    answer = call("list", "wider_in_a_test")
    assert (answer.status, "zero2019/wider_in_a_test" in answer.output) == (0, True), answer
    assert load("zero2019/zero_memory").id == "zero2019/zero_memory"


def test_a_folder_of_that_name_does_not_hide_the_packaged_ones(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.py").write_text(FILE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [Path(sys.executable).with_name("lmscale"), "list"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert f"{len(experiment_ids()) + 1} experiments, with their points" in done.stdout, done.stderr


def test_a_file_in_the_folder_may_be_named_by_its_path_and_is_exported(own: Path, tmp_path: Path) -> None:
    placed = FILE.replace("named(size)", 'replace(named(size), norm_placement="own_in_a_test.py:twice")')
    (own / "placed_in_a_test.py").write_text(placed.replace("RUNS", "from dataclasses import replace\nRUNS", 1))
    norms = "from impl.model.norm_placement import NormPlacement\ntwice = NormPlacement(final=True)\n"
    Path("own_in_a_test.py").write_text(norms)
    answer = call("run", "experiments/placed_in_a_test.py", "--dry-run")
    assert (answer.status, "2 of 2 points would be run" in answer.output) == (0, True), answer
    for run in load("placed_in_a_test").runs["smoke"]:
        Store(tmp_path / "runs", "placed_in_a_test", "smoke").write(
            document(changed(record_of(run, tier="smoke"), experiment="placed_in_a_test"))
        )
    assert call("export", "placed_in_a_test", "--out", "one.zip").status == 0
    with ZipFile("one.zip") as archive:
        inside = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert inside["experiments/placed_in_a_test.py"].decode().startswith(FILE.partition("\n")[0])
    assert inside.get("own_in_a_test.py", b"").decode() == norms, sorted(inside)


def test_runs_of_another_text_in_the_same_folder_are_not_mixed(own: Path, tmp_path: Path) -> None:
    texts = FILE.replace("named(size)", 'named(size), data=DataConfig(dataset="tokens")')
    (own / "texts_in_a_test.py").write_text(texts.replace("Experiment,", "DataConfig, Experiment,"))
    prepare = ("prepare", "--tokenizer", "byte", "--out", "tokens", "--text")
    for name in ("one", "other"):
        Path(f"{name}.txt").write_text(f"{name} text, again and again; " * 400)
    assert "in place of" not in call(*prepare, "one.txt").output
    first = TokenFolder.open(Path("tokens")).sha256
    for run in load("texts_in_a_test").runs["smoke"]:
        made = document(changed(record_of(run, tier="smoke"), experiment="texts_in_a_test"))
        made["resolved"]["data"]["sha256"] = first
        Store(tmp_path / "runs", "texts_in_a_test", "smoke").write(made)
    assert call("run", "texts_in_a_test", "--dry-run").status == 0
    assert f"in place of dataset {first[:12]}" in call(*prepare, "other.txt").output
    now = TokenFolder.open(Path("tokens")).sha256
    for options in ((), ("--dry-run",)):
        assert f"tokens is dataset {now[:12]}, but runs/texts" in refused("run", "texts_in_a_test", *options)
    assert call("run", "texts_in_a_test", "--dry-run", "--out", "others").status == 0
    (run, *_) = load("texts_in_a_test").runs["smoke"]
    made = document(changed(record_of(run, tier="small"), experiment="train"))
    made["resolved"]["data"]["sha256"] = first
    Store(tmp_path / "trained", "train", "small").write(made)
    Path("run.json").write_text(json.dumps(made))
    assert "tokens is dataset" in refused("train", "--config", "run.json", "--out", "trained"), "and not the old record"
    Store(tmp_path / "mine", "mine", "smoke").write(made | {"experiment": "mine", "tier": "smoke"})
    with pytest.raises(InputError, match="tokens is dataset"):
        api.run(run, out="mine")


NORMS = "from impl.model.norm_placement import NormPlacement\n"
PLACED = '''"""Does a placement of my own train?"""
from harness.experiment.kit import Experiment, Recipe, Run, named
from dataclasses import replace

model = replace(named("gpt-0.5m"), num_layers=1, norm_placement="own_norms_in_a_test.py:mine")
EXPERIMENT = Experiment(runs=[Run(model=model, train=Recipe(steps=1))])
'''


def test_code_of_ones_own_that_has_changed_is_not_mixed(own: Path, tmp_path: Path) -> None:
    (own / "edited_in_a_test.py").write_text(PLACED)
    path = Path("own_norms_in_a_test.py")
    path.write_text(NORMS + "mine = NormPlacement(final=True)\n")
    assert call("run", "edited_in_a_test", "--dry-run").status == 0
    (run,) = load("edited_in_a_test").runs["smoke"]
    made = document(changed(record_of(run, tier="smoke"), experiment="edited_in_a_test"))
    made["environment"]["own_code"] = hashes(run)
    Store(tmp_path / "runs", "edited_in_a_test", "smoke").write(made)
    assert call("run", "edited_in_a_test", "--dry-run").status == 0
    path.write_text(NORMS + "mine = NormPlacement(final=True, embedding=True)\n")
    for options in ((), ("--dry-run",)):
        assert "own_norms_in_a_test.py:mine is code " in refused("run", "edited_in_a_test", *options)
    assert call("run", "edited_in_a_test", "--dry-run", "--out", "others").status == 0


def test_claims_say_when_none_is_judged_by_ones_own_records(own: Path, tmp_path: Path) -> None:
    name = "ptdp2021/interleaving"
    run = load(name).runs["smoke"][0]
    Store(tmp_path / "runs", name, "smoke").write(document(changed(record_of(run, tier="smoke"), experiment=name)))
    said = call("claims", name).output
    assert f"{name}: none of these is of your own records; `--tier smoke` judges by them" in " ".join(said.split())
    assert "none of these" not in call("claims", name, "--tier", "smoke").output


def test_one_that_has_the_name_of_a_packaged_one_is_refused(own: Path) -> None:
    (own / "quickstart.py").write_text(FILE)
    assert "experiments/quickstart.py is a packaged experiment, too; valid: a name of its own" in refused("list")


def test_a_broken_one_is_named_with_its_line_and_does_not_keep_others_from_running(own: Path) -> None:
    (own / "broken_in_a_test.py").write_text('"""Why?"""\nx = [')
    assert "experiments/broken_in_a_test.py, line 2: SyntaxError" in refused("run", "broken_in_a_test", "--dry-run")
    assert call("run", "quickstart", "--dry-run").status == 0


def test_a_file_needs_nothing_but_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare_in_a_test.py").write_text(FILE.partition("\n")[2])
    found = load("bare_in_a_test.py")
    assert (found.id, found.question, found.about) == ("bare_in_a_test", "bare_in_a_test", "")
    assert found.runs["smoke"] == found.runs["paper"]
    assert len(found.runs["smoke"]) == 2
    assert "0 of 2 points finished" in call("status", "bare_in_a_test").output


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("nowhere", None, "nowhere.py is no file; valid: a file of Python with EXPERIMENT = Experiment(runs=[...])"),
        ("a-b", FILE, "a-b.py: 'a-b' cannot be an id"),
        ("quickstart", FILE, "quickstart.py: 'quickstart' is the id of another experiment"),
        ("empty_in_a_test", "", "empty_in_a_test.py: has no experiment"),
        ("wrong_in_a_test", "x = 1\n1 / 0", "wrong_in_a_test.py, line 2: ZeroDivisionError"),
        (
            "none_in_a_test",
            "from harness.experiment.kit import *\nEXPERIMENT = Experiment(runs=[])",
            "none_in_a_test.py, line 2: Experiment.runs {'paper': [], 'small': [], 'smoke': []}: must be a list of at "
            "least one Run for each of smoke, small, paper",
        ),
        (
            "one_without_in_a_test",
            "from harness.experiment.kit import *\n"
            "EXPERIMENT = Experiment(runs={'smoke': [Run()], 'small': [], 'paper': 3})",
            "line 2: Experiment.runs {'paper': 3, 'small': [], 'smoke': [Run(",
        ),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_in_a_line(
    name: str, text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(f"{name}.py").write_text(text)
    assert told in refused("run", f"{name}.py", "--dry-run")
