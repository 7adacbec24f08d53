from pathlib import Path

import pytest

from harness import figures
from impl.errors import InputError
from tests.harness.made_up_records import record, without_numbers


def sweep() -> list[dict]:
    runs = [
        record(parameters=n, model__hidden_size=h, model__norm_placement=norm, train__steps=20)
        for n, h in ((481_152, 128), (2_000_000, 256))
        for norm in ("pre", "post")
    ]
    runs[-1] |= {"status": "nan", "evaluations": []}
    return [*runs, record(plan__dp=2, train__steps=20, cores=1), record(status="invalid", plan__dp=3)]


def test_only_figures_with_data_are_written_and_stale_ones_go(tmp_path: Path) -> None:
    first = figures.write(sweep(), tmp_path)
    assert {p.name for p in first} == {
        f"{stem}.{suffix}" for stem in ("curves", "scaling", "perplexity_valid") for suffix in ("png", "svg")
    }
    figures.write([record(train__steps=20)], tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {"curves"}


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        figures.write([record(train__steps=20)], tmp_path / folder)
    for name in ("curves.png", "curves.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_runs_without_numbers_draw_nothing(tmp_path: Path) -> None:
    assert figures.write([record(status="invalid"), without_numbers(record(seed=1), "timeout")], tmp_path) == []
    assert figures.write([], tmp_path) == []


def test_mixed_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiers"):
        figures.write([record(), record(tier="paper")], tmp_path)
