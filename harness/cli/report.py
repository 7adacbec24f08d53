"""The verb `report`: results of all records as a folder of pages that a browser shows without a network."""

import tempfile
from pathlib import Path

from harness.experiment import folders
from harness.experiment.loading import experiment_ids, load
from harness.experiment.verdicts import in_words, records_of
from harness.records.record import Record
from harness.records.writable import replaced
from harness.report import planner
from harness.report.pages import Pages
from harness.terminal import Flag, print_json, shown_progress
from impl.errors import InputError


def report(*, out: Path = Path("site"), results: Path | None = None, json: Flag = False) -> int:
    """Write a report of all records: tables, figures, timelines, verdicts and environments, as pages for a browser.

    Args:
        out: The folder to write; an earlier report there is replaced.
        results: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        json: Print one JSON document: what was written, and how many verdicts of each kind there are.
    """
    from harness.cli.manual import write_manual  # which reads all verbs
    from harness.report.site import add_manifest, add_planner, build, require_replaceable

    out = out.resolve()
    require_replaceable(out)
    experiments = [load(name) for name in experiment_ids()]
    records: dict[str, list[Record]] = {}
    for e in shown_progress(experiments, "reading records"):
        records[e.id] = records_of(e, results)
    if not any(records.values()) and results and any(results.rglob("records/*.json")):
        where = "files of experiments of your own go in experiments/"
        raise InputError(f"--results {results}: its records are of no experiment that is found here; {where}")
    if not any(records.values()):
        raise InputError(f"--results {results or folders.OWN}: has no records; `lmscale run quickstart` makes some")
    with replaced(out) as site, tempfile.TemporaryDirectory() as source:
        made, manual = Pages(Path(source), results or folders.ARCHIVE), write_manual(Path(source))
        for e in shown_progress(experiments, "writing pages"):
            made.add(e, records[e.id])
        said = made.finish()
        build(Path(source), site, [*manual, *made.nav()], made.html)
        add_planner(site, planner.embedded(made.results))
        manifest = add_manifest(site, said)
    if json:
        return print_json({"out": str(out), **manifest})
    counted = ", ".join(f"{count} {kind}" for kind, count in manifest["records"].items())
    print(f"{manifest['experiments']} experiments, records: {counted}", in_words(manifest["claims"]), sep="\n")
    if note := folders.read_from(results, list(records)):
        print(note)
    print(f"\nwritten: {len(manifest['files'])} files; open {out / 'index.html'}")
    return 0
