"""A case of the fault matrix, and its table; `make faults` carries out every case."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.__main__ import HEADER, row, rows, table
from tests.faults.carry_out import Outcome, carry_out, undisturbed
from tests.faults.cases import Case, cases

KEPT = Path(__file__).resolve().parents[2] / "results" / "faults.md"
CASE = Case("harness", "record write", "SIGKILL")


@pytest.fixture(scope="module")
def expected(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = undisturbed("dp2", tmp_path_factory.mktemp("undisturbed"), tokens)
    assert (found["status"], len(found["steps"])) == ("ok", 6)
    return found


def test_after_a_fault_the_record_is_that_of_an_undisturbed_sweep(
    tokens: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    assert CASE in cases()
    assert not carry_out(CASE, tmp_path, tokens, expected).problem


def test_the_matrix_has_every_rank_and_phase_and_each_case_once() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found)
    assert sum(case.on == "local" for case in found) >= 60
    for rank in ("rank 0", "rank 1"):
        phases = {case.phase for case in found if (case.place, case.fault, case.on) == (rank, "SIGKILL", "local")}
        assert phases >= {"start-up", "forward", "backward", "optimizer", "checkpoint save", "evaluation"}


def test_a_table_tells_what_held_and_what_did_not_and_keeps_what_was_not_run() -> None:
    chosen = cases()[:3]
    outcomes = [Outcome("failed killed", 0), Outcome("ok", 1, problem="a | b\nc"), Outcome("", 0, skipped="no sbatch")]
    found = {case.name: row(case, outcome) for case, outcome in zip(chosen, outcomes, strict=True)}
    text = table(found)
    assert [len(cells) for cells in found.values()] == [len(HEADER)] * 3
    assert "| a / b c |" in text
    assert f"2 of {len(cases())} cases carried out, 1 equal, 1 not, 1 skipped, {len(cases()) - 3} not run.\n" in text
    assert {name: rows(text)[name] for name in found} == found
    again = rows(text) | {chosen[1].name: row(chosen[1], Outcome("ok", 1))}
    assert "2 equal, 0 not" in table(again)


@pytest.mark.skipif(not KEPT.exists(), reason="results/faults.md has not been made")
def test_the_kept_table_is_of_this_matrix() -> None:
    found = rows(KEPT.read_text())
    assert [name for name in found if name.startswith(("local", "slurm"))] == [case.name for case in cases()]
