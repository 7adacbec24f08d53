"""A Slurm of two nodes on this machine, for as long as tests need it."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct")
PACKAGES = "munge slurm-wlm slurmdbd mariadb-server-core mariadb-client-core"


def why_not() -> str | None:
    """Return why no Slurm can be started here; None if one can."""
    if os.geteuid():
        return "starting a Slurm needs root"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {PACKAGES}"
    if subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True).returncode:
        return "nodes need host names of their own, and unshare is not permitted here"
    return None


class TwoNodes:
    """Nodes node1 and node2 of 4 processors each; partitions main, short (jobs of a minute) and urgent (preempts)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *daemon: str) -> None:
        """Start all of it, or one daemon that was killed."""
        subprocess.run([HERE / "start.sh", self.folder, *daemon], check=True)

    def stop(self) -> None:
        subprocess.run([HERE / "stop.sh", self.folder], check=True)

    def kill(self, daemon: str) -> None:
        os.kill(int((self.folder / "run" / f"{daemon}.pid").read_text()), signal.SIGKILL)

    def save(self, job: str) -> None:
        """Make the controller save a job's state, without which a killed one forgets the job and reuses its number."""
        begin = time.time()
        self.ask("scontrol", "update", f"jobid={job}", "comment=saved")
        while (self.folder / "state" / "job_state").stat().st_mtime < begin:
            time.sleep(0.1)

    def ask(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Start a cluster that Slurm's commands reach meanwhile; skip the test where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: it holds sockets
    folder.chmod(0o755)
    cluster = TwoNodes(folder)
    try:
        cluster.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "etc" / "slurm.conf"))
            yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
