"""Committed verdicts are those that the records give, and none that says a paper is right is chance."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from scipy import stats

from harness.experiment import claims
from harness.experiment.claims import Claim, evidence, verdict
from harness.experiment.tiers import TIERS
from harness.records.statistics import Estimate
from tests import verdicts
from tests.documents import ROOT, found
from tests.test_independent import SURE


def test_every_verdict_and_every_count_is_what_the_records_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts.main() == 0, capsys.readouterr().out


def test_verdicts_that_were_changed_in_a_file_are_found(tmp_path: Path) -> None:
    page = "results/zerobubble2024/memory"
    changes = {
        f"{page}/small/tables/claims.csv": ("reproduced,4 of 4", "partly,4 of 4"),
        f"{page}/README.md": ("| partly (11 of 12) |", "| reproduced |"),
        "EXPERIMENTS.md": ("| 3 reproduced | 2 reproduced, 1 partly |", "| 3 reproduced | 3 reproduced |"),
        "README.md": (
            "own question: asked by no paper | measured | 1",
            "own question: asked by no paper | measured | 9",
        ),
    }
    ignored = shutil.ignore_patterns("records", "simulated", "figures", "*.png")
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=ignored)
    for path, (before, after) in changes.items():
        text = (ROOT / path).read_text()
        assert before in text
        (tmp_path / path).write_text(text.replace(before, after, 1))
    differing = {one.path for one in verdicts.pairs(tmp_path) if not one.is_equal}
    assert differing == set(changes)
    (tmp_path / page / "small/tables/claims.csv").unlink()
    gone = [one for one in verdicts.pairs(tmp_path) if one.path == f"{page}/small/tables/claims.csv"]
    assert gone
    assert {one.committed for one in gone} == {""}


OF_A_PAPER = ("direction", "quantitative")
"""Kinds of claims that hold a paper against runs."""
BYTES = {
    "korthikanti2022/activation_recomputation", "korthikanti2022/memory_per_gpu",
    "korthikanti2022/sequence_parallel_memory", "zero2019/constant_buffers", "zero2019/zero_max_model_size",
    "zero2019/zero_memory", "zero2019/zero_r", "zerobubble2024/memory",
}  # fmt: skip
"""Experiments whose exact points compare counted bytes, which are the same in every repeat."""


class Judgement(NamedTuple):
    """Claim with the points of a tier's runs, and whether each holds."""

    experiment: str
    claim: Claim
    is_measured: bool
    verdict: str
    points: list[tuple[bool | Estimate, bool | None]]


def judgements() -> Iterator[Judgement]:
    """Yield every claim with the points that its check compares, by tier, measured and simulated apart."""
    own_holds, points = claims.holds, list[tuple[bool | Estimate, bool | None]]()

    def noted(point: bool | Estimate) -> bool | None:
        points.append((point, held := own_holds(point)))
        return held

    everything = found()  # what it loads keeps the function as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "holds", noted)
        for experiment, records, _ in everything:
            for tier in TIERS:
                of_tier = [one for one in records if one.tier == tier]
                for is_measured in (True, False):
                    own = [one for one in of_tier if one.is_simulated != is_measured]
                    for claim in experiment.claims if own else ():
                        points.clear()
                        said = evidence([claim], of_tier if claim.compares and not is_measured else own)
                        for one in (of_one[0] for of_one in said.values() if of_one[0]):
                            yield Judgement(experiment.id, claim, is_measured, verdict(one), list(points))


@pytest.fixture(scope="module")
def judged() -> list[Judgement]:
    return list(judgements())


def chance(point: Estimate) -> float:
    """Return the one-sided p that what holds by this estimate does not; of a simulated value, by a normal error."""
    if point.half_width is None:
        return 1.0
    if point.half_width == 0:
        return 0.0 if point.mean > 0 else 1.0
    if point.freedom == math.inf:
        return float(stats.norm.sf(point.mean / point.half_width * stats.norm.isf(0.05)))
    return float(stats.t.sf(point.mean / point.half_width * stats.t.isf(0.025, point.freedom), point.freedom))


def not_sure(judged: Iterable[Judgement]) -> list[str]:
    """Return the claims with a point that is said to hold, and by chance does with more than 1 in 20."""
    return [
        f"{one.experiment}: {one.claim.text}: {point}"
        for one in judged
        for point, held in one.points
        if held and isinstance(point, Estimate) and chance(point) > 0.05
    ]


def test_no_point_holds_by_chance(judged: list[Judgement]) -> None:
    assert not_sure(judged) == []


def without_intervals(point: bool | Estimate) -> bool:
    return point if isinstance(point, bool) else point.mean > 0


def certain(_: bool | Estimate) -> bool:
    return True


@pytest.mark.parametrize("careless", [without_intervals, certain])
def test_points_that_hold_by_chance_are_found(
    careless: Callable[[bool | Estimate], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "holds", careless)
    assert len(not_sure(judgements())) > 20


def test_claims_about_a_paper_that_are_exact_compare_bytes_or_say_that_they_count_runs(judged: list[Judgement]) -> None:
    exact = [
        (one.experiment, one.claim.text)
        for one in judged
        if one.is_measured and one.claim.kind in OF_A_PAPER and any(isinstance(point, bool) for point, _ in one.points)
    ]
    assert exact
    assert [(name, text) for name, text in exact if name not in BYTES and "run" not in text] == []


def test_every_direction_that_noisy_runs_reproduce_is_computed_again_without_this_project(
    judged: list[Judgement],
) -> None:
    said = {
        (one.experiment, one.claim.text)
        for one in judged
        if one.is_measured and one.claim.kind in OF_A_PAPER and one.verdict in ("reproduced", "partly")
        if any(isinstance(point, Estimate) and point.half_width for point, held in one.points if held)
    }
    assert said == set(SURE), "tests/test_independent.py computes each from the JSON of the records"


def test_no_published_number_is_reproduced_but_memory_as_the_readme_says(judged: list[Judgement]) -> None:
    said = "Of published numbers only memory of one of zero bubble's schedules is reproduced"
    assert said in " ".join((ROOT / "README.md").read_text().split())
    found = {one.claim.text for one in judged if one.claim.kind == "quantitative" and one.verdict == "reproduced"}
    assert found == {"ZB-H2 takes as many times 1F1B's memory as ZB-2p, within 15%, for the paper's models"}
