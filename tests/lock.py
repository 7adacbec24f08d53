"""Writes the locks, with the SHA-256 of every file that pip may install: `make lock`, or `python -m tests.lock`.

Versions stay as they are unless --upgrade names packages. What PyTorch's CUDA wheels need besides is left out: PyTorch
pins it by version, and CPU wheels, as those of a local folder (`pip config get global.find-links`), do without.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from tests.documents import ROOT

LOCKS = {
    "requirements-core.lock": (),
    "requirements.lock": ("dev", "notebooks", "eval", "hf"),
    "requirements-browser.lock": ("browser",),
}
"""Files with the extras that they lock; the second one is what results are measured with."""
HEAD = "# Exact versions that the results were measured with, and hashes of their files: {}.\n"
OF_CUDA = re.compile(r"^(nvidia-|cuda-|triton==).*\\\n(?: .*\n)*", re.MULTILINE)
TORCH = re.compile(r"^torch==.*\\\n((?: .*\n)*)", re.MULTILINE)
PINNED = re.compile(r"^[\w.\-\[\]]+==[^\s;\\]+", re.MULTILINE)


def main(*, upgrade: tuple[str, ...] = (), wheels: Path | None = None) -> None:
    """Write the locks.

    Args:
        upgrade: Packages that may change; all others keep their version.
        wheels: Folder of PyTorch's CPU wheels, if there is one, for requirements-cpu.lock.
    """
    kept = [line for name in LOCKS if (ROOT / name).exists() for line in PINNED.findall((ROOT / name).read_text())]
    names = [line.partition("==")[0] for line in dict.fromkeys(kept)]  # several versions, if by Python's version
    kept = [line for line in kept if (name := line.partition("==")[0]) not in upgrade and names.count(name) == 1]
    for name, extras in LOCKS.items():
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text("\n".join(kept))
            command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
            command += [
                "--generate-hashes",
                "--no-header",
                "--no-annotate",
                f"--constraint={constraints}",
                "pyproject.toml",
            ]
            command += [f"--extra={extra}" for extra in extras]
            text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        text = TORCH.sub(lambda it: f"torch=={it[0].partition('==')[2].partition('+')[0].split()[0]} \\\n{it[1]}", text)
        (ROOT / name).write_text(HEAD.format(", ".join(extras) or "what lmscale needs") + OF_CUDA.sub("", text))
        print(f"{name}: {len(PINNED.findall(text))} packages")
    [version] = re.findall(r"^torch==([\d.]+)", (ROOT / "requirements-core.lock").read_text(), re.MULTILINE)
    if wheels is not None and any(wheels.glob(f"torch-{version}+cpu-*.whl")):
        (ROOT / "requirements-cpu.lock").write_text(HEAD.format("PyTorch's CPU wheels") + of_cpu(version, wheels))


def of_cpu(version: str, wheels: Path) -> str:
    """The lock of PyTorch's CPU wheels in a folder; pip would take a file of PyPI before one that lies there."""
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(wheels.glob(f"torch-{version}+cpu-*.whl"))
    ]
    lines = [f"torch=={version}+cpu", *(f"    --hash=sha256:{digest}" for digest in digests)]
    return " \\\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    tyro.cli(main)
