"""Batches, the embedded language, and tables of many records."""

from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.report import results
from impl.data.batches import causal_batch, masked_batch, window_permutation
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from tests.harness.made_up_records import record


@pytest.mark.parametrize("sequences", [8, 512])
def test_causal_batch(sequences: int, data: TokenFolder, benchmark: BenchmarkFixture) -> None:
    tokens, indices = data.tokens("train"), np.arange(sequences)
    batch = benchmark(causal_batch, tokens, indices, seq_len=128, seed=0)
    assert batch.inputs.shape == (sequences, 128)


@pytest.mark.parametrize("sequences", [8, 512])
def test_masked_batch(sequences: int, data: TokenFolder, benchmark: BenchmarkFixture) -> None:
    tokens, indices = data.tokens("train"), np.arange(sequences)
    batch = benchmark(masked_batch, tokens, indices, seq_len=128, seed=0, vocab_size=257)
    assert batch.inputs.shape == (sequences, 128)


def test_window_permutation(benchmark: BenchmarkFixture) -> None:
    windows = benchmark(window_permutation, np.arange(100_000), 100_000, 0, 0)
    assert len(np.unique(windows)) == 100_000


def test_synthetic_language_is_written(tmp_path: Path, benchmark: BenchmarkFixture) -> None:
    config = SyntheticConfig(train_tokens=1_000_000, valid_tokens=10_000)
    folders = (tmp_path / str(i) for i in range(10**6))
    benchmark.pedantic(lambda: write_synthetic(next(folders), config), rounds=5, warmup_rounds=1)


def test_all_tables_of_200_records(benchmark: BenchmarkFixture) -> None:
    records = [
        record(seed=seed, train__lr=lr, train__microbatch=1, plan__dp=dp, model__norm_placement=norm)
        for seed in range(5)
        for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
        for dp in (1, 2, 4, 8)
        for norm in ("pre", "post")
    ]
    assert len(records) == 200
    made = benchmark.pedantic(results.all_tables, (records,), rounds=3, warmup_rounds=1)
    assert {"throughput", "scaling"} <= {table.name for table in made}
