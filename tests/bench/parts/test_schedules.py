"""Pipeline schedules of eight ranks and 64 microbatches: made and checked, and simulated; and large ones."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from impl.pipeline.schedules import SCHEDULES, build
from impl.pipeline.simulate import simulate, uniform

P, M = 8, 64
CHUNKS = {"interleaved": 2, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_built(name: str, benchmark: BenchmarkFixture) -> None:
    schedule = benchmark(build, name, P, M, CHUNKS.get(name, 1))
    assert len(schedule.rows) == P


@pytest.mark.parametrize("seconds", ["exact", "float"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_simulated(name: str, seconds: str, benchmark: BenchmarkFixture) -> None:
    chunks = CHUNKS.get(name, 1)
    exact = uniform(chunks=chunks)
    cost = exact if seconds == "exact" else lambda action: float(exact(action))
    timeline = benchmark.pedantic(
        simulate, setup=lambda: ((build(name, P, M, chunks), cost), {}), rounds=20, warmup_rounds=2
    )
    assert timeline.bubble > 0


@pytest.mark.parametrize("case", [("one_f_one_b", 64, 512), ("interleaved", 16, 512, 4)])
def test_65536_actions_are_simulated(case: tuple, benchmark: BenchmarkFixture) -> None:
    schedule = build(*case)
    timeline = benchmark.pedantic(simulate, args=(schedule, lambda action: 1.5, 0.1), rounds=5, warmup_rounds=1)
    assert len(timeline.spans) == 65_536
