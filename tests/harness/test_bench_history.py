"""Change points of benchmarks over commits, on made-up series and on what is committed."""

import json
import random
from pathlib import Path

import pytest

from harness.bench import history
from harness.bench.history import AtCommit, changes, committed, course, series_of
from harness.bench.reports import Report
from tests.harness.calls import call, refused

NOISE = 0.02


def series(*seconds: float, noise: float = NOISE) -> list[AtCommit]:
    return [AtCommit(f"commit{i:02}", value, noise) for i, value in enumerate(seconds)]


def noisy(seed: int, *levels: tuple[float, int]) -> list[AtCommit]:
    source = random.Random(seed)
    return series(*(level * source.gauss(1, NOISE) for level, count in levels for _ in range(count)))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_found_where_it_is_with_its_size(seed: int) -> None:
    [found] = changes(noisy(seed, (1.0, 8), (1.3, 6)), 0.15)
    assert found.commit == "commit08"
    assert found.ratio == pytest.approx(1.3, rel=0.05)
    assert str(found).endswith("% at commit08")


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_change_and_neither_is_a_slow_drift_below_the_tolerance(seed: int) -> None:
    assert changes(noisy(seed, (1.0, 12)), 0.15) == []
    assert changes(series(*(1 + 0.01 * i for i in range(10))), 0.15) == []


@pytest.mark.parametrize("seed", range(10))
def test_several_steps_are_found_in_order(seed: int) -> None:
    found = changes(noisy(seed, (1.0, 6), (2.0, 6), (1.4, 6)), 0.15)
    assert [one.commit for one in found] == ["commit06", "commit12"]
    assert [round(one.ratio, 1) for one in found][1] == 0.7


def test_a_step_within_the_noise_of_its_runs_and_two_measurements_decide_nothing() -> None:
    assert changes(series(1.0, 1.0, 1.0, 1.3, 1.3, noise=0.5), 0.15) == []
    assert changes(series(1.0, 2.0), 0.15) == []
    assert changes([], 0.15) == []
    assert [one.commit for one in changes(series(1.0, 1.0, 2.0), 0.15)] == ["commit02"]


def report(median: float, commit: str, processor: str = "one") -> Report:
    one = {"fullname": "tests/bench/test_a.py::test_b", "commit": commit}
    stats = {"median": median, "iqr": 0.1, "rounds": 5}
    about = {"processor": processor, "git": {"commit": commit}}
    return Report.model_validate({"machine_info": {"environment": about}, "benchmarks": [one | {"stats": stats}]})


def test_machines_are_apart_and_a_measurement_that_is_kept_counts_once() -> None:
    kept = [report(1.0, "a"), report(1.0, "a"), report(2.0, "b"), report(9.0, "c", "another")]
    found = series_of(kept)
    assert {machine: [one.commit for one in of_one] for (_, machine), of_one in found.items()} == {
        "one": ["a", "b"], "another": ["c"],
    }  # fmt: skip
    assert course(found["test_a.py::test_b", "one"]) == "▁█"


def test_the_committed_baselines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(committed()) > 3
    answer = call("bench", "--history", "--only", "step_time[fp32-zb-v]", "--json")
    [row] = json.loads(answer.output)["rows"]
    assert row["n"] >= 2
    assert "no committed benchmark" in refused("bench", "--history", "--only", "nothing")
    monkeypatch.setattr(history, "CODE", tmp_path)
    assert "no commit has results/bench/baseline.json" in refused("bench", "--history")
