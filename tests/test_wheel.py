"""The installed package without its checkout: published numbers and systems are in it, and verbs work anywhere."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.experiment.published import papers
from tests.documents import ROOT
from tests.installed import done, install


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lmscale` in an environment of its own."""
    return install(tmp_path_factory.mktemp("wheel"))


def test_only_one_name_is_global(program: Path, tmp_path: Path) -> None:
    [packages] = (program.parents[1] / "lib").glob("python*/site-packages")
    assert sorted(path.suffix or path.name for path in packages.iterdir()) == [".dist-info", ".pth", "lmscale"]
    found = done([program.with_name("python"), "-m", "lmscale", "list", "nanotron"], tmp_path)
    assert (found.returncode, "nanotron2025/llama" in found.stdout) == (0, True), found
    lost = done([program.with_name("python"), "-c", "import harness"], tmp_path)
    assert "No module named 'harness'" in lost.stderr


VERBS = """
import sys
import lmscale
from harness.cli.main import main
sys.exit(any(main(words.split()) for words in sys.argv[1:]))
"""


def test_an_experiment_is_predicted_and_shown_beside_published_numbers(program: Path, tmp_path: Path) -> None:
    predicted = done([program, "predict", "interleaving", "--system", "selene"], tmp_path)
    assert (predicted.returncode, "10 of 10 points finished" in predicted.stdout) == (0, True), predicted
    verbs = "run quickstart --dry-run", "claims ptdp2021", "table interleaving"
    shown = done([program.with_name("python"), "-c", VERBS, *verbs], tmp_path)
    assert shown.returncode == 0, shown
    _, _, after = shown.stdout.partition("5 of 5 points would be run")
    assert "not run here" in after
    assert "published" in after
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


SITE = """
import lmscale, harness, impl, experiments
from pathlib import Path
print(harness.__file__)
from harness.cli.manual import write_manual
from harness.report.site import build
source = Path("source").resolve()
source.mkdir()
sections = write_manual(source)
(source / "index.md").write_text("# Mine")
build(source, Path("site").resolve(), sections, {})
"""


def test_a_site_is_built_with_verbs_and_api_by_the_installed_code(program: Path, tmp_path: Path) -> None:
    found = done([program.with_name("python"), "-c", SITE], tmp_path)
    assert (found.returncode, found.stderr) == (0, ""), found
    [place] = found.stdout.splitlines()
    assert place.startswith(str(program.parents[1]))
    assert "lmscale report" in (tmp_path / "site/reference/verbs.html").read_text()
    assert {"index.html", "tables.js", "site.css"} < {path.name for path in (tmp_path / "site").iterdir()}


def test_every_paper_has_its_numbers_in_the_package(program: Path) -> None:
    [folder] = program.parents[1].glob("lib/python*/site-packages/lmscale/harness/experiment/published")
    assert sorted(path.stem for path in folder.glob("*.csv")) == papers()
    assert {path.name for path in (ROOT / "harness/experiment/published/steps").iterdir()} == {
        path.name for path in (folder / "steps").iterdir()
    }


def test_every_locked_version_may_be_installed_with_the_oldest_python() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    every = [canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line]
    locked = {name for name in every if every.count(name) == 1}  # others have a version for each Python
    there = [one.metadata for one in distributions() if canonicalize_name(one.name) in locked]
    assert len(there) > 150
    wanted = {one["Name"]: one["Requires-Python"] for one in there if "Requires-Python" in one}
    assert not [name for name, pythons in wanted.items() if "3.11.0" not in SpecifierSet(pythons)]
