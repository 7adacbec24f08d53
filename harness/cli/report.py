"""The verb `report`: results of all records as a folder of pages that a browser shows without a network."""

from pathlib import Path

from harness.experiment import folders
from harness.experiment.loading import experiment_ids, load
from harness.experiment.verdicts import in_words, records_of
from harness.records.record import Record
from harness.report.pages import Report
from harness.report.site import replaced, require_replaceable
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
    require_replaceable(out)
    experiments = [load(name) for name in experiment_ids()]
    records: dict[str, list[Record]] = {}
    for e in shown_progress(experiments, "reading records"):
        records[e.id] = records_of(e, results)
    if not any(records.values()):
        raise InputError(f"--results {results or folders.OWN}: has no records; `lmscale run quickstart` makes some")
    with replaced(out) as folder:
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
