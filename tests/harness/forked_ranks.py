"""Attempts whose processes have PyTorch imported from the start: forked from a server, each as its command would be.

For tests of what training leaves; others hold how its processes are started.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank import local
from tests.ranks import CONTEXT, TIMEOUT_SECONDS


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Make attempts on this machine start so."""
    patch.setattr(local, "subprocess", SimpleNamespace(Popen=_launched, DEVNULL=subprocess.DEVNULL))


def _launched(command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> Any:
    known, become = CONTEXT.Pipe(duplex=False)
    launcher = CONTEXT.Process(target=_launch, args=(command, stdout.name, env, become))
    launcher.start()
    assert known.poll(TIMEOUT_SECONDS)
    return launcher


def _launch(command: list[str], log: str, environment: dict[str, str], become: Any) -> None:
    """Be the launcher, whose supervisors fork their ranks."""
    from harness.rank import supervisor

    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    _become(command, environment, (os.open(os.devnull, os.O_RDONLY), file, file))
    become.send(True)  # the sweep may look for its arguments now
    forking = SimpleNamespace(Popen=_Forked, TimeoutExpired=subprocess.TimeoutExpired)
    pytest.MonkeyPatch().setattr(supervisor, "subprocess", forking)
    local.main(Path(command[3]), command[4:])


class _Forked(subprocess.Popen[bytes]):
    """A child process that is a rank already, and imports nothing."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_: Any,
    ) -> None:  # fmt: skip
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        try:
            preexec_fn()
            os.chdir(cwd)
            _become(args, env, (p2cread, c2pwrite, errwrite))
            sys.argv = args[2:]
            runpy.run_module(args[2], run_name="__main__")
        finally:
            os._exit(1)  # a worker ends by itself


def _become(command: list[str], environment: dict[str, str], files: tuple[int, int, int]) -> None:
    """Take a command's environment, its files, and its arguments as `ps` shows them."""
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[45:47])
    words = " ".join(command).encode() + b"\0"
    assert len(words) < end - begin
    with open("/proc/self/mem", "r+b", buffering=0) as memory:  # where Linux reads them
        memory.seek(begin)
        memory.write(words.ljust(end - begin, b" "))
