"""Carry out the fault matrix, and keep it as a table: `python -m tests.faults --keep results/faults.md`."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from harness.records.store import write_atomically
from tests.faults.carry_out import Outcome, carry_out, no_slurm, undisturbed
from tests.faults.cases import Case, cases
from tests.harness.small_runs import write_tokens
from tests.slurm.two_nodes import two_nodes, why_not

EQUAL, SKIPPED = "equal", "skipped"
HEADER = ("where", "plan", "place", "phase", "fault", "first outcome", "commands", "record after that")
ABOUT = """# Faults

Each row is a sweep of one point with two ranks, in which one fault happens once; then the same command is given again
until the point is finished. `commands` counts the commands after the one with the fault; with 0 it recovered by
itself. A point that the code itself made fail is left alone by the next command, and run by one with `--retry all`. A
record is *equal* if its configuration, losses, gradient norms, learning rates and evaluations are those of an
undisturbed sweep, bit by bit, and no other record has changed. `make faults` makes this table.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every case that was carried out held, 1 if one did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="cases at a time")
    parser.add_argument("--keep", type=Path, help="file of the table; rows of cases that are not run stay in it")
    parser.add_argument("--missing", action="store_true", help="cases that the file of the table does not have")
    given = parser.parse_args(arguments)
    kept = rows(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    chosen = [case for case in cases() if given.only in case.name and not (given.missing and case.name in kept)]
    has_failed = False
    with contextlib.ExitStack() as stack:
        if any(case.on == "slurm" for case in chosen) and no_slurm() and not why_not():
            stack.enter_context(two_nodes())
        for i, (case, outcome) in enumerate(zip(chosen, carried_out(chosen, given.jobs), strict=True), 1):
            kept[case.name] = row(case, outcome)
            has_failed = has_failed or bool(outcome.problem)
            print(f"{i}/{len(chosen)} {', '.join(kept[case.name])}", flush=True)
            if given.keep:
                write_atomically(given.keep, table(kept))
    print(counted(kept))
    return int(has_failed)


def carried_out(chosen: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """Yield outcomes in the order of the cases, each from a process and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        scratch = Path(name)
        tokens, layouts = write_tokens(scratch / "tokens"), list(dict.fromkeys(case.layout for case in chosen))
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            folders = [scratch / layout for layout in layouts]
            expected = dict(zip(layouts, pool.map(undisturbed, layouts, folders, repeat(tokens)), strict=True))
            folders = [scratch / str(i) for i in range(len(chosen))]
            of_layouts = [expected[case.layout] for case in chosen]
            yield from pool.map(carry_out, chosen, folders, repeat(tokens), of_layouts)


def row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of a case."""
    ended = f"{SKIPPED}: {outcome.skipped}" if outcome.skipped else outcome.problem or EQUAL
    first, commands = ("", "") if outcome.skipped else (outcome.first or "no failure", str(outcome.commands))
    cells = (case.on, case.layout, case.place, case.phase, case.fault, first, commands, ended)
    return tuple(" ".join(cell.replace("|", "/").split()) for cell in cells)


def rows(text: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a table, by the names of their cases."""
    found = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines() if line[:1] == "|"]
    return {", ".join(cells[:5]): cells for cells in found if len(cells) == len(HEADER)}


def table(found: Mapping[str, Sequence[str]]) -> str:
    """Return the matrix as Markdown, as far as it was carried out, with the counts below it."""
    known = [found[case.name] for case in cases() if case.name in found]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, ["---"] * len(HEADER), *known)]
    return "\n".join([ABOUT, *lines, "", counted(found), ""])


def counted(found: Mapping[str, Sequence[str]]) -> str:
    """Return the numbers of cases by their outcome."""
    ends = [found[case.name][-1] for case in cases() if case.name in found]
    skipped, equal = sum(end.startswith(SKIPPED) for end in ends), ends.count(EQUAL)
    done, missing = len(ends) - skipped, len(cases()) - len(ends)
    rest = f", {missing} not run" if missing else ""
    return f"{done} of {len(cases())} cases carried out, {equal} equal, {done - equal} not, {skipped} skipped{rest}."


if __name__ == "__main__":
    sys.exit(main())
