"""Progress of long work where standard error is no terminal, as in a log of a job."""

import time

import pytest

from harness import terminal
from harness.terminal import shown_progress


def test_lines_come_while_work_lasts_and_stop_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.02)
    for _ in shown_progress("ab", "counting"):
        time.sleep(0.3)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "counting: 0 of 2 done after 0 s"
    assert told[-1].startswith("counting: 1 of 2 done after ")
    time.sleep(0.1)
    assert not capsys.readouterr().err


def test_short_work_and_work_that_fails_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        [1 // item for item in shown_progress(range(2), "dividing")]
    assert capsys.readouterr().err == ""
