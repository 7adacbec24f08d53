"""Published numbers: one form for all papers, consistent with the named sizes, and wrong names answered."""

import math
import re
from typing import Any

import pytest

from harness.experiment.published import FOLDER, papers, published
from impl.cost.parameters import count_parameters
from impl.errors import InputError
from impl.model.norm_placement import PLACEMENTS
from impl.model.sizes import SIZES

DEGREES = ["tp", "pp", "dp", "gpus"]
COLUMNS = ["paper", "arxiv", "where", "quantity", "model", "norm_placement", *DEGREES, "global_batch", "value"]
COLUMNS += ["unit", "how", "note"]
# in a figure or a table only, without the shape
KORTHIKANTI = {f"korthikanti-{size}" for size in ("22b", "175b", "530b", "1t")}
UNNAMED = {"", "bert-752m", "previous-best"} | KORTHIKANTI


def as_rows(paper: str, quantity: str | None = None) -> list[dict[Any, Any]]:
    return published(paper, quantity).to_dict("records")


def value(quantity: str, paper: str = "megatron2019", **where: object) -> float:
    rows = [row for row in as_rows(paper, quantity) if all(row[key] == where[key] for key in where)]
    assert len(rows) == 1
    return rows[0]["value"]


def test_there_are_published_numbers():
    assert "megatron2019" in papers()


@pytest.mark.parametrize("paper", papers())
def test_every_file_has_the_same_form(paper: str):
    assert list(published(paper).columns) == COLUMNS
    rows = as_rows(paper)
    assert rows
    for row in rows:
        assert row["paper"] == paper
        assert re.fullmatch(r"\d{4}\.\d{5}", row["arxiv"])
        assert row["how"] in {"stated", "digitised", "derived"}
        assert row["model"] in set(SIZES) | UNNAMED
        assert row["norm_placement"] in set(PLACEMENTS) | {""}
        assert math.isfinite(row["value"])
        assert all(row[column] for column in ("where", "quantity", "unit"))
        assert rows.count(row) == 1


@pytest.mark.parametrize("paper", papers())
def test_degrees_multiply_to_the_gpus(paper: str):
    for row in published(paper).dropna(subset=DEGREES).to_dict("records"):
        assert row["tp"] * row["pp"] * row["dp"] == row["gpus"]


def test_perplexity_falls_and_accuracy_rises_with_size():
    sizes = ["gpt-355m", "gpt-2.5b", "gpt-8.3b"]
    for quantity, sign in (("wikitext103_perplexity", -1), ("lambada_accuracy", 1)):
        values = [sign * value(quantity, model=size) for size in sizes]
        assert values == sorted(values)
    assert value("wikitext103_perplexity", model="gpt-8.3b") == 10.81
    assert value("lambada_accuracy", model="gpt-8.3b") == 66.51
    assert value("validation_perplexity", model="bert-1.3b") == 1.30


def test_layernorm_placement_of_figure_7():
    assert value("trains_stably", model="bert-336m", norm_placement="post") == 1
    assert value("trains_stably", model="bert-752m", norm_placement="post") == 0
    assert value("trains_stably", model="bert-752m", norm_placement="pre") == 1


def test_table_1_parameters_are_those_of_the_named_sizes():
    rows = as_rows("megatron2019", "parameters")
    assert len(rows) == 4
    for row in rows:
        assert count_parameters(SIZES[row["model"]].config).total / 1e9 == pytest.approx(row["value"], abs=0.05)


def test_the_abstracts_efficiency_follows_from_its_rates():
    total = value("sustained_flops", model="gpt-8.3b")
    single = value("sustained_flops", model="gpt-1.2b")
    assert 100 * total / 512 / single == pytest.approx(value("weak_scaling_efficiency", how="derived"), abs=0.05)
    assert value("weak_scaling_efficiency", where="abstract", how="stated") == 76
    assert value("weak_scaling_efficiency", where="figure 5", gpus=512) == 74


def test_throughput_rises_by_as_much_as_korthikanti_print():
    for model, percent in zip(("22b", "175b", "530b", "1t"), (29.0, 31.8, 29.7, 32.1), strict=True):
        at: dict[str, Any] = {"paper": "korthikanti2022", "model": f"korthikanti-{model}"}
        before = value("iteration_seconds_full_recompute", **at)
        after = value("iteration_seconds_sequence_parallel_selective", **at)
        assert 100 * (before / after - 1) == pytest.approx(percent, abs=0.2)
        assert value("mfu", **at) < value("hfu", **at)


def test_figure_7_falls_with_every_way_of_saving():
    for model in KORTHIKANTI:
        ways = ("sequence_parallel", "sequence_parallel_selective", "full_recompute")
        shares = [value(f"activation_memory_{way}", paper="korthikanti2022", model=model) for way in ways]
        assert shares == sorted(shares, reverse=True)


def test_ptdps_table_1_is_consistent_with_the_named_sizes_and_the_peak():
    at: dict[str, Any] = {"paper": "ptdp2021"}
    peak = value("peak_flop_rate", **at)
    sizes = as_rows("ptdp2021", "parameters")
    assert len(sizes) == 10
    for row in sizes:
        counted = count_parameters(SIZES[row["model"]].config).total / 1e9
        assert counted == pytest.approx(row["value"], abs=0.06)
        rate = value("hardware_flop_rate", model=row["model"], where="table 1", **at)
        assert value("hardware_flop_share", model=row["model"], **at) == pytest.approx(100 * rate / peak, abs=0.6)
        total = value("aggregate_hardware_flop_rate", model=row["model"], **at)
        assert total == pytest.approx(rate * row["gpus"] / 1e3, rel=0.01)


def test_ptdps_figures_18_and_12_share_the_scattered_points_and_gain_as_stated():
    rows = {quantity: as_rows("ptdp2021", f"hardware_flop_rate_{quantity}") for quantity in
            ("interleaved", "scatter_gather", "unoptimised")}  # fmt: skip
    rates = {quantity: [row["value"] for row in found] for quantity, found in rows.items()}
    assert rates["interleaved"] == rates["scatter_gather"]
    gain = max(on / off for on, off in zip(rates["scatter_gather"], rates["unoptimised"], strict=True))
    assert 100 * (gain - 1) == pytest.approx(value("scatter_gather_gain_up_to", "ptdp2021"), abs=1)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(InputError, match=r"'megatron'.*valid: .*megatron2019"):
        published("megatron")
    with pytest.raises(InputError, match=r"no quantity 'loss'; valid: .*wikitext103_perplexity"):
        published("megatron2019", "loss")


def test_the_files_lie_in_the_repository():
    assert (FOLDER.parent / "published.py").is_file()
