"""The verb `export`: an experiment as one archive that can accompany a paper."""

import hashlib
import itertools
import json as json_format
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from harness.analysis import render
from harness.experiment import folders, published, references
from harness.experiment.experiment import Experiment, points
from harness.experiment.loading import load
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import verdicts_of, verdicts_table
from harness.predict.systems import FOLDER as SYSTEMS
from harness.records.environment import CODE, git_state
from harness.records.printable import printable
from harness.records.record import Record
from harness.records.store import Document, Store, write_atomically
from harness.records.writable import require_writable
from harness.report.experiments_md import WORDS, Found, as_markdown, content
from harness.report.results import described, write_results
from harness.report.zipped import SUMS, pack
from harness.terminal import Flag, print_json, shown, shown_progress
from impl.errors import InputError
from impl.own_code import code_of
from impl.run import to_dict

WHOLE = ("LICENSE", "CITATION.cff", "requirements.lock")
"""Files of the code that every archive has."""
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
"""Link of an experiment's page, to files that the archive has in other places or not at all."""


def export(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    tier: Tier | None = None,
    out: Path | None = None,
    results: Path | None = None,
    json: Flag = False,
) -> int:
    """Write an experiment as one zip: runs, records, tables, figures, environments, verdicts, licence and checksums.

    It also has the published numbers and the citation. The same records give the same bytes.

    Args:
        experiment: Id of an experiment or its last word, or a file such as mine.py.
        tier: Only this one; all that have records where it is left out.
        out: The file to write; the experiment's name with .zip, in this folder, where it is left out.
        results: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        json: Print one JSON document.
    """
    found = load(experiment)
    name = found.id.replace("/", "-")
    file = out or Path(f"{name}.zip")
    if file.suffix != ".zip" or file.is_dir():
        raise InputError(f"--out {file}: valid: a file that ends in .zip")
    require_writable(file.parent)
    inside = contents(found, results, TIERS if tier is None else (tier,))
    packed = pack(name, inside)
    write_atomically(file, packed)
    digest = hashlib.sha256(packed).hexdigest()
    if json:
        head = {"id": found.id, "file": str(file), "bytes": len(packed), "sha256": digest}
        return print_json({**head, "files": sorted([*inside, SUMS])})
    line = f"written: {file} ({len(inside) + 1} files, {shown(len(packed))}, sha256 {digest})"
    print(*filter(None, [line, folders.read_from(results, [found.id])]), sep="\n")
    return 0


def contents(found: Experiment, results: Path | None, tiers: Sequence[Tier]) -> dict[str, bytes]:
    """Return all files of the archive, by their paths in it.

    Raises:
        InputError: there are no records of these tiers.
    """
    inside, records = dict[str, bytes](), dict[Tier, list[Record]]()
    documents: list[Document] = []
    for tier in tiers:
        for store in folders.stores(results, found.id, tier):
            for record in store.records():
                if packed := _packed(store, store.path(record.id)):
                    inside |= packed
                    records.setdefault(tier, []).append(record)
                    documents.append(store.document(record.id))
            for path in sorted(store.changes.glob("*.diff")) if store.system is None else ():
                inside |= _packed(store, path)
    if not records:
        raise InputError(
            f"{folders.sweep_folder(results) / found.id} has no records; `lmscale run {found.id}` makes them"
        )
    everything = [record for of_tier in records.values() for record in of_tier]
    for tier in shown_progress(list(records), "drawing"):
        inside |= {f"results/{path}": data for path, data in _made(found, tier, records[tier])}
    verdicts = verdicts_of(found, everything)
    as_table, findings = verdicts_table(found.id, verdicts), folders.findings_of(results, found.id)
    texts = {
        "README.md": _readme(Found(found, everything, verdicts), findings),
        "specification.json": _as_text(_specification(found, findings, tiers)),
        "environment.json": _as_text(_environment(documents)),
        "verdicts.md": render.markdown(as_table),
        "verdicts.csv": render.csv(as_table),
    }
    return {**inside, **{path: text.encode() for path, text in texts.items()}, **dict(_with_it(found, everything))}


def _packed(store: Store, path: Path) -> dict[str, bytes]:
    """Return an unchanged file of the store by its path in the archive; empty if a link leads out of the store."""
    if not path.resolve().is_relative_to(store.out.resolve()):
        print(f"left out: {printable(str(path))}: a link leads out of {store.out}", file=sys.stderr)
        return {}
    return {f"results/{path.relative_to(store.out).as_posix()}": path.read_bytes()}


def _made(found: Experiment, tier: Tier, records: list[Record]) -> Iterator[tuple[str, bytes]]:
    """Yield a tier's tables and figures, made from the records: stored ones may be out of date."""
    with tempfile.TemporaryDirectory() as scratch:
        written, _ = write_results(Store(Path(scratch), found.id, tier), found, records)
        for path in map(Path, written):
            yield path.relative_to(scratch).as_posix(), path.read_bytes()


def _with_it(found: Experiment, records: Sequence[Record]) -> Iterator[tuple[str, bytes]]:
    """Yield the experiment's file, the user's own code that runs name, systems, published numbers, and shared files."""
    yield f"experiments/{found.id}.py", Path(found.file).read_bytes()
    runs = [*itertools.chain(*found.runs.values()), *(record.run for record in records)]
    for where in sorted({name.partition(":")[0] for run in runs for name in code_of(run)}):
        path = Path(where if where.endswith(".py") else f"{where.replace('.', '/')}.py")
        if path.is_file() and path.resolve().is_relative_to(Path.cwd()):  # else it is of an installed package
            yield path.resolve().relative_to(Path.cwd()).as_posix(), path.read_bytes()
    for system in sorted({str(record.environment.system) for record in records if record.is_simulated}):
        if (path := SYSTEMS / f"{system}.yaml").exists():
            yield f"systems/{path.name}", path.read_bytes()
    papers = {found.id.partition("/")[0], *(place.paper for place in references.of_experiment(found))}
    for paper in sorted(papers & set(published.papers())):
        yield f"published/{paper}.csv", (published.FOLDER / f"{paper}.csv").read_bytes()
    for name in WHOLE:
        if (CODE / name).exists():  # an installed package lacks some of them
            yield name, (CODE / name).read_bytes()


def _specification(found: Experiment, findings: str, tiers: Sequence[Tier]) -> dict[str, Any]:
    """Return the question, and every run with all of its fields."""
    runs = {
        tier: [{"id": p.id, "label": p.label, "config": to_dict(p.run)} for p in points(found.runs[tier])]
        for tier in tiers
    }
    texts = {"expected": found.expectation, "deviations": found.deviations, "found": findings}
    return {**described(found), **texts, "runs": runs}


def _environment(documents: Sequence[Document]) -> dict[str, Any]:
    """Return the environments of the records, each once with its records' ids, and the version of the archiving code.

    The commands that started the runs are listed separately from the environments.
    """
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        environment = dict(document.get("environment") or {})
        command = environment.pop("command", None)
        key = json_format.dumps(environment, sort_keys=True)
        one = found.setdefault(key, {"environment": environment, "commands": [], "records": []})
        if command is not None and command not in one["commands"]:
            one["commands"].append(command)
        one["records"].append(document["id"])
    return {"archive_written_by": git_state(CODE), "of_the_records": list(found.values())}


def _as_text(document: Any) -> str:
    return json_format.dumps(document, indent=1, allow_nan=False) + "\n"


def _readme(found: Found, findings: str) -> str:
    """Return the experiment's page, with a list of the files, and how to run it again."""
    again = [
        f"lmscale {verb} {found.experiment.id} --tier {tier}"
        for tier in TIERS
        for verb in ("run", "table")
        if any(record.tier == tier for record in found.records)
    ]
    commands = "\n".join(["In the code at the commit that `environment.json` names:\n", "```", *again, "```"])
    return LINK.sub(r"\1", as_markdown([*content(found, findings), "## Files", HERE, commands]))


HERE = f"""\
- `specification.json`: every run of every tier, all fields; `experiments/` has the file that they are made in.
- `results/`: a record for every run, measured in `records/`, simulated in `simulated/`; `tables/` and `figures/` are
  made of them alone.
- `verdicts.md`, `verdicts.csv`: the claims and what became of them.
- `environment.json`, `requirements.lock`: where it ran, by which code, with which packages; `systems/` describes what
  was simulated.
- `published/`: the papers' numbers; column `verified` has how each was checked. {WORDS}.
- `CITATION.cff` says how to cite this, and the papers; `LICENSE` is the code's.
- `SHA256SUMS`: `sha256sum --check SHA256SUMS`; `lmscale import` checks the zip, and compares it."""
