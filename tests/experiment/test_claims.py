"""Verdicts turn with the data."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.stability import UNIGRAM
from harness.experiment import placements
from harness.experiment.claims_table import claims_table
from harness.experiment.experiment import Tier
from harness.experiment.loading import experiment_ids, load
from harness.records.parts import Data, Entropy, Evaluation, Sample
from harness.records.record import Record
from impl.data.config import DataConfig
from tests.experiments.as_printed import thrice
from tests.harness.made_up_records import record


def trained(perplexity_by: dict[tuple[str, str, int, float], float]) -> list[Record]:
    """A record for each (family, norm, layers, lr), with its nats per token on held-out text."""
    made = []
    for (family, norm, layers, lr), nats in perplexity_by.items():
        changes: dict[str, Any] = {
            "model__family": family, "model__norm_placement": norm, "model__num_layers": layers, "train__lr": lr,
        }  # fmt: skip
        one = record(parameters=1_000_000 * layers, **changes)
        kind = "causal" if family == "gpt" else "masked"
        one.evaluations = [Evaluation("valid", kind, 9, nats=1000 * nats, tokens=1000, key={"sequences": 9})]
        made.append(one)
    return made


def verdicts(experiment: str, records: list[Record]) -> list[str]:
    return list(claims_table(load(experiment).claims, thrice(records)).frame["verdict"])


def test_perplexity_by_size_flips() -> None:
    def sizes(*nats: float) -> list[Record]:
        made = trained({("gpt", "pre", layers, 1e-3): n for layers, n in enumerate(nats, 1)})
        for one, n in zip(made, nats, strict=True):
            words = Evaluation("wikitext2.test.txt", "words", 9, nats=1000 * n, tokens=1000, words=500, bytes=3000)
            last = replace(words, name="lambada", kind="last_word", correct=int(100 / n), total=100)
            one.evaluations += [words, last]
        return made

    assert verdicts("model_size_perplexity", sizes(3.0, 2.5, 2.0)) == ["reproduced"] * 3
    assert verdicts("model_size_perplexity", sizes(3.0, 2.0, 3.1)) == ["partly"] * 3
    assert verdicts("model_size_perplexity", sizes(2.0, 2.5, 3.0)) == ["not reproduced"] * 3
    assert verdicts("model_size_perplexity", sizes(3.0)) == ["not run here"] * 3


def test_placement_claims_flip() -> None:
    good = {("bert", norm, layers, 1e-3): nats for norm, layers, nats in
            (("pre", 2, 3.0), ("pre", 12, 2.5), ("post", 2, 3.1), ("post", 12, 3.5))}  # fmt: skip
    # no GPT is trained, and no run diverges, post's neither
    stable = ["reproduced", "not run here", "not reproduced", "reproduced", "not run here"]
    assert verdicts("layernorm_placement", trained(good)) == stable
    gpts = {("gpt", norm, layers, lr): nats for (_, norm, layers, lr), nats in good.items()}
    assert verdicts("layernorm_placement", trained(gpts)) == ["not run here", "reproduced", *stable[2:]]
    better_post = good | {("bert", "post", 12, 1e-3): 2.0}
    turned = verdicts("layernorm_placement", trained(better_post))
    assert turned == ["partly", "not run here", "not reproduced", "not reproduced", "not run here"]
    better_post = gpts | {("gpt", "post", 12, 1e-3): 2.0}
    assert verdicts("layernorm_placement", trained(better_post))[1] == "partly"
    rates = good | {("bert", norm, layers, 4e-3): nats for norm, layers, nats in
             (("pre", 2, 3.1), ("pre", 12, 2.6), ("post", 2, 3.3), ("post", 12, 3.9))}  # fmt: skip
    assert verdicts("layernorm_placement", trained(rates))[4] == "reproduced"
    assert verdicts("layernorm_placement", trained(rates | {("bert", "post", 2, 4e-3): 3.15}))[4] == "partly"
    one_pair_of_two = good | {("bert", "post", 2, 4e-3): 3.1, ("bert", "post", 12, 4e-3): 3.1}
    assert verdicts("layernorm_placement", trained(one_pair_of_two))[3] == "partly"


@pytest.mark.parametrize(
    ("diverging", "expected"),
    [(("post",), "reproduced"), (("pre",), "not reproduced"), (("pre", "post"), "not reproduced")],
)
def test_the_claim_on_divergence_compares_both_placements(diverging: tuple[str, ...], expected: str) -> None:
    records = trained({("bert", norm, layers, 1e-3): 3.0 for norm in ("pre", "post") for layers in (2, 12)})
    for one in records:
        if one.run.model.norm_placement in diverging:
            one.steps.losses[-1] = 1e9
    assert verdicts("layernorm_placement", records)[2] == expected
    alone = [one for one in records if one.run.model.norm_placement == "pre"]
    assert verdicts("layernorm_placement", alone)[2] == "not run here"


def test_a_run_that_learns_no_more_than_frequencies_of_letters_diverged() -> None:
    """The rule is that of `ours/stability_map`, and not of the training loss alone."""
    nats = {("bert", norm, layers, 1e-3): 2.5 for norm in ("pre", "post") for layers in (2, 12)}
    for stuck, expected in (("post", "reproduced"), ("pre", "not reproduced")):
        records = trained(nats | {("bert", stuck, 12, 1e-3): UNIGRAM["data/books-byte"]})
        for one in records:
            one.run = replace(one.run, data=DataConfig(dataset="data/books-byte"))
        assert verdicts("layernorm_placement", records)[2] == expected


def test_a_rate_that_is_the_larger_models_own_best_costs_it_nothing_and_one_that_learns_nowhere_is_left_out() -> None:
    def said(larger: tuple[float, float]) -> tuple[int, int, int] | None:
        nats = {("gpt", "pre", 2, 1e-3): 2.6, ("gpt", "pre", 2, 1e-2): 2.0}
        nats |= {("gpt", "pre", 12, lr): of for lr, of in zip((1e-3, 1e-2), larger, strict=True)}
        runs = [
            replace(one, run=replace(one.run, seed=seed, data=DataConfig(dataset="data/books-byte")))
            for one in trained(nats)
            for seed in range(3)
        ]
        for one in runs:  # seeds further apart than the tolerance
            apart = 1 + 0.05 * one.run.seed
            one.evaluations = [replace(last, nats=(last.nats or 0.0) * apart) for last in one.evaluations]
        found = placements.rate_transfers(0.01)(runs)
        return None if found is None else (found.holds, found.fails, found.open)

    assert said((2.5, 1.9)) == (1, 0, 0)
    assert said((1.5, 2.9)) == (0, 1, 0)
    assert said((1.9, 1.95)) == (0, 0, 1)
    assert said((4.0, 4.0)) is None


def test_floor_claims_flip() -> None:
    def floor(nats: float) -> list[Record]:
        made = trained({("gpt", "pre", 2, 1e-3): nats})
        made[0].resolved.data = Data(entropy=Entropy(0.7, Sample(0.7, 0.001)))
        return made

    assert verdicts("quickstart", floor(0.75))[:2] == ["reproduced", "reproduced"]
    assert verdicts("quickstart", floor(0.95))[:2] == ["not reproduced", "reproduced"]
    assert verdicts("quickstart", floor(0.60))[1] == "not reproduced"


def test_every_claim_names_its_source() -> None:
    tiers: tuple[Tier, ...] = ("smoke", "small", "paper")
    for name in experiment_ids():
        experiment = load(name)
        assert all(claim.text and claim.source for claim in experiment.claims)
        assert all(experiment.runs[tier] for tier in tiers)
