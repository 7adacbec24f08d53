"""`make smoke` tells what became of every experiment, and fails where one did."""

from pathlib import Path

import pytest

from harness.experiment.loading import experiment_ids
from tests import smoke
from tests.smoke import Done


def test_all_experiments_are_run_and_a_failed_one_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    became = {"quickstart": {"ok": 6, "failed": 1}}
    monkeypatch.setattr(smoke, "run", lambda name, out: Done(name, became.get(name, {"ok": 3, "nan": 1}), 12.3))
    keep = tmp_path / "smoke.md"
    assert smoke.main(keep=keep) == 1
    told = capsys.readouterr().out
    names = experiment_ids()
    assert f"{len(names) - 1} of {len(names)} experiments ended well" in told
    assert "not quickstart" in told
    assert all(f"| {name} |" in keep.read_text() for name in names)
    assert "| quickstart | 6 ok, 1 failed | 12 |" in keep.read_text()
    assert smoke.main(only="ptdp2021") == 0


def test_a_command_that_fails_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Done("quickstart", {}, 1.0).is_well
    assert not Done("quickstart", {"timeout": 1}, 1.0).is_well
    assert Done("quickstart", {"ok": 1, "invalid": 1}, None).is_well
    assert smoke.main(only="nothing like it") == 2
    assert "quickstart" in capsys.readouterr().err
