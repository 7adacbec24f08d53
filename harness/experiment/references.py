"""Which tables and figures of the papers an experiment is about: what an index by their numbers is made of."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.experiment.experiment import Experiment
from harness.experiment.published import papers, published

PAPERS = {
    "megatron2019": ("Megatron-LM 2019", "megatron"),
    "ptdp2021": ("PTD-P 2021", "ptd-p"),
    "zero2019": ("ZeRO 2019", "zero (", "zero 2019"),
    "frontier2023": ("Frontier 2023", "frontier"),
    "korthikanti2022": ("Korthikanti et al. 2022", "korthikanti"),
    "zerobubble2024": ("Zero bubble 2024", "zero bubble", "qi et al"),
    "torchtitan2024": ("TorchTitan 2024", "torchtitan"),
    "chinchilla2022": ("Chinchilla 2022", "chinchilla", "hoffmann"),
}
"""By the folder of their experiments: what they are called, and how a source that names them begins."""
ROMAN, NUMERALS = ("frontier2023",), ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X")
"""Papers that number their tables so."""
NUMBER = rf"(?:\d+[a-d]?|{'|'.join(NUMERALS)})\b"
PLACE = re.compile(rf"\b((?i:table|figure))s? ({NUMBER}(?:(?:, | and | to ){NUMBER})*(?!\.?\d))")
SAME = re.compile(r"\s*(table|figure|section|appendix|abstract)", re.IGNORECASE)
"""How a part of a source begins that is of the paper named before."""


class Place(NamedTuple):
    """A table or a figure of a paper."""

    paper: str
    """As its folder under `experiments`."""
    kind: str
    number: int

    def __str__(self) -> str:
        is_roman = self.paper in ROMAN and self.kind == "table" and self.number <= len(NUMERALS)
        return f"{self.kind} {NUMERALS[self.number - 1] if is_roman else self.number}"


def title(paper: str) -> str:
    """What a paper is called; its folder's name where it is not known."""
    return PAPERS.get(paper, (paper,))[0]


def places(source: str, paper: str = "") -> list[Place]:
    """The tables and figures that a source names, as `tables 3 and 7 to 9, figure 8; PTD-P 2021, figure 17`.

    Args:
        paper: whose they are until another one is named; those of no known paper are left out.
    """
    found: list[Place] = []
    for part in re.split(r";|, and (?=[A-Z])", source):
        paper = _named(part) or (paper if SAME.match(part) else "")
        if paper in PAPERS:
            found += [Place(paper, kind.lower(), n) for kind, text in PLACE.findall(part) for n in _numbers(text)]
    return list(dict.fromkeys(found))


def _named(part: str) -> str | None:
    """The paper that a part of a source names first."""
    text = part.lower()
    at = {paper: text.find(name) for paper, (_, *names) in PAPERS.items() for name in names if name in text}
    return min(at, key=lambda paper: at[paper]) if at else None


def _numbers(text: str) -> Iterator[int]:
    """`3 and 7 to 9` is 3, 7, 8, 9; of `7a` it is 7, and of `IV` 4."""
    for part in re.split(", | and ", text):
        first, _, last = part.partition(" to ")
        yield from range(_number(first), _number(last or first) + 1)


def _number(text: str) -> int:
    return NUMERALS.index(text) + 1 if text in NUMERALS else int(text.rstrip("abcd"))


def of_experiment(experiment: Experiment) -> list[Place]:
    """The tables and figures that an experiment names as its source, and those that its claims do, the own paper's
    first."""
    own = experiment.id.partition("/")[0]
    found = places(experiment.source, own)
    for claim in experiment.claims:
        found += places(claim.source, own)
    return sorted(dict.fromkeys(found), key=lambda place: (place.paper != own, place))


def answered(experiments: Iterable[Experiment]) -> dict[str, dict[Place, list[str]]]:
    """By paper: every table and figure that has experiments, or published numbers here, with the ids of the
    experiments, those of the paper's own folder first."""
    found: dict[Place, list[str]] = {place: [] for paper in papers() for place in _printed(paper)}
    for experiment in experiments:
        for place in of_experiment(experiment):
            found.setdefault(place, []).append(experiment.id)
    order = [*PAPERS, *sorted({place.paper for place in found} - set(PAPERS))]
    by_paper: dict[str, dict[Place, list[str]]] = {}
    for place in sorted(found, key=lambda p: (order.index(p.paper), p.kind != "table", p.number)):
        ids = sorted(found[place], key=lambda name: (not name.startswith(f"{place.paper}/"), name))
        by_paper.setdefault(place.paper, {})[place] = ids
    return by_paper


def _printed(paper: str) -> Iterator[Place]:
    """The tables and figures of which numbers are in `harness/experiment/published`."""
    for where in dict.fromkeys(published(paper)["where"]):
        for kind, text in PLACE.findall(where):
            yield from (Place(paper, kind.lower(), n) for n in _numbers(text))
