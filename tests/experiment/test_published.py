"""Published numbers: one form for all papers, how each was checked, consistent values, and wrong names."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from harness.experiment import published as module
from harness.experiment.claims import Claim
from harness.experiment.loading import experiment_ids, load
from harness.experiment.paper import noted
from harness.experiment.published import FOLDER, papers, published
from harness.experiment.references import places
from impl.cost.parameters import count_parameters
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.model.sizes import SIZES

DEGREES = ["tp", "pp", "dp", "gpus"]
COLUMNS = ["paper", "arxiv", "where", "quantity", "model", "norm_placement", *DEGREES, "global_batch", "value"]
COLUMNS += ["unit", "verified", "note"]
# in a figure or a table only, without the shape
KORTHIKANTI = {f"korthikanti-{size}" for size in ("22b", "175b", "530b", "1t")}
UNNAMED = {"", "bert-752m", "previous-best"} | KORTHIKANTI
NO_PAPERS = {"nanotron2025", "internevo2023"}
"""Published by their authors outside arXiv."""
UNREAD = ("formula", "memory")
"""Words for numbers that were read nowhere: claims on them have to say so."""


def value(quantity: str, paper: str = "megatron2019", **where: object) -> float:
    rows = published(paper, quantity)
    [found] = [row["value"] for row in rows.to_dict("records") if all(row[key] == where[key] for key in where)]
    return found


@pytest.mark.parametrize("paper", papers())
def test_every_file_has_the_same_form(paper: str):
    found = published(paper)
    assert list(found.columns) == COLUMNS
    assert not found.duplicated().to_numpy().any()
    assert set(found["paper"]) == {paper}
    assert set(found["model"]) <= set(SIZES) | UNNAMED
    assert set(found["norm_placement"]) <= set(PLACEMENTS) | {""}
    if paper in NO_PAPERS:
        assert set(found["arxiv"]) == {""}
    else:
        assert all(re.fullmatch(r"\d{4}\.\d{5}", number) for number in found["arxiv"])
    assert found[["where", "quantity", "unit"]].to_numpy().all()
    on = found.dropna(subset=DEGREES)
    assert (on["tp"] * on["pp"] * on["dp"] == on["gpus"]).to_numpy().all()


def test_a_row_with_another_word_for_how_it_was_checked_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    text = (FOLDER / "frontier2023.csv").read_text()
    for word in ("stated", ""):
        (tmp_path / "frontier2023.csv").write_text(text.replace(",memory,", f",{word},"))
        with pytest.raises(InputError, match=rf"frontier2023\.csv: line 9 has verified '{word}'.*source, digitised"):
            published("frontier2023")


def rests_on(claim: Claim, paper: str) -> set[str]:
    """Return the words for how the published numbers were checked at the places that a claim names."""
    named = {(place.paper, str(place)) for place in places(claim.source, paper)}
    named |= {(paper, part.strip()) for part in re.split(r"[,:;(]", claim.source)}
    rows = (row for name in {of for of, _ in named} & {*papers()} for row in published(name).to_dict("records"))
    return {row["verified"] for row in rows if (row["paper"], row["where"]) in named}


def unread() -> Iterator[tuple[str, str, str]]:
    """Yield the word, experiment and texts of every claim at whose places a number was read nowhere."""
    for name in experiment_ids():
        for claim in load(name).claims:
            for word in rests_on(claim, name.partition("/")[0]).intersection(UNREAD):
                yield word, name, f"{claim.text} {claim.source} {claim.published}"


def test_a_claim_on_numbers_that_were_read_nowhere_says_so():
    found = list(unread())
    assert {name for _, name, _ in found} == {"frontier2023/models", "korthikanti2022/memory_per_gpu"}
    assert [one for one in found if one[0] not in one[2]] == []


def test_bars_that_another_tool_computed_are_the_formula_to_the_last_digit():
    states = 18 * 12 * 48 * 6144**2 / 8
    assert value("state_gib", "korthikanti2022", model="korthikanti-22b", verified="formula") * 2**30 == states


def test_derived_numbers_follow_from_those_that_they_are_derived_from():
    total, single = (value("sustained_flops", model=of) for of in ("gpt-8.3b", "gpt-1.2b"))
    assert 100 * total / 512 / single == pytest.approx(value("weak_scaling_efficiency", verified="derived"), abs=0.05)
    at: dict[str, Any] = {"paper": "frontier2023", "model": "frontier-1t"}
    rate = value("hardware_flop_rate", verified="derived", **at)
    assert 1.915 * value("hardware_flop_utilization", **at) == pytest.approx(rate, abs=0.05)
    a, b, alpha, beta = (value(f"refit_{name}", "chinchilla2022") for name in ("A", "B", "alpha", "beta"))
    size = (alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (5.76e23 / 6) ** (beta / (alpha + beta))
    assert size == pytest.approx(value("refit_optimal_parameters", "chinchilla2022", verified="derived"), rel=1e-3)


def test_axonns_share_of_the_peak_is_its_rate_and_its_shapes_have_the_named_parameters():
    at: dict[str, Any] = {"paper": "axonn2023"}
    rate = value("aggregate_hardware_flop_rate", gpus=1024, **at) * 1e15 / 1024
    assert 100 * rate / 312e12 == pytest.approx(value("hardware_flop_share", gpus=1024, **at), abs=0.05)
    for row in published("axonn2023", "parameters").to_dict("records"):
        model = ModelConfig(seq_len=2048, vocab_size=51200, **noted(row["note"]))
        assert count_parameters(model) / 1e9 == pytest.approx(row["value"], rel=0.05)


def test_throughput_rises_by_as_much_as_korthikanti_print():
    for size, percent in {"22b": 29.0, "175b": 31.8, "530b": 29.7, "1t": 32.1}.items():
        at: dict[str, Any] = {"paper": "korthikanti2022", "model": f"korthikanti-{size}"}
        before = value("iteration_seconds_full_recompute", **at)
        after = value("iteration_seconds_sequence_parallel_selective", **at)
        assert 100 * (before / after - 1) == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize(("paper", "precision"), [("megatron2019", 0.05), ("ptdp2021", 0.06)])
def test_printed_parameters_are_those_of_the_named_sizes(paper: str, precision: float):
    for row in published(paper, "parameters").to_dict("records"):
        assert count_parameters(SIZES[row["model"]].config) / 1e9 == pytest.approx(row["value"], abs=precision)


def test_ptdps_rates_are_consistent_with_each_other_and_the_peak():
    at: dict[str, Any] = {"paper": "ptdp2021"}
    for row in published("ptdp2021", "hardware_flop_rate").query("where == 'table 1'").to_dict("records"):
        share = 100 * row["value"] / value("peak_flop_rate", **at)
        assert value("hardware_flop_share", model=row["model"], **at) == pytest.approx(share, abs=0.6)
        total = value("aggregate_hardware_flop_rate", model=row["model"], **at)
        assert total == pytest.approx(row["value"] * row["gpus"] / 1e3, rel=0.01)
    rates = {name: list(published("ptdp2021", f"hardware_flop_rate_{name}")["value"])
             for name in ("interleaved", "scatter_gather", "unoptimised")}  # fmt: skip
    assert rates["interleaved"] == rates["scatter_gather"]
    gain = max(on / off for on, off in zip(rates["scatter_gather"], rates["unoptimised"], strict=True))
    assert 100 * (gain - 1) == pytest.approx(value("scatter_gather_gain_up_to", **at), abs=1)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(InputError, match=r"'megatron'.*valid: .*megatron2019"):
        published("megatron")
    with pytest.raises(InputError, match=r"no quantity 'loss'; valid: .*wikitext103_perplexity"):
        published("megatron2019", "loss")
