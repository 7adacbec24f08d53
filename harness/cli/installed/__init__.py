"""The package `lmscale` of an installation, which has impl, harness and experiments in it: only this name is global.

They import each other by the names that they have in the tree, so this folder becomes the first in which Python looks.
In an editable installation they are found without it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if (HERE / "harness").is_dir() and str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))


def main() -> int:
    """Run the verb that the command line names."""
    from harness.cli.main import main

    return main()
