"""The verb `certify`: whether certified runs are equal bit for bit, where they first differ, and what may be why."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro

from harness.experiment import folders
from harness.records.certificate import Certificate, Compared, Difference, compared, read
from harness.records.labels import RUN_ID
from harness.records.printable import several
from harness.terminal import Flag, columns, print_json
from impl.errors import InputError

DEPTH = 4
"""Most folders between one that is named and its records."""


def certify(
    a: tyro.conf.Positional[str],
    b: tyro.conf.Positional[str],
    /,
    *,
    json: Flag = False,
) -> int:
    """Compare two certificates of runs, bit for bit: losses, gradients and weights of every step; nothing is run.

    `run --certify` and `train --certify` make them. The exit status is 1 if two differ.

    Args:
        a: A record, a folder with records (all of their runs are compared), or the id of a run in `runs` or `results`.
        b: Another of the same, from another host, allocation or number of processes per node.
        json: Print one JSON document.
    """
    found: list[tuple[Path, Path, Certificate, Compared]] = []
    for one, other in pairs(a, b):
        certificate = read(one)
        found.append((one, other, certificate, compared(certificate, read(other))))
    if json:
        print_json([_document(one, other, result) for one, other, _, result in found])
    else:
        print("\n\n".join("\n".join(_lines(*each)) for each in found))
    return int(any(result.first is not None for *_, result in found))


def pairs(a: str, b: str) -> list[tuple[Path, Path]]:
    """Return the files of records to compare: the only two, or of two folders those with the same name.

    Raises:
        InputError: there are none.
    """
    of_a, of_b = _records(a), _records(b)
    if len(of_a) == len(of_b) == 1:
        return list(zip(of_a.values(), of_b.values(), strict=True))
    if common := [(of_a[name], of_b[name]) for name in of_a if name in of_b]:
        return common
    raise InputError(
        f"certify: no run has a record in both {a!r:.80} ({several(len(of_a), 'record')}) and {b!r:.80} ({len(of_b)})"
    )


def _records(name: str) -> Mapping[str, Path]:
    """Return the files of records that a word of the command line names, by their names."""
    path = Path(name)
    if path.is_dir():
        found = _below(path)
    elif path.exists() or not RUN_ID.fullmatch(name):
        return {path.name: path}
    else:
        found = (file for folder in (folders.OWN, folders.ARCHIVE) for file in _below(folder, name))
    if records := {file.name: file for file in found}:
        return records
    raise InputError(f"certify: {name!r:.80} has no records; valid: a record, a folder with records, or a run's id")


def _below(folder: Path, name: str = "*") -> Iterator[Path]:
    for above in [""] if folder.name == "records" else ["*/" * depth + "records/" for depth in range(DEPTH)]:
        yield from sorted(folder.glob(f"{above}{name}.json"))


def _document(one: Path, other: Path, result: Compared) -> dict[str, Any]:
    first = None if result.first is None else result.first._asdict()
    changes = [change._asdict() for change in result.changes]
    return {"a": str(one), "b": str(other), **result._asdict(), "first": first, "changes": changes}


def _lines(one: Path, other: Path, certificate: Certificate, result: Compared) -> Iterator[str]:
    yield f"{one} and {other}:"
    steps = several(result.equal_steps, "step")
    if result.first is None:
        tensors = sum(len(rank.pieces) for rank in certificate.ranks)
        yield f"equal bit for bit over {steps}: loss, {tensors} gradients and {tensors} weights of each"
        if result.steps[0] != result.steps[1]:
            yield f"one has {result.steps[0]} steps and the other {result.steps[1]}"
    else:
        yield from _where(result.first)
        yield f"equal bit for bit before that: {steps}"
    if result.changes:
        yield "environments differ in"
        why = lambda text: f"changes bits: {text}" if text else "not known to change bits"
        yield columns([(f"  {what}", " | ".join(values), why(text)) for what, values, text in result.changes])
    elif result.first is not None:
        yield "environments do not differ in anything that is recorded: the code, the data or the machine does"


def _where(first: Difference) -> Iterator[str]:
    what = first.of if not first.tensor else f"{first.of} of {first.tensor}"
    if first.elements is not None:
        what += f", elements {first.elements[0]} to {first.elements[1]},"
    ranks = f"rank{'s' * (len(first.ranks) > 1)} {', '.join(map(str, first.ranks[:8]))}"
    more = f" and {len(first.ranks) - 8} more" if len(first.ranks) > 8 else ""
    yield f"differ first in step {first.step}: {what} on {ranks}{more}"
    for name, (x, y) in (("norm", first.norms), ("sum", first.sums)):
        if x is None or y is None:
            yield f"  {name}: not finite"
        else:
            yield f"  {name}: {x!r} and {y!r}, apart by {abs(x - y):.3g}"
    yield f"  of that kind {first.differing} of {first.among} differ in this step"
