"""What an installed package offers by entry points, and code of one's own in files: executed where it is named."""

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import report
from harness.experiment.loading import experiment_ids, load
from harness.records.store import Store
from impl import own_code
from impl.run import from_dict
from tests.harness.calls import call, refused, report_little
from tests.harness.made_up_records import document, record

PACKAGE = "lab_in_a_test"
FILES = {
    "__init__.py": "",
    "widths.py": '"""Does a wider model learn faster?"""\nfrom harness.experiment.kit import Experiment, Run, named\n'
    'EXPERIMENT = Experiment(runs=[Run(model=named(size)) for size in ("gpt-0.5m", "gpt-2m")])\n',
    "parts.py": "open('imported', 'w').close()\nfrom impl.model.norm_placement import BlockNorms, NormPlacement\n"
    "from impl.pipeline.schedules import gpipe as all_forward\n"
    "sums = NormPlacement(attention=BlockNorms(sum=True), mlp=BlockNorms(inner=True), final=True)\nnumber = 3\n",
}
ENTRY_POINTS = f"""
[lmscale.experiments]
lab/widths = {PACKAGE}.widths
quickstart = {PACKAGE}.widths
../up = {PACKAGE}.widths
[lmscale.schedules]
lab_forward = {PACKAGE}.parts:all_forward
[lmscale.placements]
lab_sums = {PACKAGE}.parts:sums
lab_number = {PACKAGE}.parts:number
[lmscale.systems]
lab_machine = {PACKAGE}:machine.yaml
lab_nowhere = nowhere_in_a_test:machine.yaml
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and a package that is installed next to it."""
    installed, here = tmp_path / "site-packages", tmp_path / "here"
    (installed / PACKAGE).mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    for name, text in FILES.items():
        (installed / PACKAGE / name).write_text(text)
    assert call("new", "system", "machine").status == 0
    Path("machine.yaml").rename(installed / PACKAGE / "machine.yaml")
    about = installed / f"{PACKAGE}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(installed)
    for name in (PACKAGE, *(f"{PACKAGE}.{Path(file).stem}" for file in FILES)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(own_code, "_trusted", set())
    own_code.offered.cache_clear()


def test_its_experiments_are_listed_and_run_and_packaged_names_stay() -> None:
    assert {"lab/widths", "quickstart"} < set(experiment_ids())
    assert "../up" not in experiment_ids()
    assert load("quickstart").question != load("widths").question == "Does a wider model learn faster?"
    assert "lab/widths" in call("list", "wider model learn").output
    answer = call("run", "lab/widths", "--dry-run")
    assert (answer.status, "2 of 2 points would be run" in answer.output) == (0, True), answer


def test_its_schedules_placements_and_systems_are_named_like_packaged_ones() -> None:
    assert call("timeline", "--plan.pp", "2", "--plan.schedule", "lab_forward").status == 0
    for words in (["--model.norm-placement", "lab_sums"], ["--model.norm_placement=lab_sums"]):
        answer = call("predict", "--system", "lab_machine", "--model", "gpt-2m", *words)
        assert answer.status == 0, answer.errors
    sweep = "--sweep", "model.norm_placement=pre,lab_sums", "--only", "layers=2 norm=lab_sums dp=2 batch=16"
    answer = call("run", "quickstart", *sweep, "--dry-run", "--ghost")
    assert (answer.status, "norm=lab_sums" in answer.output) == (0, True), answer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("timeline --plan.schedule lab_foward", "does not exist; did you mean lab_forward? valid: gpipe"),
        ("memory --model.norm-placement lab_sum", "'lab_sum' is not a norm placement; did you mean lab_sums?"),
        ("memory --model.norm-placement lab_number", "cannot be loaded: it is of type int; valid: a NormPlacement"),
        ("memory --model.norm-placement no.py:x", "model.norm_placement 'no.py:x' cannot be loaded: [Errno 2]"),
        ("predict --system lab_machin", "system 'lab_machin' does not exist; did you mean lab_machine?"),
        ("predict --system lab_nowhere", "'lab_nowhere' of nowhere_in_a_test:machine.yaml: No module named"),
        ("run width --dry-run", "'width' is not an experiment; did you mean lab/widths?"),
        (
            "memory --model.norm-placement lab_sums --model.parallel-residual",
            "norm_placement lab_sums has a norm of the sum after each block; valid: placements without",
        ),
        ("memory --model.norm-placement lab_sums --model.experts 2", "lab_sums has a norm within MLPs, which is not"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_line_with_the_nearest(words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_a_placement_in_a_file_is_written_and_used() -> None:
    assert "--model.norm-placement own_norms.py:own_norms" in call("new", "placement", "own_norms").output
    name = "./own_norms.py:own_norms"
    answer = call("memory", "--model", "gpt-0.5m", "--model.norm-placement", name, "--plan.tp", "2", "--plan.pp", "2")
    assert answer.status == 0, answer.errors


def test_code_that_only_data_names_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_little(monkeypatch)
    monkeypatch.setattr(report, "experiment_ids", lambda: ["quickstart"])
    store, names = Store(tmp_path / "results", "quickstart", "smoke"), dict[str, str]()
    for name in ("lab_sums", f"{PACKAGE}.parts:sums"):
        full: dict[str, Any] = document(record())
        full["config"]["model"]["norm_placement"] = name
        full["id"] = from_dict(full["config"]).id
        store.write(full | {"experiment": "quickstart"})
        names[full["id"]] = name
    for words in (["table", "quickstart", "--out"], ["claims", "quickstart", "--out"], ["report", "--results"]):
        answer = call(*words, tmp_path / "results")
        assert answer.status == 0, answer
    told = " ".join(call("table", "quickstart", "--out", tmp_path / "results").output.split())
    assert "with code that only their record names: " in told
    for run, name in names.items():
        named = refused("train", "--config", store.path(run))
        assert f"model.norm_placement {name!r} is code; valid: the option --model.norm-placement besides" in named
        assert f"{run} ({name})" in told
    assert not Path("imported").exists()


def test_a_word_of_another_option_trusts_nothing() -> None:
    own_code.trust_words(["run", "--only", "schedule=a:b", "--plan.tp=2", "c:d", "--plan.schedule", "e:f", "g:h"])
    own_code.trust_words(["--sweep", "plan.schedule=i:j,k:l", "m:n", "--model.norm-placement=o:p"])
    assert [name for name in ["a:b", "c:d", "e:f", "g:h", "i:j", "k:l", "m:n", "o:p"] if own_code.is_trusted(name)] == [
        "e:f", "i:j", "k:l", "o:p"
    ]  # fmt: skip
