"""The installed package without its checkout: published numbers and systems are in it, and verbs work anywhere."""

import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.experiment.published import papers
from tests.documents import ROOT

BUILT_FROM = ("impl", "harness", "experiments", "pyproject.toml", "README.md", "LICENSE")


def done(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lmscale` in an environment of its own, which has the dependencies of this one and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in BUILT_FROM:  # a copy, since a build leaves files behind
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = done([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"], folder)
    assert build.returncode == 0, build.stderr
    shutil.rmtree(folder / "source")
    [wheel] = folder.glob("*.whl")
    new = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", new], check=True)
    [packages] = (new / "lib").glob("python*/site-packages")
    # a path alone: the .pth files there, such as the one of the editable checkout, are not read
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    into = [*pip, "--python", new / "bin" / "python", "install", "--no-deps", "--no-index", "--ignore-installed", wheel]
    installed = done(into, folder)
    assert installed.returncode == 0, installed.stderr
    return new / "bin" / "lmscale"


@pytest.fixture
def lmscale(program: Path, tmp_path: Path) -> Callable[..., str]:
    """Standard output of a command in an empty folder, which has to end well."""

    def run(*words: str) -> str:
        found = done([program, *words], tmp_path)
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_the_code_is_the_installed_one(program: Path, tmp_path: Path) -> None:
    found = done([program.with_name("python"), "-c", "import harness, impl; print(harness.__file__)"], tmp_path)
    assert found.stdout.startswith(str(program.parents[1])), found


def test_experiments_and_claims_are_shown(lmscale: Callable[..., str]) -> None:
    assert "ptdp2021/interleaving" in lmscale("list")
    assert "not run here" in lmscale("claims", "ptdp2021")


def test_an_experiment_is_predicted_beside_published_numbers_and_its_tables_made(
    lmscale: Callable[..., str], tmp_path: Path
) -> None:
    assert "10 of 10 points finished" in lmscale("predict", "interleaving", "--system", "selene")
    table = lmscale("table", "interleaving")
    assert "published" in table
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_a_sweep_is_planned(lmscale: Callable[..., str], tmp_path: Path) -> None:
    assert "5 of 5 points would be run" in lmscale("run", "quickstart", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_every_paper_has_its_numbers_in_the_package(program: Path) -> None:
    [folder] = program.parents[1].glob("lib/python*/site-packages/harness/experiment/published")
    assert sorted(path.stem for path in folder.glob("*.csv")) == papers()
    assert {path.name for path in (ROOT / "harness/experiment/published/steps").iterdir()} == {
        path.name for path in (folder / "steps").iterdir()
    }


def test_every_locked_version_may_be_installed_with_the_oldest_python() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    there = [one.metadata for one in distributions() if canonicalize_name(one.name) in locked]
    assert len(there) > 150
    wanted = {one["Name"]: one["Requires-Python"] for one in there if "Requires-Python" in one}
    assert not [name for name, pythons in wanted.items() if "3.11.0" not in SpecifierSet(pythons)]
