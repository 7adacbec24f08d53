"""The verb `show`: a table or figure of a paper, as it was published, simulated and measured."""

from collections.abc import Sequence
from pathlib import Path

import tyro

from harness.analysis.render import Table, as_json
from harness.analysis.tables import throughput_table
from harness.experiment import references
from harness.experiment.experiment import Experiment
from harness.experiment.folders import read_from
from harness.experiment.loading import experiment_ids, load
from harness.experiment.references import Place
from harness.experiment.tiers import TIERS
from harness.experiment.verdicts import records_of, verdicts_of, verdicts_table
from harness.records.record import Record
from harness.report.pages import printed_table
from harness.report.results import described
from harness.terminal import Flag, print_json, print_tables, shown_progress
from impl.errors import InputError


def show(what: tyro.conf.Positional[tuple[str, ...]], /, *, out: Path | None = None, json: Flag = False) -> int:
    """Show a table or figure of a paper: the published numbers, and what our runs say of it.

    Args:
        what: The paper and the number, as PTD-P figure 12.
        out: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        json: Print one JSON document.
    """
    place, experiments = located(" ".join(what))
    name = f"{references.title(place.paper)}, {place}"
    published = printed_table(f"{name}, as published", references.printed(place.paper).get(place, []))
    found = [
        (each, tables_about(place, each, records_of(each, out)))
        for each in shown_progress(experiments, "reading records")
    ]
    if json:
        documents = [
            {**described(experiment), "tables": [{"runs": runs, **as_json(table)} for runs, table in tables]}
            for experiment, tables in found
        ]
        numbers = as_json(published)
        return print_json({"paper": place.paper, "place": str(place), "published": numbers, "experiments": documents})
    if published.columns:
        print_tables([published])
    else:
        print(f"{name}: no published numbers here")
    for experiment, tables in found:
        print(f"\n{experiment.id}: {experiment.question}")
        for runs, table in tables:
            print(f"\n{runs}:")
            print_tables([table])
        for tier in TIERS:
            print(f"again: lmscale run {experiment.id} --tier {tier}  # {experiment.cost[tier]}")
    print(read_from(out, [each.id for each in experiments]) if experiments else "\nNo experiment is about it yet.")
    return 0


def located(text: str) -> tuple[Place, list[Experiment]]:
    """Return the table or figure that a text names, and the experiments about it.

    Raises:
        InputError: it names none, several, or one of which nothing is known.
    """
    by_first_word = {
        title.partition(" ")[0].lower(): paper for paper, (title, *_) in reversed(references.PAPERS.items())
    }
    word, _, rest = text.partition(" ")
    places = references.places(text) or references.places(rest, by_first_word.get(word.lower(), ""))
    if len(places) != 1:
        titles = ", ".join(title for title, *_ in references.PAPERS.values())
        what = "names several tables and figures" if places else "names no table or figure of a paper"
        raise InputError(f"{text!r} {what}; valid: one, as PTD-P figure 12, of {titles}")
    [place] = places
    known = references.answered(load(name) for name in experiment_ids()).get(place.paper, {})
    if not known:
        name = references.title(place.paper)
        raise InputError(f"{name}: no experiment answers one of its tables or figures; `lmscale list` shows all")
    if place not in known:
        raise InputError(f"{references.title(place.paper)} has no {place} here; valid: {', '.join(map(str, known))}")
    return place, [load(name) for name in known[place]]


def tables_about(place: Place, experiment: Experiment, records: Sequence[Record]) -> list[tuple[str, Table]]:
    """Return what an experiment says of a place, each table with where its records are from.

    These are the verdicts on its claims about the place, and its own table of the largest tier of each kind of record.
    """
    own = experiment.id.partition("/")[0]
    of_place = [one for one in verdicts_of(experiment, records) if place in references.places(one.claim.source, own)]
    tables = [("claims about it", verdicts_table(experiment.id, of_place))] if of_place else []
    for kind in ("measured", "simulated"):
        of_kind = [record for record in records if record.is_simulated == (kind == "simulated")]
        tier = next((tier for tier in TIERS[::-1] if any(record.tier == tier for record in of_kind)), None)
        table = (experiment.table or throughput_table)([record for record in of_kind if record.tier == tier])
        tables += [(f"{kind}, tier {tier}", table)] if len(table.frame) else []
    return tables
