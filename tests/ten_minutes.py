"""A new user's first ten minutes, with the wheel alone, in an empty folder: `python -m tests.ten_minutes --keep FILE`.

The transcript has every command with its time, and what it printed, long output without its middle.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from harness.records.store import write_atomically
from tests.documents import ROOT
from tests.installed import install

LINES, WIDTH = 24, 150
"""Most lines of a command's output that are shown, and their most characters."""
ROWS = "lmscale.load('runs').frame()[['experiment', 'model', 'norm_placement', 'tokens_per_second']]"
TEXT = "python3 -c 'from pydoc_data.topics import topics; print(*topics.values(), sep=chr(10))' > mine.txt"
COMMANDS = f"""\
# what is there, and does it run here?
lmscale list megatron
lmscale show PTD-P figure 12
lmscale run quickstart
lmscale claims quickstart
# a text of one's own: here what Python says of itself
{TEXT}
lmscale prepare --text mine.txt --tokenizer bpe:1000 --out tokens
# an experiment of one's own, on that text: three sizes, two places of the norms
lmscale new experiment places
lmscale run places.py --data tokens
lmscale claims places.py
lmscale table places.py --format pdf
python3 -c "import lmscale; print({ROWS})"
# a schedule of one's own
lmscale new schedule waves
lmscale timeline --plan.pp 4 --plan.schedule waves:waves
lmscale train --model gpt-0.5m --plan.pp 2 --plan.schedule waves:waves --train.microbatch 2 --train.steps 20
# a machine of one's own
lmscale new system cluster
lmscale predict --system cluster.yaml --model gpt-2.5b --plan.tp 2
# results of another machine
lmscale import {{archive}}
# all of it as pages
lmscale report --out site
ls"""


def shown(output: str) -> str:
    """Return output without the middle of what is long."""
    lines = [line[:WIDTH].rstrip() for line in output.splitlines()]
    left_out = len(lines) - LINES
    if left_out > 1:
        lines[LINES // 2 : -LINES // 2] = [f"[... {left_out} lines ...]"]
    return "".join(f"{line}\n" for line in lines)


def main(keep: Path | None = None) -> int:
    """Return 0 if all commands end well.

    Args:
        keep: The file that the transcript is written to.
    """
    status, text = 0, ""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        program = install(Path(scratch))
        archive, folder = Path(scratch) / "interleaving.zip", Path(scratch) / "empty"
        folder.mkdir()
        exported = [sys.executable, "-m", "harness", "export", "interleaving", "--results", "results", "--out", archive]
        subprocess.run(exported, cwd=ROOT, check=True, capture_output=True)
        search = os.pathsep.join([str(program.parent), *filter(None, [os.environ.get("PATH")])])
        # with a turn of its own: what else trains on this machine is not waited for
        environment = {"PATH": search, "HOME": scratch, "COLUMNS": "120", "LMSCALE_TURNS": scratch}
        for line in COMMANDS.format(archive="../interleaving.zip").splitlines():
            if line.startswith("#"):
                text += f"\n{line}\n"
                continue
            start = time.monotonic()
            done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
            status |= done.returncode
            ended = "" if done.returncode == 0 else f", exit status {done.returncode}"
            step = f"$ {line}\n{shown(done.stdout + done.stderr)}({time.monotonic() - start:.0f} s{ended})\n\n"
            text += step.replace(scratch, "...")
            print(step, flush=True)
        text += f"In all {(time.monotonic() - began) / 60:.1f} minutes, with the installation.\n"
    print(text.splitlines()[-1])
    if keep:
        what = f"`python -m tests.ten_minutes --keep {keep}`, on {os.cpu_count()} CPU cores.\n"
        write_atomically(keep, what + re.sub(r"\n{3,}", "\n\n", text))
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
