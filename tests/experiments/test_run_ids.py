"""Runs of every experiment are valid, and their ids fixed: committed records are found by them.

`python -m tests.experiments.test_run_ids` writes the hashes anew.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.experiment.claims import evidence
from harness.experiment.experiment import TIERS
from harness.experiment.loading import experiment_ids, load

FILE = Path(__file__).with_name("run_ids.json")


def hashes() -> dict[str, str]:
    """Return a hash of the sorted run ids of each experiment and tier, with their number."""
    found = {}
    for name in experiment_ids():
        for tier, runs in load(name).runs.items():
            ids = " ".join(sorted(run.id for run in runs))
            found[f"{name} {tier}"] = f"{len(runs)} {hashlib.sha256(ids.encode()).hexdigest()[:16]}"
    return found


def test_run_ids_are_those_of_the_committed_records() -> None:
    assert hashes() == json.loads(FILE.read_text())


@pytest.mark.parametrize("name", experiment_ids())
def test_every_run_of_every_tier_is_valid_and_its_own(name: str) -> None:
    experiment = load(name)
    for tier in TIERS:
        runs = experiment.runs[tier]
        assert [why for run in runs for why in replace(run, engine="native").problems()] == []
        assert len({run.id for run in runs}) == len(runs)
    assert experiment.table is None or experiment.table([]).frame.empty
    assert experiment.figure is None or experiment.figure([]) is None
    assert evidence(experiment.claims, []) == {"": [None] * len(experiment.claims)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(hashes(), indent=1) + "\n")
