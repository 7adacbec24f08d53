"""TorchTitan's tables as runs: what is published of them, and the ratios that claims are about."""

import pytest

from experiments.torchtitan2024.llama import COMPILED, EIGHT_BITS, EXPERIMENT, GPUS, PAPER, STAGES, Change
from harness.experiment.kit import apart_from
from harness.experiment.published import published
from harness.predict.published_memory import torchtitan


def published_ratios(change: Change) -> list[float]:
    """What a change gives in the paper, in the order of its points."""
    rest = lambda run: apart_from(run, *change.fields)
    base = {run: min((one for one in PAPER if rest(one) == rest(run)), key=change.degree) for run in PAPER}
    rate = lambda run: PAPER[run].printed["published_rate"]
    return [rate(run) / rate(base[run]) for run in PAPER if change.degree(run) != change.degree(base[run])]


@pytest.mark.parametrize(
    ("change", "ratios"),
    [(GPUS, [0.973, 0.977, 0.982]), (EIGHT_BITS, [1.280, 1.286]), (COMPILED, [1.157, 1.162]), (STAGES, [1.28])],
    ids=["gpus", "eight bits", "compiled", "stages"],
)
def test_claims_state_the_papers_ratios(change: Change, ratios: list[float]):
    assert published_ratios(change) == pytest.approx(ratios, abs=5e-4)


def test_runs_are_those_of_the_tables():
    assert list(PAPER) == EXPERIMENT.runs["paper"]
    assert {run.plan.world_size for run in PAPER} == {8, 128, 512}
    pipelines = [run for run in PAPER if run.plan.pp > 1]
    assert [(run.microbatches, run.train.microbatch) for run in pipelines] == [(8, 4), (16, 2)]
    for run in PAPER:
        assert bool(run.untrainable()) is (run.precision == "fp8")


def test_memory_and_rates_are_kept_apart():
    rows = published("torchtitan2024")
    assert set(rows["unit"]) == {"GiB per GPU", "tokens/s per GPU"}
    assert len(torchtitan()) + len(PAPER) == len(rows)
