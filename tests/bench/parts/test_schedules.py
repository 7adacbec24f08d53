"""Pipeline schedules of eight ranks and 64 microbatches: made and checked, and simulated."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from impl.pipeline.schedules import SCHEDULES, build
from impl.pipeline.simulate import simulate, uniform

P, M = 8, 64
CHUNKS = {"interleaved": 2}


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
