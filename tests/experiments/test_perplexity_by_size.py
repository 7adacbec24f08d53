"""Loss by model size: each size at its best rate, and verdicts that turn."""

import math
from collections.abc import Callable
from dataclasses import replace

from experiments.ours import perplexity_by_size as experiment
from harness.experiment.loss_by_size import BOOKS, LAMBADA, WIKITEXT, at_best_rate, figure, table, tokens
from harness.records.parts import HELD_OUT
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, OPEN, YES, judged
from tests.harness.made_up_records import record_of

Loss = Callable[[Run], float]
BEST = {64: 8e-3, 128: 4e-3, 192: 4e-3, 256: 2e-3, 384: 1e-3}
RUNS = [
    *experiment.trained(experiment.CPU, experiment.SIZES, experiment.RATES, experiment.FEW, [0]),
    *(
        run
        for size in experiment.SIZES
        for steps, seeds in ((experiment.FEW, [1, 2]), (experiment.MANY, [0, 1, 2]))
        for run in experiment.trained(experiment.CPU, [size], [BEST[size.hidden_size]], steps, seeds)
    ),
]


def records(loss: Loss) -> list[Record]:
    """Return records with this loss of held-out texts; that of the validation text is lowest at BEST."""
    made = []
    for run in RUNS:
        full = record_of(run, tier="small")
        value = loss(run) + 0.001 * run.seed
        off = abs(math.log(run.train.lr / BEST[run.model.hidden_size]))
        one = replace(full.evaluations[-1], tokens=1000, words=1000, bytes=1000, correct=None, total=None)
        full.evaluations = [
            replace(one, name=HELD_OUT, kind="causal", nats=1000 * (value + off)),
            replace(one, name=BOOKS, kind="words", nats=1000 * value),
            replace(one, name=WIKITEXT, kind="words", nats=1000 * value),
            replace(one, name=LAMBADA, kind="last_word", nats=1000 * value),
        ]
        full.steps = full.steps[:: run.train.steps - 1]
        made.append(full)
    return made


def falls_if_many(run: Run) -> float:
    """Return a loss that falls with size after many steps, and rises after few."""
    size = math.log(run.model.hidden_size)
    return 5.0 - 0.4 * size if run.train.steps == experiment.MANY else 3.0 + 0.1 * size


def verdicts(found: list[Record]) -> list[str]:
    return judged(experiment.EXPERIMENT.claims, found)


def test_verdicts_turn() -> None:
    assert verdicts(records(falls_if_many)) == [YES] * 5
    assert verdicts(records(lambda run: -falls_if_many(run) + 6)) == [NO] * 5
    alike = verdicts(records(lambda _: 3.0))
    assert [*alike[:3], alike[4]] == [OPEN] * 4
    zigzag = lambda run: 3.0 + 0.1 * (run.model.hidden_size in (128, 256))
    assert verdicts(records(zigzag))[3] == OPEN
    all_but_one = [one for one in records(falls_if_many) if tokens(one) < 1e7 or one.run.model.hidden_size < 384]
    assert verdicts(all_but_one)[:3] == [ABSENT] * 3
    assert verdicts([one for one in records(falls_if_many) if tokens(one) < 1e7])[:4] == [ABSENT] * 4
    assert verdicts([]) == [ABSENT] * 5


def test_the_rate_is_that_of_the_validation_text_and_not_of_the_texts_that_are_measured() -> None:
    lower_elsewhere = lambda run: falls_if_many(run) - (0.0 if run.train.lr == BEST[run.model.hidden_size] else 0.001)
    chosen = at_best_rate(records(lower_elsewhere))
    assert {one.run.model.hidden_size: one.run.train.lr for one in chosen} == BEST
    assert len(chosen) == 5 * 2 * 3


def test_the_rates_in_the_file_are_the_best_ones_of_the_first_runs() -> None:
    """Holds as soon as the committed records of the first runs are complete."""
    from harness.records.store import Store
    from tests.documents import ROOT

    found = Store(ROOT / "results", "ours/perplexity_by_size", "small").records()
    first = [one for one in found if one.run.seed == 0 and one.run.train.steps == experiment.FEW]
    if len(first) == len(experiment.SIZES) * len(experiment.RATES):
        assert {one.run.model.hidden_size: one.run.train.lr for one in at_best_rate(first)} == experiment.BEST
    else:
        assert not experiment.BEST


def test_table_and_figure_have_both_numbers_of_tokens() -> None:
    made = table(records(falls_if_many))
    assert list(dict.fromkeys(made.frame["trained"])) == ["5M", "25M"]
    assert len(made.frame) == 10
    assert figure(records(falls_if_many)) is not None
