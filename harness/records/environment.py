"""Environment of a measurement: code version, packages, processor, device and network."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from harness.records import privacy
from harness.records.privacy import CODE
from harness.records.store import write_atomically

if TYPE_CHECKING:
    import torch

    from harness.records.parts import Git

DRIVERS = "/proc/driver/nvidia/version", "/sys/module/amdgpu/version"
"""Files with the versions of NVIDIA's and AMD's kernel modules."""
PACKAGES = ("torch", "deepspeed", "numpy", "pandas", "submitit", "tokenizers", "pydantic")


def host_environment(command: list[str]) -> dict[str, Any]:
    """Return code version, packages, processor and relevant variables of the machine that starts a sweep."""
    lock = CODE / "requirements.lock"
    return {
        "command": privacy.command(command),
        "git": git_state(CODE),
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "host": host(),
        "os": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "network": network(),
        "variables": privacy.variables(os.environ),
    }


def device_environment(device: "torch.device") -> dict[str, Any]:
    """Return device, communication backend, and the versions of the software that drives them."""
    import torch
    from torch.cuda import nccl

    from impl.device import Device

    if hardware := Device.of(device).hardware():
        built = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        extra = built | {"driver": _driver(), "nccl": ".".join(map(str, nccl.version()))}
    else:
        extra = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return {
        "device": device.type,
        "device_name": hardware.name if hardware else processor(),
        "backend": Device.of(device).backend,
        "torch_threads": torch.get_num_threads(),
        **extra,
    }


def numerics(device: "torch.device") -> dict[str, str | int | None]:
    """Return what may decide the bits that a rank computes: its host, device, libraries, threads and variables."""
    import torch

    built = torch.__config__.show()
    version = lambda pattern: found[1] if (found := re.search(pattern, built)) else None
    variables = privacy.variables(os.environ)
    return {
        "host": host(),
        "processor": processor(),
        **device_environment(device),
        "torch": torch.__version__,
        "blas": version(r"BLAS_INFO=(\w+)"),
        "mkl": version(r"Math Kernel Library Version (\S+)"),
        "onednn": version(r"MKL-DNN (\S+)"),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **{name: value for name, value in variables.items() if not name.startswith("SLURM_")},
    }


def host() -> str:
    """Return a short hash of the machine's name, which distinguishes machines without naming them."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def network() -> dict[str, str]:
    """Return the interfaces that are up, with their speed where known, and InfiniBand ports with their rate."""
    up = {name: stats for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"}
    speeds = {name: f"{stats.speed} Mb/s" if stats.speed else "speed unknown" for name, stats in up.items()}
    rates = {path: path.read_text().strip() for path in Path("/sys/class/infiniband").glob("*/ports/*/rate")}
    return speeds | {f"{path.parts[4]} port {path.parts[6]}": rate for path, rate in rates.items()}


def processor() -> str:
    """Return the processor's name as reported by the operating system."""
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    """Return the GPU driver's version from its kernel module; None if there is none."""
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            return (found := re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", Path(path).read_text())) and found[0]
    return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether files differ from it, with the difference's hash; None outside a checkout."""
    if not (folder / ".git").exists():  # an installed package may lie inside an unrelated repository
        return None
    try:
        changes = _changes(folder)
        return {
            "commit": _git(folder, "rev-parse", "HEAD").strip(),
            "dirty": bool(changes),
            "diff_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        }
    except (OSError, subprocess.SubprocessError):
        return None


def commits(git: "Git", form: str = "{}") -> str:
    """Return the commits of the code that trained a run, in the order of the steps: `A and from step 20 B`."""
    name = lambda one: (form.format(one.commit[:12]) if one.commit else "unknown") + " with changes" * one.dirty
    return " and ".join(f"from step {one.step} " * (one.step > 0) + name(one) for one in (*git.before, git))


def keep_changes(folder: Path, environment: dict[str, Any]) -> None:
    """Write the uncommitted changes of the measuring code to a file named by their hash; untracked files by name only.

    Nothing is written if there are no changes, or if the code changed after the environment was recorded.
    """
    stamped = (environment.get("git") or {}).get("diff_sha256")
    path = folder / f"{stamped}.diff"
    if stamped and not path.exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            changes = _changes(CODE)
            if hashlib.sha256(changes.encode()).hexdigest() == stamped:
                write_atomically(path, changes)


def _changes(folder: Path) -> str:
    """Return the names of files that differ from the commit, results excluded, and the diff; empty if none differ."""
    code = ("--", ".", ":(exclude)results")
    names = _git(folder, "status", "--porcelain", *code)
    return names + _git(folder, "diff", "HEAD", *code) if names.strip() else ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=10).stdout


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
