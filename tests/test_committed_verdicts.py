"""Committed verdicts are those that the records give, and a changed one is found."""

import shutil
from pathlib import Path

import pytest

from tests import verdicts
from tests.documents import ROOT


def test_every_verdict_and_every_count_is_what_the_records_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts.main() == 0, capsys.readouterr().out


def test_verdicts_that_were_changed_in_a_file_are_found(tmp_path: Path) -> None:
    page = "results/zerobubble2024/memory"
    changes = {
        f"{page}/small/tables/claims.csv": ("reproduced,4 of 4", "partly,4 of 4"),
        f"{page}/README.md": ("| partly (21 of 24) |", "| reproduced |"),
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
