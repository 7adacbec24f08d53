"""The tables of what share of its limit a run reaches, and of where the time goes."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import render
from harness.analysis.breakdown import PARTS, profile_tables
from harness.cli import sweeps
from harness.experiment.loading import load
from harness.records.parts import Limit, Parts, Profile
from harness.records.record import Record
from harness.report.results import all_tables
from tests.harness.calls import answer_every_name, call
from tests.harness.made_up_records import record

SECONDS = {
    "products": 0.04, "attention": 0.02, "optimizer": 0.01, "operators": 0.01, "communication": 0.1, "rest": 0.02,
}  # fmt: skip


def profiled(limits: list[tuple[float, float, float]], **changed: Any) -> Record:
    """A run whose ranks' products, attention and collectives alone take these seconds, and all parts of a step more
    on the second rank."""
    made = record(**changed)
    for i, (rank, alone) in enumerate(zip(made.ranks, limits, strict=True)):
        rank.limit = Limit(*alone)
        parts = {part: seconds * (1 + i) for part, seconds in SECONDS.items()}
        rank.profile = Profile(sum(parts.values()), Parts(**parts))
    return made


def test_the_limit_is_the_rank_with_most_to_do_computing_or_communicating() -> None:
    limit, _ = profile_tables([profiled([(0.05, 0.01, 0.03), (0.06, 0.02, 0.04)], plan__dp=2)])
    (row,) = limit.frame.to_dict("records")
    assert (row["gemm_alone_seconds"], row["attention_alone_seconds"]) == (0.06, 0.02)
    assert row["collective_alone_seconds"] == 0.04
    assert row["limit_seconds"] == pytest.approx(0.08)
    assert row["limit_share"] == pytest.approx(0.8)  # of a step of 0.1 s
    limit, _ = profile_tables([profiled([(0.05, 0.01, 0.09), (0.06, 0.02, 0.04)], plan__dp=2)])
    (row,) = limit.frame.to_dict("records")
    assert row["limit_seconds"] == 0.09


def test_parts_are_means_over_ranks_and_add_up() -> None:
    _, breakdown = profile_tables([profiled([(0.1, 0.1, 0.1)] * 2, plan__dp=2)])
    (row,) = breakdown.frame.to_dict("records")
    assert row["profiled_seconds"] == pytest.approx(0.3)
    assert row["communication_seconds"] == pytest.approx(0.15)
    assert row["communication_share"] == pytest.approx(0.5)
    assert sum(row[f"{part}_seconds"] for part in PARTS) == pytest.approx(row["profiled_seconds"])
    assert sum(row[f"{part}_share"] for part in PARTS) == pytest.approx(1)


def test_repeats_are_one_row_and_only_profiled_points_have_one() -> None:
    records = [profiled([(0.05, 0.01, 0.0)], repeat=i, seconds=s) for i, s in enumerate((0.1, 0.12))]
    records.append(record(model__num_layers=8))
    for table in profile_tables(records):
        assert list(table.frame["n"]) == [2]
        assert len(table.cells) == 1
    names = [table.name for table in all_tables(records)]
    assert names[:3] == ["throughput", "limit", "breakdown"]
    assert not {"limit", "breakdown"} & {table.name for table in all_tables(records[-1:])}


@pytest.mark.parametrize(
    ("asks", "flags", "expected"), [(False, (), False), (True, (), True), (False, ("--profile",), True)]
)
def test_an_experiment_or_the_command_line_asks_for_it(
    asks: bool, flags: tuple[str, ...], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    asked: list[bool] = []
    found = replace(load("quickstart"), profiles=asks)
    answer_every_name(monkeypatch, found)
    monkeypatch.setattr(sweeps, "sweep", lambda chosen, store, datasets, options: asked.append(options.profile))
    call("run", "quickstart", "--device", "cpu", "--out", tmp_path, *flags)
    assert asked == [expected]


def test_milliseconds_and_percent_stand_side_by_side() -> None:
    text = render.markdown(profile_tables([profiled([(0.05, 0.01, 0.0)])])[1])
    assert "| exposed communication (ms) | exposed communication (%) |" in text
    assert "Where the time goes: made_up, smoke tier" in text
    header, _, row = text.splitlines()[2:5]
    cells = dict(zip(header.split("|"), map(str.strip, row.split("|")), strict=True))
    assert cells[" exposed communication (ms) "] == "100"
    assert float(cells[" exposed communication (%) "]) == 50
