"""Memory of Llamas under fully sharded data parallelism."""

from dataclasses import replace

import pytest

from harness.predict.published_memory import torchtitan
from impl.cost.parameters import count_parameters
from impl.model.sizes import named
from impl.simulator.llama import RESERVED, Layout, peak_bytes

ON_8 = Layout(dp=8, tp=1, pp=1, chunks=1, seq_len=8192, microbatch=2, microbatches=1, recompute="operators")
IN_A_PIPELINE = Layout(dp=8, tp=8, pp=8, chunks=1, seq_len=8192, microbatch=4, microbatches=8, recompute="full")


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_parameters_are_the_published(name: str, billions: float) -> None:
    assert count_parameters(named(f"llama-3.1-{name}")) / 1e9 == pytest.approx(billions, abs=0.01)


def test_torchtitans_published_rows_are_within_8_percent() -> None:
    rows = torchtitan()
    assert len(rows) == 10
    assert max(map(abs, rows)) <= 0.08


def test_more_ranks_save_what_the_states_take() -> None:
    model = named("llama-3.1-8b")
    saved = peak_bytes(model, ON_8) - peak_bytes(model, replace(ON_8, dp=128))
    assert saved == pytest.approx(RESERVED * 12 * count_parameters(model) * (1 / 8 - 1 / 128))


def test_memory_holds_the_states_and_grows_with_what_is_kept() -> None:
    model = named("llama-3.1-8b")
    assert peak_bytes(model, ON_8) > 12 * count_parameters(model) / 8
    assert peak_bytes(model, ON_8) > peak_bytes(model, replace(ON_8, recompute="full"))
    assert peak_bytes(model, ON_8) > peak_bytes(model, replace(ON_8, microbatch=1))
    large = named("llama-3.1-405b")
    fewer = replace(IN_A_PIPELINE, microbatches=2)
    assert peak_bytes(large, IN_A_PIPELINE) > peak_bytes(large, fewer)
