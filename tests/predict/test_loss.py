"""Forecasts of the final loss: laws that are known are found again, and what no law describes has no forecast."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from harness.analysis.scaling_law import Law
from harness.predict.loss import Coming, loss_forecast
from harness.records.parts import Data, LossForecast
from harness.records.record import Record
from impl.cost.parameters import count_parameters
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_records import record_of

LAW = Law(1.2, 9.0, 90.0, 0.3, 0.35)
TEXT = "ef" * 32
SIZES, STEPS = (32, 64, 96, 128), (100, 300, 900)


def run_of(hidden: int, steps: int, seed: int = 0, decay: Literal["cosine", "constant"] = "cosine") -> Run:
    return Run(
        model=ModelConfig(num_layers=2, hidden_size=hidden, num_heads=2, seq_len=64, vocab_size=257),
        train=Recipe(steps=steps, global_batch=8, microbatch=8, warmup_steps=10, decay=decay),
        evaluation=EvaluationConfig(every=steps // 10, sequences=16),
        seed=seed,
    )


def parameters(run: Run) -> int:
    return count_parameters(run.model, 257)


def ended(run: Run, loss: float, early: float) -> Record:
    """A record that ends with a loss, and on its way is `early` times as high as the law."""
    full = record_of(run)
    full.resolved = replace(full.resolved, data=Data(sha256=TEXT), vocab_size=257, parameters=parameters(run))
    last = replace(full.evaluations[-1], name="valid", kind="causal", step=run.train.steps, tokens=1000)
    course = [
        replace(last, step=step, nats=1000 * early * LAW.loss(parameters(run), step * run.tokens_per_step))
        for step in range(run.evaluation.every, run.train.steps, run.evaluation.every)
    ]
    full.evaluations = [*course, replace(last, nats=1000 * loss)]
    full.steps = full.steps[:: max(1, run.train.steps - 1)]
    return full


def truth(run: Run) -> float:
    return LAW.loss(parameters(run), run.train.steps * run.tokens_per_step)


def family(noise: float, seed: int = 0, decay: Literal["cosine", "constant"] = "cosine") -> list[Record]:
    """Two seeds of every size and number of steps, around the law by a normal noise."""
    drawn = np.random.default_rng(seed)
    every = [run_of(hidden, steps, s, decay) for hidden in SIZES for steps in STEPS for s in range(2)]
    return [
        ended(run, truth(run) * float(np.exp(noise * drawn.normal())), 1.0 if decay == "constant" else 1.5)
        for run in every
    ]


def forecast(run: Run, finished: Sequence[Record], text: str = TEXT) -> LossForecast | str | None:
    coming = Coming(run=run, parameters=parameters(run), vocabulary=257, data_sha256=text)
    return loss_forecast(coming, finished)


LARGER = run_of(192, 1800)


@pytest.mark.parametrize("decay", ["cosine", "constant"])
def test_the_interval_holds_the_loss_of_a_known_law(decay: Literal["cosine", "constant"]) -> None:
    """Where the rate decays, losses on the way are half as high again as the law, and are not looked at."""
    run = run_of(192, 1800, decay=decay)
    made = forecast(run, family(0.003, decay=decay))
    assert isinstance(made, LossForecast)
    assert made.low < truth(run) < made.high
    assert made.low < made.nats < made.high
    assert made.nats == pytest.approx(truth(run), rel=0.02)
    assert made.high / made.low < 1.2
    assert (made.runs, made.off < 0.005) == (24, True)


def test_nine_of_ten_new_runs_end_inside() -> None:
    inside = 0
    for seed in range(12):
        made = forecast(LARGER, family(0.005, seed))
        assert isinstance(made, LossForecast)
        new = truth(LARGER) * float(np.exp(0.005 * np.random.default_rng(1000 + seed).normal()))
        inside += made.low <= new <= made.high
    assert inside >= 9


def test_noise_and_distance_widen_the_interval() -> None:
    def width(run: Run, noise: float) -> float:
        made = forecast(run, family(noise))
        assert isinstance(made, LossForecast)
        return made.high / made.low

    near = width(LARGER, 0.001)
    assert 1 < near < width(LARGER, 0.01)
    assert near < width(run_of(2048, 100_000), 0.001)


def test_too_few_records_and_other_texts_give_none() -> None:
    finished = family(0.003)
    assert forecast(LARGER, []) is None
    assert forecast(LARGER, [one for one in finished if one.run.model.hidden_size < 96]) is None
    assert forecast(LARGER, finished, text="ab" * 32) is None
    post = replace(LARGER, model=replace(LARGER.model, norm_placement="post"))
    constant = run_of(192, 1800, decay="constant")
    shorter = replace(LARGER, evaluation=replace(LARGER.evaluation, sequences=8))
    assert [forecast(run, finished) for run in (post, constant, shorter)] == [None] * 3
    failed = [replace(one, status="failed") for one in finished]
    assert forecast(LARGER, failed) is None


def test_a_law_that_the_runs_reject_gives_none_and_says_so() -> None:
    rejected = forecast(LARGER, family(0.1))
    assert isinstance(rejected, str)
    assert "24 finished runs are" in rejected
    assert "off their law, over 2%" in rejected


def test_one_run_of_each_size_says_nothing_of_its_scatter() -> None:
    every = [run_of(32 * (i + 1), 100 * (i % 3 + 1)) for i in range(6)]
    alone = [ended(run, truth(run), 1.5) for run in every]
    assert "no model size has a second finished run" in str(forecast(LARGER, alone))
