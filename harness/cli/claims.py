"""The verb `claims`: verdicts on the claims of experiments, over all tiers, measured and simulated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from harness.analysis.render import as_json
from harness.experiment.claims import Part
from harness.experiment.claims import idealised as without
from harness.experiment.experiment import Experiment
from harness.experiment.folders import own_tiers, read_from
from harness.experiment.forecasts import forecasts_table, scored
from harness.experiment.loading import experiment_ids, load
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import Judged, counts, in_words, records_of, verdicts_of, verdicts_table
from harness.report.results import in_words_of_others, other_points
from harness.terminal import Flag, print_json, print_tables, shown_progress
from impl.errors import InputError


def claims(
    name: tyro.conf.Positional[str | None] = None,
    /,
    *,
    tier: Tier | None = None,
    out: Path | None = None,
    idealised: Part | None = None,
    calibration: Flag = False,
    json: Flag = False,
) -> int:
    """Check the claims of experiments against the records: reproduced, partly, not reproduced, or cannot tell here.

    Args:
        name: Id of an experiment, its last word, or the folder of a paper, as megatron2019; all where it is left out.
        tier: Only records of this tier; else, for each claim, of the largest tier that can decide it.
        out: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        idealised: Verdicts on simulated runs only, as on machines of which this part takes no time: a claim about it
            must no longer hold.
        calibration: Score the forecasts that were written before runs began, instead of judging claims.
        json: Print one JSON document.
    """
    tiers = TIERS if tier is None else (tier,)
    if calibration:
        every = (scored(each.id, records_of(each, out, tiers)) for each in shown_progress(chosen(name), "reading"))
        table = forecasts_table([one for scores in every for one in scores])
        if table.frame.empty:
            raise InputError("--calibration: no record has a forecast; `run --forecast SYSTEM` writes them")
        if json:
            return print_json(as_json(table))
        print_tables([table])
        return 0
    found: dict[str, list[Judged]] = {}
    notes: list[str] = []
    for each in shown_progress(chosen(name), "reading records"):
        records = records_of(each, out, tiers)
        records = without(records, idealised) if idealised else records
        found[each.id] = verdicts_of(each, records)
        unused = [] if out or tier else own_tiers(each.id)
        if unused and not {one.tier for one in found[each.id]} & set(unused):
            notes.append(f"{each.id}: none of these is of your own records; `--tier {unused[-1]}` judges by them")
        if note := in_words_of_others(other_points(each, records)):
            notes.append(f"{each.id}: {note}")
    everything = [one for of_one in found.values() for one in of_one]
    if json:
        documents = [_document(name, of_one) for name, of_one in found.items()]
        return print_json({"experiments": documents, "counts": counts(everything)})
    print_tables(verdicts_table(experiment, of_one) for experiment, of_one in found.items() if of_one)
    print(*filter(None, [f"\n{in_words(counts(everything))}", *notes, read_from(out, list(found))]), sep="\n")
    return 0


def chosen(name: str | None) -> list[Experiment]:
    """Return all experiments, those of a paper's folder, or the one with this id or last word.

    Raises:
        InputError: there is no such experiment.
    """
    ids = experiment_ids()
    if name is None:
        return [load(each) for each in ids]
    return [load(each) for each in ids if each.startswith(f"{name.rstrip('/')}/")] or [load(name)]


def _document(experiment: str, found: Sequence[Judged]) -> dict[str, Any]:
    """Return an experiment's claims, each with its verdicts, as a JSON document."""
    documents: dict[int, dict[str, Any]] = {}
    for one in found:
        names = {"claim": "text", "source": "source", "kind": "kind", "published": "published"}
        claim = {name: getattr(one.claim, of) for name, of in names.items()}
        source = None if one.tier is None else "simulated" if one.systems else "measured"
        verdict = {
            "tier": one.tier,
            "source": source,
            "systems": one.systems.split(", ") if one.systems else [],
            "verdict": one.verdict,
            "numbers": one.numbers,
            "rests_on": one.basis,
        }
        documents.setdefault(id(one.claim), claim | {"verdicts": []})["verdicts"].append(verdict)
    return {"id": experiment, "claims": list(documents.values())}
