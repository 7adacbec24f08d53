"""nanotron's figure as runs: sizes, steps and rates that its texts state elsewhere, and verdicts that turn."""

from collections.abc import Callable

import pytest

from experiments.nanotron2025.llama import EXPERIMENT, PAPER
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.flops import model_flops
from impl.cost.parameters import count_parameters
from impl.cost.peaks import peak_flops
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, YES, fast, simulated, verdicts

H100 = "NVIDIA H100 80GB HBM3"
PEAK = peak_flops(H100, "bf16") or 0.0


def test_every_row_is_a_run_of_the_size_that_its_text_has():
    assert list(PAPER) == EXPERIMENT.runs["paper"]
    assert sum(map(len, (one.printed for one in PAPER.values()))) == len(published("nanotron2025"))
    assert {run.train.global_batch for run in PAPER if run.plan.world_size > 32} == {256}
    for run, one in PAPER.items():
        size = count_parameters(run.model) / 1e9
        assert one.model == f"Llama {size:.3g}B" or (one.model, round(size, 1)) == ("Llama 80.0B", 80.0)


@pytest.mark.parametrize(
    ("size", "gpus", "rate"),
    [("1.34B", 8, 38894.51), ("1.34B", 16, 36497.09), ("1.34B", 32, 33677.07), ("8.86B", 64, 6555.04)],
)
def test_rates_are_those_of_a_copy_of_the_log(size: str, gpus: int, rate: float):
    """eyao600/Rapid-LLM at 24ef24c, validation_scripts/huggingface_data/bench_final2_mod_add.csv."""
    [(run, one)] = [
        (run, one)
        for run, one in PAPER.items()
        if (one.model, run.plan.world_size, run.train.global_batch) == (f"Llama {size}", gpus, 256)
    ]
    flops = model_flops("ptdp", run.model, 1) / run.model.seq_len
    assert PEAK * one.printed["published_mfu"] / flops == pytest.approx(rate, rel=1e-3)


def test_rates_of_tensor_parallelism_are_the_flops_beside_them():
    """Tokens and FLOPs per second fit this model only; the comments give both."""
    teraflops = {2: 363.66, 4: 345.51, 8: 279.50, 16: 158.10, 32: 92.66}
    alone = {run.plan.tp: one for run, one in PAPER.items() if run.plan.dp == run.plan.pp == run.microbatches == 1}
    assert {tp: one.printed["published_mfu"] * PEAK / 1e12 for tp, one in alone.items()} == pytest.approx(
        teraflops, rel=1e-4
    )


def cells(mfu: Callable[[Run], float], memory: float = 1.0) -> list[Record]:
    """The paper's runs at a utilization, with published memory times a factor."""
    held = lambda run: memory * PAPER[run].printed.get("published_memory", 1e9)
    return [simulated(run, PEAK * mfu(run), memory=held(run), device=H100) for run in PAPER]


def test_verdicts_of_the_paper_turn():
    printed = lambda run: PAPER[run].printed["published_mfu"]
    assert verdicts(EXPERIMENT, cells(printed)) == [YES, "partly", YES, YES, ABSENT, *[YES] * 4]
    rising = lambda run: 0.1 + run.plan.world_size / 1000
    assert verdicts(EXPERIMENT, cells(rising, 2.0)) == [NO] * 4 + [ABSENT] + [NO] * 4


def test_verdicts_of_small_runs_turn():
    small = EXPERIMENT.runs["smoke"]
    as_published = [fast(run, 1e9 / run.plan.world_size * (0.5 if run.plan.tp > 1 else 1)) for run in small]
    assert verdicts(EXPERIMENT, as_published) == [ABSENT, YES, ABSENT, ABSENT, YES, YES, ABSENT, ABSENT, ABSENT]
    contrary = [fast(run, 1e9 * run.plan.tp) for run in small]
    assert verdicts(EXPERIMENT, contrary) == [ABSENT, NO, ABSENT, ABSENT, NO, NO, ABSENT, ABSENT, ABSENT]
