"""EXPERIMENTS.md, the index of all experiments, and a page for each with results from its committed records."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.analysis import render
from harness.analysis.perplexity import comparable, perplexity_table, placement_table
from harness.analysis.render import Table
from harness.analysis.tables import denominators, scaling_table
from harness.experiment.claims import KINDS
from harness.experiment.experiment import Experiment
from harness.experiment.folders import findings_of
from harness.experiment.loading import experiment_ids, load
from harness.experiment.published import VERIFIED, papers
from harness.experiment.references import Place, answered, printed, title
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import (
    NOT_RUN,
    VERDICTS,
    Judged,
    by_kind,
    counts,
    headline_table,
    in_words,
    judged,
    listed_counts,
    records_of,
    verdicts_table,
)
from harness.launch import texts
from harness.predict.memory import tokenizer_size
from harness.records.environment import commits
from harness.records.parts import Git
from harness.records.printable import printable
from harness.records.record import Record
from harness.records.store import Store
from harness.terminal import shown, shown_progress
from impl.cost.memory import memory_of_ranks
from impl.data.batches import head_positions
from impl.data.config import EMBEDDED
from impl.run import Run

WORDS = "; ".join(f"*{word}*: {meaning}" for word, meaning in VERIFIED.items())
"""Words for how a published number was checked, with what they mean."""
INTRODUCTION = """\
# Experiments

`make documents` writes this index and the page of each experiment from the files under [experiments](experiments) and
the records under [results](results); a test compares them. A page has the question, its source, the commands, tables,
figures and verdicts. Tiers never share a table: `smoke` runs on two CPU cores in a minute or so, `small` on one
machine, `paper` has the source's scale. What was simulated for a system (`predict`) and not run says so, has columns of
its own, and verdicts of its own on the claims. Tables of timings, CSV and LaTeX lie beside the records that each page
links to.

- A table or figure of a paper: [by paper and number](#by-paper-and-number). A question:
  [all experiments](#all-experiments).
- A verdict (`lmscale claims` prints them) is *reproduced*, *partly* (at least half of a claim's points hold, not all)
  or *not reproduced* only if the points that are still open, as their interval contains the border, could not change
  it; else it is *cannot tell here*, with the repeats that would decide. Where systems differ, a claim counts as
  *partly* if some of them reproduce it. *Not run here*: there are no runs. It is of the largest
  tier whose runs can tell. Intervals of measured means are Student's and Welch's (95%), those of simulated times the
  simulator's own (90%), correlated where two runs are compared. Rows that a simulated system's constants were fitted
  to are no evidence. Absolute numbers are compared only on the hardware that they were published for.
- What simulated verdicts become where network, computing or pipeline bubbles take no time:
  [null models](results/null_models.md), or `lmscale claims NAME --idealised network`.
- Memory is the fullest rank's: measured, which on CPUs is a process's peak (Python and PyTorch are about 0.3 GiB of
  it); simulated for a system; or, without records, the bytes of tensors that `lmscale memory` predicts. Time that was
  taken is the sum over all runs, failed ones too.
"""
NOT_HERE = """\
## Not here yet

Planned:

- Megatron-LM 2019: fine-tuning on MNLI, QQP and SQuAD (the rest of table 5).

As published only, not run or simulated:

- Zero bubble 2024: tables 4 and 5, 1F1B interleaved over a chunk a layer, whose first and last have none: every stage
  needs a layer here; and ZB-2p, found by search: ZB-H2 is simulated beside it.
- ZeRO 2019: figure 5 and section 10.6, perplexity and rate of Turing-NLG: 17B parameters are out of reach.
- ZeRO 2019: table 4, the shapes behind figures 2 to 4: runs have those of tables 5 to 10, as its hidden size for 40B
  and 60B contradicts both.
- ZeRO 2019: memory defragmentation (M_D), which is in all of table 3's configurations: tensors are counted here, not
  what an allocator holds, so that there is nothing to vary.
- PTD-P 2021: section 6, the 36% of the peak that other software reaches with a trillion parameters; and pipelines that
  do not flush, as PipeDream's, whose microbatches meet several versions of the weights: how long their step is at least
  stands in `ours/distance_to_optimum`.

Named among the papers' related work and not covered:

- Recommender models: embedding tables split over ranks, as Persia's: their time goes into looking up rows that fit in
  no GPU, and not into what is compared here, layers split over ranks, pipelines and ZeRO.
"""

Part = str | Table
"""Part of a page: Markdown, or a table."""


class Found(NamedTuple):
    """Experiment with its records of all tiers, and the verdicts on its claims."""

    experiment: Experiment
    records: list[Record]
    judged: list[Judged]

    def of(self, tier: Tier, *, simulated: bool) -> list[Record]:
        return [r for r in self.records if r.tier == tier and r.is_simulated == simulated]

    def highest(self, *, simulated: bool) -> tuple[Tier, list[Record]] | None:
        """Return the largest tier with records, measured or simulated, and these records."""
        for tier in TIERS[::-1]:
            if records := self.of(tier, simulated=simulated):
                return tier, records
        return None


def read(out: Path, names: Sequence[str] = ()) -> list[Found]:
    """Return the experiments of these ids, by default all, each with its records of all tiers under `out`.

    If `out` is in a git repository, only records tracked by git are read, so that a local run changes nothing.
    """
    tracked = tracked_files(out)
    found = []
    for experiment in shown_progress([load(name) for name in names or experiment_ids()], "reading records"):
        records = records_of(experiment, out, tracked=tracked)
        found.append(Found(experiment, records, judged(experiment, records)))
    return found


def page_of(name: str) -> str:
    """Return the path of an experiment's page, relative to the project's folder."""
    return f"results/{name}/README.md"


class Links:
    """Markdown links of the index, as EXPERIMENTS.md has them."""

    def experiment(self, name: str) -> str:
        """Return the link to an experiment's page."""
        return f"[{name}]({page_of(name)})"

    def paper(self, paper: str) -> str:
        """Return the link to a paper's published numbers; its title if there are none."""
        text = title(paper)
        return f"[{text}](harness/experiment/published/{paper}.csv)" if paper in papers() else text

    def place(self, place: Place) -> str:
        """Return a table or figure of a paper."""
        return str(place)


def index(found: Sequence[Found]) -> str:
    """Return the text of EXPERIMENTS.md."""
    return f"{INTRODUCTION}\n{index_sections(found, Links())}"


def index_sections(found: Sequence[Found], links: Links) -> str:
    """Return the index as Markdown: experiments by paper and number, and all of them with their verdicts."""
    parts = (_by_number(found, links), _overview(found, links), _cannot_tell(found, links))
    return "\n\n".join(["\n".join(lines) for lines in parts] + [NOT_HERE])


def _by_number(found: Sequence[Found], links: Links) -> Iterator[str]:
    """Yield a row for every table and figure of the papers with an experiment or published numbers."""
    yield f"## By paper and number\n\nHow each published number was checked: {WORDS}.\n"
    yield from _rows("paper", "table or figure", "experiments", "published numbers")
    for paper, places in answered(one.experiment for one in found).items():
        rows = printed(paper)
        for place, ids in places.items():
            words = Counter(row["verified"] for row in rows.get(place, ()))
            numbers = ", ".join(f"{words[word]} {word}" for word in VERIFIED if words[word]) or "–"
            yield _row(links.paper(paper), links.place(place), ", ".join(map(links.experiment, ids)) or "–", numbers)


def _overview(found: Sequence[Found], links: Links) -> Iterator[str]:
    everything = [one for of_one in found for one in of_one.judged]
    yield f"## All experiments\n\n{len(found)} experiments. {in_words(counts(everything))}.\n"
    yield "<!-- verdicts by kind -->"
    yield from _rows("claims", "runs", *(word for word in VERDICTS if word != NOT_RUN))
    for kind, runs, said in by_kind(everything):
        yield _row(f"{kind}: {KINDS[kind]}", runs, *map(str, said.values()))
    yield "<!-- end of verdicts by kind -->\n"
    yield from _rows("experiment", "question", "verdicts, measured", "verdicts, simulated")
    for e, _, verdicts in found:
        counted = counts(verdicts)
        said = [listed_counts(counted[kind]) or "–" for kind in ("measured", "simulated")]
        yield _row(links.experiment(e.id), e.question, *said)


def page(found: Found, out: Path) -> str:
    """Return an experiment's page as Markdown, with the figures of its records under `out`."""
    return as_markdown(content(found, findings_of(out, found.experiment.id), out))


def as_markdown(parts: Iterable[Part]) -> str:
    """Return the parts of a page as Markdown; a table without title has no heading."""
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else render.markdown(part, padded=False)
        texts.append(text.removeprefix("### \n\n").strip())
    return "\n\n".join(texts) + "\n"


def content(found: Found, findings: str, out: Path | None = None) -> Iterator[Part]:
    """Yield the parts of an experiment's page: question, source, commands, verdicts, tables and figures.

    Tables and figures are those of the largest tier with measured records, and of the largest with simulated ones.

    Args:
        findings: text on what was found; may be empty.
        out: folder of the records, whose figures are linked to; None for a page without figures.
    """
    e = found.experiment
    yield f"# {e.id}"
    yield f"**{e.question}**"
    yield from (" ".join(paragraph.split()) for paragraph in e.about.split("\n\n") if paragraph)
    facts = [f"- Source: {e.source}.", f"- Expected: {e.expectation}."]
    facts += [f"- Deviations: {' '.join(e.deviations.split())}"] if e.deviations else []
    yield "\n".join([*facts, *(f"- Text: {line}." for line in _texts(e))])
    yield "\n".join(_commands(found))
    headline, verdicts = headline_table(e.id, found.judged), verdicts_table(e.id, found.judged)
    if found.records and len(headline.frame):
        yield replace(headline, title="")
    if findings:
        yield f"**Found.** {findings}"
    if len(verdicts.frame):
        yield "## Claims"
        yield replace(verdicts, title="")
    else:
        yield "No claims: its tables say what is found."
    if not found.records:
        yield "No records yet."
    ran, simulated = found.highest(simulated=False), found.highest(simulated=True)
    if ran is not None:
        tier, records = ran
        yield f"## Measured\n\nTier `{tier}`, {_measured_on(records)}. {_counted(tier, records)}"
        yield from _tables(e, _main_tables(records), records)
        yield from _figures(out, e, tier)
    if simulated is not None:
        tier, records = simulated
        systems = _listed(f"{r.environment.system} ({r.environment.stack})" for r in records)
        yield f"## Simulated\n\nTier `{tier}`, simulated for {systems}. {_habits(records)}{_counted(tier, records)}"
        yield from _tables(e, [] if e.table else [scaling_table(records)], records)
        if ran is None or ran[0] != tier:
            yield from _figures(out, e, tier)


def _texts(e: Experiment) -> Iterator[str]:
    """Yield a line for each text that the experiment reads and the repository does not contain."""
    how = Path(os.path.relpath("docs/texts.md", Path(page_of(e.id)).parent)).as_posix()
    for path in dict.fromkeys(path for tier in TIERS for run in e.runs[tier] for path in texts.read_by(run)):
        text = texts.KNOWN[path]
        where = f"{text.source}, {text.licence}; SHA-256 begins with `{text.sha256[:12]}`"
        yield f"`{path}`, {text.what}; from {where}; [how to get it]({how})"


def _counted(tier: Tier, records: Sequence[Record]) -> str:
    return f"{denominators(records)}. Records, tables and figures: [{tier}]({tier})."


def _habits(records: Iterable[Record]) -> str:
    """Return how simulated runs differ from those asked for, by their system's software."""
    found = sorted({one for record in records for one in record.prediction.warnings if one.startswith("as ")})
    whole = [one for one in found if not any(other != one and other.startswith(one) for other in found)]
    return "".join(f"{one[0].upper()}{one[1:]}. " for one in whole)


def _tables(e: Experiment, first: Iterable[Table], records: Sequence[Record]) -> Iterator[Table]:
    """Yield these tables and the experiment's own, without those that have no rows."""
    yield from (table for table in (*first, *([e.table(records)] if e.table else [])) if len(table.frame))


def _figures(out: Path | None, e: Experiment, tier: Tier) -> Iterator[str]:
    """Yield links to the figures of a tier in the folder of records."""
    for path in sorted(Store(out, e.id, tier).figures.glob("*.svg")) if out else ():
        yield f"![{path.stem.replace('_', ' ')}]({tier}/figures/{path.name})"


def _commands(found: Found) -> Iterator[str]:
    """Yield the rows of a table of the tiers: cost, memory, time and command."""
    e = found.experiment
    yield from _rows("tier", "points", "expected", "memory of a rank", "took", "command")
    for tier in TIERS:
        memory, took = _memory(found, tier), _took(found.of(tier, simulated=False))
        command = f"`lmscale run {e.id} --tier {tier}`"
        yield _row(tier, str(len(e.runs[tier])), e.cost[tier], memory, took, command)


def _memory(found: Found, tier: Tier) -> str:
    """Return the fullest rank's memory over all runs of a tier, measured and simulated, else predicted."""
    sizes_by_kind = []
    for kind, simulated in (("measured", False), ("simulated", True)):
        ranks = [rank for record in found.of(tier, simulated=simulated) for rank in record.ranks]
        sizes = [size for rank in ranks if (size := rank.peak_memory_bytes)]
        sizes_by_kind += [f"{shown(max(sizes))}, {kind}"] if sizes else []
    if not sizes_by_kind and tier != "paper" and (size := _predicted(tuple(found.experiment.runs[tier]))):
        sizes_by_kind.append(f"{shown(size)}, predicted")
    return "; ".join(sizes_by_kind) or "–"


@cache
def _predicted(runs: tuple[Run, ...]) -> int | None:
    """Return the tensor bytes of the fullest rank over our engine's runs on CPUs; None if some run reads a text.

    A text may be missing here, and the page must not depend on that.
    """
    points = {replace(run, seed=0, repeat=0) for run in runs if run.engine == "native"}
    if any(not run.model.vocab_size and run.data.dataset not in EMBEDDED for run in points):
        return None
    vocabularies = {run: run.model.vocab_size or run.model.vocabulary(tokenizer_size(run)) for run in points}
    ranks = [
        rank
        for run, size in vocabularies.items()
        for rank in memory_of_ranks(run, size, head_positions(run.model), "cpu")
    ]
    return max((rank.total for rank in ranks), default=None)


def _took(records: Sequence[Record]) -> str:
    """Return the total time of all runs."""
    seconds = sum(record.times.total_seconds or 0.0 for record in records)
    return f"{seconds / 60:.1f} min" if seconds else "–"


def _main_tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield the scaling table, and one for each evaluation: by size and placement if both vary, else by point."""
    yield scaling_table(records)
    for name, kind, apart, chosen in comparable(records):
        yield placement_table(chosen, name, kind, apart) or perplexity_table(chosen, name, kind, apart)


def _measured_on(records: Sequence[Record]) -> str:
    """Return the devices and commits of the measured runs."""
    devices, codes = [], []
    for environment in (record.environment for record in records if record.status == "ok"):
        kind = ", ".join(filter(None, (environment.device, environment.backend)))
        devices.append(f"{environment.device_name or 'an unknown device'} ({kind})")
        codes.append(commits(environment.git or Git(), "`{}`"))
    if not devices:
        return "no run ended well"
    return f"measured on {_listed(devices)} at commit {_listed(codes)}"


def _listed(items: Iterable[str]) -> str:
    """Return texts of records in alphabetical order, printable, and without images or HTML."""
    return render.EMBEDS.sub(r"\\\g<0>", ", ".join(sorted(set(map(printable, items)))))


def tracked_files(folder: Path) -> set[Path] | None:
    """Return the files in a folder that git tracks; None if the folder is in no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    resolved = folder.resolve()
    return {resolved / name for name in names.split("\0") if name}


def _cannot_tell(found: Sequence[Found], links: Links) -> Iterator[str]:
    """Yield the section on claims that no measured or simulated run here can decide."""
    yield "## Not run here\n\nClaims on which no record here says anything:\n"
    for e, _, verdicts in found:
        if undecided := [f"{one.claim.text} ({one.claim.source})" for one in verdicts if one.tier is None]:
            yield f"- {links.experiment(e.id)}: {'; '.join(undecided)}."


def _rows(*headers: str) -> tuple[str, str]:
    return _row(*headers), _row(*("---" for _ in headers))


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
