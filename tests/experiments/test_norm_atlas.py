"""Atlas of norm placements: made-up losses give verdicts both ways, and arms have names of their own."""

import math
from collections import Counter

from experiments.ours.norm_atlas import EXPERIMENT, PLACED
from harness.analysis.stability import arms
from harness.figures.placements import of_stability
from impl.model.norm_placement import PLACEMENTS
from impl.run import Run
from tests.experiments.as_printed import NO, OPEN, YES, judged
from tests.experiments.test_stability import Loss, records

HIGHER = {"pre": 0.1, "post": 0.3, "deepnorm": 0.2}
"""Loss above the other placements'."""


def as_the_papers_say(run: Run) -> float:
    """Losses that are best at 1e-2, but in the standard parametrization at rates that fall with the width."""
    norm, width = run.model.norm_placement, run.model.hidden_size / 64
    is_standard = run.train.parametrization == "standard"
    distance = abs(math.log(run.train.lr * (width**2 if is_standard else 1) / 1e-2))
    if norm == "post" and run.train.lr > 3e-3:
        return 4.0
    return 2.0 + 0.1 * distance + HIGHER.get(norm, 0.0)


def verdicts(loss: Loss) -> list[str]:
    return judged(EXPERIMENT.claims, records(loss, "norm_atlas"))


def test_verdicts_turn() -> None:
    assert verdicts(as_the_papers_say) == [YES] * 10 + [NO]
    other = {"pre": 0.0, "post": 0.0}
    turned = verdicts(lambda run: 2.2 - other.get(run.model.norm_placement, 0.1) * (run.model.norm == "layernorm"))
    assert turned[0] == NO
    assert turned[8] == OPEN or turned[8] == YES
    against = lambda run: 2.0 + (0.1 if run.model.norm_placement not in other or run.model.norm == "dyt" else 0.0)
    assert verdicts(against)[3:9] == [NO] * 6
    falls = lambda run: 0.2 * abs(math.log(run.train.lr * (run.model.hidden_size / 64) ** 2 / 1e-2))
    breaks = lambda run: run.model.norm_placement in ("deepnorm", "olmo2") and run.train.lr > 1e-3
    broken = verdicts(lambda run: 4.0 if breaks(run) else 2.0 + falls(run))
    assert [broken[i] for i in (1, 2, 9)] == [NO] * 3
    alike = verdicts(lambda run: 2.0)
    assert alike[3:8] == [OPEN] * 5
    assert alike[9:] == [YES, YES]


def test_every_kind_has_an_arm_of_each_size() -> None:
    names = Counter(one.norm for one in arms(records(as_the_papers_say, "norm_atlas")))
    assert names == dict.fromkeys([*PLACED, "pre dyt", "pre standard"], 4)
    assert len(PLACED) == len(PLACEMENTS) - 1 >= 10


def test_the_figure_has_a_panel_of_every_arm() -> None:
    drawn = of_stability(records(as_the_papers_say, "norm_atlas"))
    titles = [ax.get_title().partition(",")[0] for ax in drawn.axes if ax.get_title()]
    assert sorted(titles) == sorted([*PLACED, "pre dyt", "pre standard"])
