"""The package as a wheel, installed in an environment of its own without the checkout."""

import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT

BUILT_FROM = ("impl", "harness", "experiments", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def done(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Return what a command did in a folder, with an environment that has nothing of this one."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def install(folder: Path) -> Path:
    """Build the wheel, and return the program `lmscale` of an environment that has the dependencies of this one."""
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
