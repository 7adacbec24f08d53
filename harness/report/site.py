"""The verb `report`: results of all records as a folder of pages that a browser shows without a network."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.experiment import folders
from harness.experiment.experiment import experiment_ids, load
from harness.experiment.verdicts import in_words, records_of
from harness.records.record import Record
from harness.records.store import read_json
from harness.report.pages import KIND, MANIFEST, Report
from harness.terminal import Flag, print_json, shown_progress
from impl.errors import InputError


def report(*, out: Path = Path("site"), results: Path | None = None, json: Flag = False) -> int:
    """Write a report of all records: tables, figures, timelines, verdicts and environments, as pages for a browser.

    Args:
        out: The folder to write; an earlier report there is replaced.
        results: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        json: Print one JSON document: what was written, and how many verdicts of each kind there are.
    """
    out = out.resolve()
    _require_replaceable(out)
    experiments = [load(name) for name in experiment_ids()]
    records: dict[str, list[Record]] = {}
    for e in shown_progress(experiments, "reading records"):
        records[e.id] = records_of(e, results)
    if not any(records.values()):
        raise InputError(f"--results {results or folders.OWN}: has no records; `lmscale run quickstart` makes some")
    with _replaced(out) as folder:
        made = Report(folder, results or folders.ARCHIVE)
        for e in shown_progress(experiments, "writing pages"):
            made.add(e, records[e.id])
        manifest = made.finish()
    if json:
        return print_json({"out": str(out), **manifest})
    counted = ", ".join(f"{count} {kind}" for kind, count in manifest["records"].items())
    print(f"{manifest['experiments']} experiments, records: {counted}", in_words(manifest["claims"]), sep="\n")
    if note := folders.read_from(results, list(records)):
        print(note)
    print(f"\nwritten: {len(manifest['files'])} files; open {out / 'index.html'}")
    return 0


def _require_replaceable(out: Path) -> None:
    """Check that the path is free, an empty folder, or an earlier report.

    Raises:
        InputError: it is not.
    """
    if not out.exists() and not out.is_symlink():
        return
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and not ((found := read_json(out / MANIFEST)) and isinstance(found, dict) and KIND in found):
        raise InputError(f"--out {out}: is no report; valid: a folder that is new, empty, or an earlier report")


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` once it is written completely; until then `out` does not change.

    Raises:
        InputError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise InputError(f"--out: {out} cannot be written ({error.strerror}); give a folder that can") from error
    old = new.with_name(f"{new.name}.old")
    try:
        yield new
        new.chmod(0o755)
        if out.exists():
            os.rename(out, old)
        os.rename(new, out)
    except BaseException:
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        print(f"warning: {old} could not be removed", file=sys.stderr)
