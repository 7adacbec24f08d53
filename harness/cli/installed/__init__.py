"""The package `lmscale` of an installation, which has impl, harness and experiments in it: only this name is global.

They import each other by the names that they have in the tree, so this folder becomes the first in which Python looks.
In an editable installation they are found without it.

`lmscale.run(what)` trains, `lmscale.load(folder).frame()` reads: `harness.cli.api` documents both.
"""

import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PUBLIC = ("run", "load", "frame", "Records")

if (HERE / "harness").is_dir() and str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))


def __getattr__(name: str) -> Any:
    """Import what is public as it is asked for: the command line starts faster without."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'lmscale' has no attribute {name!r}; valid: {', '.join(PUBLIC)}")
    from harness.cli import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*PUBLIC, "main"]


def main() -> int:
    """Run the verb that the command line names; Ctrl-C while Python imports or ends prints no traceback."""
    _end_on_signals()
    from harness.cli.main import main

    try:
        return main()
    finally:
        _end_on_signals()


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.SIG_DFL)
