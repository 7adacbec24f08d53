"""Tables and figures of the papers that experiments refer to, for the index by paper and number."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from harness.experiment.experiment import Experiment
from harness.experiment.published import papers, published
from impl.grouping import by_key

PAPERS = {
    "megatron2019": ("Megatron-LM 2019", "megatron"),
    "ptdp2021": ("PTD-P 2021", "ptd-p"),
    "zero2019": ("ZeRO 2019", "zero (", "zero 2019"),
    "frontier2023": ("Frontier 2023", "frontier"),
    "korthikanti2022": ("Korthikanti et al. 2022", "korthikanti"),
    "zerobubble2024": ("Zero bubble 2024", "zero bubble", "qi et al"),
    "torchtitan2024": ("TorchTitan 2024", "torchtitan"),
    "nanotron2025": ("nanotron 2025", "nanotron"),
    "internevo2023": ("InternEvo 2023", "internevo"),
    "axonn2023": ("AxoNN 2023", "axonn"),
    "m6_2021": ("M6-T and M6-10T 2021", "m6-"),
    "proteins2024": ("Protein models 2024", "cheng et al", "serrano et al"),
    "chinchilla2022": ("Chinchilla 2022", "chinchilla", "hoffmann"),
}
"""Title of each paper by the folder of its experiments, and lower-case texts that name it in a source."""
ROMAN, NUMERALS = ("frontier2023",), ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X")
"""Papers with Roman table numbers, and these numerals."""
NUMBER = rf"(?:\d+[a-d]?|{'|'.join(NUMERALS)})\b"
PLACE = re.compile(rf"\b((?i:table|figure))s? ({NUMBER}(?:(?:, | and | to ){NUMBER})*(?!\.?\d))")
SAME = re.compile(r"\s*(table|figure|section|appendix|abstract)", re.IGNORECASE)
"""Beginning of a part of a source that refers to the previously named paper."""


class Place(NamedTuple):
    """Table or figure of a paper."""

    paper: str
    """Name of the paper's folder under `experiments`."""
    kind: str
    number: int

    def __str__(self) -> str:
        is_roman = self.paper in ROMAN and self.kind == "table" and self.number <= len(NUMERALS)
        return f"{self.kind} {NUMERALS[self.number - 1] if is_roman else self.number}"


def title(paper: str) -> str:
    """Return the title of a paper; the name of its folder if it is unknown."""
    return PAPERS.get(paper, (paper,))[0]


def places(source: str, paper: str = "") -> list[Place]:
    """Return the tables and figures that a source names, as `tables 3 and 7 to 9, figure 8; PTD-P 2021, figure 17`.

    Args:
        paper: paper of the places before another one is named; those of unknown papers are left out.
    """
    found: list[Place] = []
    for part in re.split(r";|, and (?=[A-Z])", source):
        paper = _named(part) or (paper if SAME.match(part) else "")
        if paper in PAPERS:
            found += [Place(paper, kind.lower(), n) for kind, text in PLACE.findall(part) for n in _numbers(text)]
    return list(dict.fromkeys(found))


def _named(part: str) -> str | None:
    """Return the paper that a part of a source names first."""
    text = part.lower()
    at = {paper: text.find(name) for paper, (_, *names) in PAPERS.items() for name in names if name in text}
    return min(at, key=lambda paper: at[paper]) if at else None


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a text: 3, 7, 8, 9 for `3 and 7 to 9`; 7 for `7a`, and 4 for `IV`."""
    for part in re.split(", | and ", text):
        first, _, last = part.partition(" to ")
        yield from range(_number(first), _number(last or first) + 1)


def _number(text: str) -> int:
    return NUMERALS.index(text) + 1 if text in NUMERALS else int(text.rstrip("abcd"))


def of_experiment(experiment: Experiment) -> list[Place]:
    """Return the tables and figures that an experiment's source and claims name, its own paper's first."""
    own = experiment.id.partition("/")[0]
    found = places(experiment.source, own)
    for claim in experiment.claims:
        found += places(claim.source, own)
    return sorted(dict.fromkeys(found), key=lambda place: (place.paper != own, place))


def answered(experiments: Iterable[Experiment]) -> dict[str, dict[Place, list[str]]]:
    """Return, by paper, every table and figure with experiments or published numbers, and its experiments' ids.

    Experiments of the paper's own folder come first.
    """
    found: dict[Place, list[str]] = {
        place: [] for paper in papers() for place in printed(paper) if isinstance(place, Place)
    }
    for experiment in experiments:
        for place in of_experiment(experiment):
            found.setdefault(place, []).append(experiment.id)
    order = [*PAPERS, *sorted({place.paper for place in found} - set(PAPERS))]
    by_paper: dict[str, dict[Place, list[str]]] = {}
    for place in sorted(found, key=lambda p: (order.index(p.paper), p.kind != "table", p.number)):
        ids = sorted(found[place], key=lambda name: (not name.startswith(f"{place.paper}/"), name))
        by_paper.setdefault(place.paper, {})[place] = ids
    return by_paper


def printed(paper: str) -> dict[Place | str, list[dict[Any, Any]]]:
    """Return a paper's rows in `harness/experiment/published` by table or figure, or by the name of another place."""
    rows = published(paper).to_dict("records") if paper in papers() else ()
    return by_key((place, row) for row in rows for place in places(row["where"], paper) or [row["where"]])
