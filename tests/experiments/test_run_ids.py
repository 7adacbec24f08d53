"""Run ids of every experiment and tier: committed records are found by them, so they change only on purpose.

`python -m tests.experiments.test_run_ids` writes the hashes anew.
"""

import hashlib
import json
from pathlib import Path

from harness.experiment.experiment import experiment_ids, load

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


if __name__ == "__main__":
    FILE.write_text(json.dumps(hashes(), indent=1) + "\n")
