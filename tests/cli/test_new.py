"""The verb `new`: files of one's own that run as they are."""

from pathlib import Path

import pytest

from harness.cli.new import KINDS
from harness.experiment.loading import load
from harness.predict.systems import load_system
from impl.pipeline import schedules
from tests.harness.calls import call, refused


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, in which modules are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_experiment_runs_by_its_name_or_file_and_judges_its_claim() -> None:
    assert "  lmscale run norms_of_a_test.py" in call("new", "experiment", "norms_of_a_test").output
    for name in ("norms_of_a_test.py", "norms_of_a_test", "./norms_of_a_test.py"):
        answer = call("run", name, "--dry-run", "--tier", "paper")
        assert (answer.status, "12 of 12 points would be run" in answer.output) == (0, True), answer
    found = load("norms_of_a_test.py")
    assert found.id == "norms_of_a_test"
    assert found.question.startswith("Do models whose norms stand before the blocks")
    assert found.claims[0].check([]) is None


def test_a_schedule_is_built_and_drawn() -> None:
    assert call("new", "schedule", "mine_in_a_test").status == 0
    answer = call("timeline", "--plan.pp", "2", "--plan.schedule", "mine_in_a_test:mine_in_a_test")
    assert answer.status == 0, answer.errors
    assert len(schedules.build("mine_in_a_test:mine_in_a_test", 2, 4).rows) == 2


def test_a_system_predicts_under_its_own_name() -> None:
    assert call("new", "system", "ours").status == 0
    assert load_system("ours.yaml").name == "ours"
    assert load_system("ours.yaml").device == load_system("h100").device
    assert call("predict", "--system", "ours.yaml", "--model", "gpt-2m").status == 0


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_are_none_or_taken_are_refused_and_nothing_is_overwritten(kind: str) -> None:
    for name in ("1st", "a-b", "class", "../up"):
        assert "cannot be a name in Python" in refused("new", kind, name)
    assert call("new", kind, "other_in_a_test").status == 0
    [path] = Path().iterdir()
    path.write_text("kept")
    assert f"{path} is there already" in refused("new", kind, "other_in_a_test")
    assert path.read_text() == "kept"
    taken = {"experiment": "quickstart", "schedule": "gpipe", "placement": "pre", "system": "h100"}
    assert f"{taken[kind]!r} is the name of another {kind}" in refused("new", kind, taken[kind])
    assert list(Path().iterdir()) == [path]
