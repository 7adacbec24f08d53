"""Simulated verdicts against papers turn on a machine without the part that their claim is about."""

import pytest

from harness.experiment.loading import experiment_ids
from tests.documents import NULL_MODELS, alike, idealised, null_models
from tests.null_models import Idealised

AGAINST_A_PAPER = ("quantitative", "direction")


@pytest.mark.parametrize("name", experiment_ids())
def test_a_claim_about_a_part_of_the_machine_does_not_hold_without_it(name: str) -> None:
    held = [one for one in idealised(name) if is_against_a_paper(one)]
    timeless = [one.claim.text for one in held if one.claim.about is None and one.depends_on_time]
    assert timeless == [], "claims about speed that name no part of the machine"
    assert [one.claim.text for one in held if one.claim.about and not one.turns] == []


def is_against_a_paper(one: Idealised) -> bool:
    return one.verdict == "reproduced" and one.claim.kind in AGAINST_A_PAPER


def test_the_table_of_null_models_is_what_the_records_say() -> None:
    """It counts how many simulated verdicts survive a free network, free computing and a bubble of zero."""
    assert alike(null_models(), NULL_MODELS.read_text()), "make documents"
