"""Cells of committed tables, computed again from the JSON of the records without any code of this project."""

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).resolve().parents[1] / "results"
Document = dict[str, Any]


def records(experiment: str, **wanted: object) -> list[Document]:
    """Return the finished records of an experiment's small tier whose configuration has these values."""
    every = (json.loads(path.read_text()) for path in (RESULTS / experiment / "small" / "records").glob("*.json"))
    return [one for one in every if one["status"] == "ok" and all(at(one["config"], k) == v for k, v in wanted.items())]


def at(config: Document, name: str) -> object:
    for part in name.split("__"):
        config = config[part]
    return config


def cell(experiment: str, table: str, column: str, **row: str) -> float:
    """Return a cell of a committed table."""
    with open(RESULTS / experiment / "small" / "tables" / f"{table}.csv", newline="") as file:
        (found,) = [one for one in csv.DictReader(file) if all(one[name] == value for name, value in row.items())]
    return float(found[column])


def tokens_per_second(one: Document) -> float:
    """Return tokens of the timed steps over the slowest ranks' seconds; 3 steps or a tenth are not timed."""
    seconds = [max(step["seconds"]) for step in one["steps"]]
    timed = seconds[min(max(3, math.ceil(len(seconds) / 10)), len(seconds) // 2) :]
    return one["config"]["train"]["global_batch"] * one["config"]["model"]["seq_len"] * len(timed) / sum(timed)


def mean(found: list[float]) -> float:
    return sum(found) / len(found)


def half_width(found: list[float]) -> float:
    return float(stats.t.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))


def last(one: Document, name: str) -> Document:
    return max((found for found in one["evaluations"] if found["name"] == name), key=lambda found: found["step"])


def of_size(number: int, name: str, of: Callable[[Document], float]) -> list[float]:
    """Return a number of the last evaluation on a text, of the runs of the smallest model but `number`."""
    every = records("megatron2019/model_size_perplexity")
    sizes = sorted({one["resolved"]["parameters"] for one in every})
    return [of(last(one, name)) for one in every if one["resolved"]["parameters"] == sizes[number]]


def bubble(one: Document) -> float:
    """Return idle over computing time of all ranks from the first start to the last end."""
    rows = [rank["timeline"] for rank in one["ranks"]]
    busy = sum(end - start for row in rows for _, start, end in row)
    span = max(end for row in rows for *_, end in row) - min(start for row in rows for _, start, _ in row)
    return len(rows) * span / busy - 1


def sent(one: Document) -> float:
    return max(rank["traffic"].get("pp", {}).get("send", {"bytes": 0})["bytes"] for rank in one["ranks"])


def fullest(one: Document) -> float:
    return max(sum(size for name, size in rank["memory"].items() if name != "host") for rank in one["ranks"])


def cells() -> Iterator[tuple[str, float, float]]:
    """Yield cells of tables, each with the number from the records."""
    chunked = {"plan__chunks": 2, "train__global_batch": 12}
    rates = [tokens_per_second(one) for one in records("ptdp2021/interleaving", **chunked)]
    row = {"point": "schedule=interleaved chunks=2 batch=12"}
    throughput = "throughput (tokens/s)"
    yield throughput, cell("ptdp2021/interleaving", "throughput", throughput, **row), mean(rates)
    column = "throughput, 95% half-width (tokens/s)"
    yield column, cell("ptdp2021/interleaving", "throughput", column, **row), half_width(rates)
    per_device = "per device (tokens/s)"
    yield per_device, cell("ptdp2021/interleaving", "throughput", per_device, **row), mean(rates) / 2

    alone, two = (
        [tokens_per_second(one) for one in records("megatron2019/tensor_parallel_scaling", **found)]
        for found in (
            {"plan__tp": 1, "plan__dp": 1, "model__hidden_size": 256, "train__global_batch": 8},
            {"plan__tp": 2, "plan__dp": 1, "model__hidden_size": 256, "train__global_batch": 8,
             "plan__sequence_parallel": False, "plan__overlap_input_grad_reduce": True},
        )
    )  # fmt: skip
    tables = "megatron2019/tensor_parallel_scaling", "scaling"
    strong = {"scaling": "strong", "point": "tp=2", "model": "GPT 3.3M"}
    yield "speed-up", cell(*tables, "speed-up (ratio)", **strong), mean(two) / mean(alone)

    perplexity = lambda found: math.exp(found["nats"] / found["tokens"])
    sizes = "megatron2019/model_size_perplexity"
    for number, model in enumerate(("GPT 0.1M", "GPT 0.2M", "GPT 0.7M")):
        expected = mean(of_size(number, "valid", perplexity))
        yield f"perplexity of {model}", cell(sizes, "perplexity_valid", "perplexity", model=model), expected
    bits = of_size(2, "wikitext2.test.txt", lambda found: found["nats"] / found["bytes"] / math.log(2))
    table = "perplexity_wikitext2_test_txt"
    yield "bits per byte", cell(sizes, table, "bits per byte", model="GPT 0.7M"), mean(bits)

    gpipe = [
        bubble(one) for one in records("ptdp2021/pipeline_schedules", plan__schedule="gpipe", train__global_batch=8)
    ]
    row = {"schedule": "gpipe", "micro-batches": "4"}
    yield "bubble", cell("ptdp2021/pipeline_schedules", "pipeline_schedules", "bubble (fraction)", **row), mean(gpipe)
    (scattered,) = records("ptdp2021/scatter_gather", plan__scatter_gather=True, train__global_batch=12)
    row = {"scatter/gather": "on", "global batch": "12", "tp": "2"}
    column = "sent to other stages (B)"
    yield column, cell("ptdp2021/scatter_gather", "scatter_gather", column, **row), sent(scattered)
    stage = {"plan__zero_stage": 1, "plan__dp": 2, "plan__tp": 1, "plan__pp": 1}
    (partitioned,) = records("zero2019/zero_memory", **stage)
    row = {"N": "2", "ZeRO stage": "1"}
    yield "memory", cell("zero2019/zero_memory", "zero_memory", "all, counted (B)", **row), fullest(partitioned)


FOUND = list(cells())


@pytest.mark.parametrize(("name", "printed", "computed"), FOUND, ids=[name for name, *_ in FOUND])
def test_a_cell_is_what_the_raw_records_give(name: str, printed: float, computed: float) -> None:
    assert printed == pytest.approx(computed, rel=1e-9)


def test_perplexities_are_in_the_order_of_sizes() -> None:
    """Cells are of three different models: a computation that mixed them up would show."""
    found = [printed for name, printed, _ in FOUND if name.startswith("perplexity")]
    assert all(a > b for a, b in pairwise(found))
    assert len(FOUND) >= 10


def flop_rate(one: Document) -> float:
    """Return FLOP/s of a rank: (6N + 12Lhs) a token, N = 12Lh^2 + Vh."""
    model, plan = one["config"]["model"], one["config"]["plan"]
    layers, hidden, vocabulary = model["num_layers"], model["hidden_size"], one["resolved"]["vocab_size"]
    n = 12 * layers * hidden**2 + vocabulary * hidden
    flops = 6 * n + 12 * layers * hidden * model["seq_len"]
    return tokens_per_second(one) * flops / (plan["dp"] * plan["tp"] * plan["pp"])


def greater(large: list[float], small: list[float], *, times: float = 1.0) -> float:
    """Return Welch's one-sided p that the first mean is not over `times` the second."""
    found: Any = stats.ttest_ind(large, [times * one for one in small], equal_var=False, alternative="greater")
    return float(found.pvalue)


def by(key: str, experiment: str, of: Callable[[Document], float] = flop_rate, **wanted: object) -> list[list[float]]:
    """Return a number of every run by a field of the configuration, the least value of it first."""
    found: dict[Any, list[float]] = {}
    for one in records(experiment, **wanted):
        found.setdefault(at(one["config"], key), []).append(of(one))
    return [found[value] for value in sorted(found)]


def falls_with_size(
    name: str, unit: str, experiment: str = "megatron2019/model_size_perplexity", **wanted: object
) -> list[float]:
    """Return the one-sided p that a loss does not fall with the parameters, both as logarithms, over all runs."""
    every = records(experiment, **wanted)
    sizes = [math.log(one["resolved"]["parameters"]) for one in every]
    losses = [math.log(last(one, name)["nats"] / last(one, name)[unit]) for one in every]
    found: Any = stats.linregress(sizes, losses, alternative="less")
    return [float(found.pvalue)]


def strong_scaling() -> list[float]:
    one, two, _ = by("plan__tp", "megatron2019/strong_scaling", tokens_per_second)  # four ranks share two cores
    return [greater(two, one), greater(one, two, times=0.5)]


def tensor_versus_data() -> list[float]:
    lines = [
        by("plan__tp", "ptdp2021/tensor_versus_data", train__global_batch=batch, plan__dp=2 // tp, plan__tp=tp)
        for batch in (8, 32)
        for tp in (1, 2)
    ]
    return [greater(*data, *tensor) for data, tensor in zip(lines[::2], lines[1::2], strict=True)]


def falls_over_stages() -> list[list[list[float]]]:
    """Return FLOP/s of one rank and of two stages, at the smaller batch and at the larger."""
    return [by("plan__pp", "ptdp2021/pipeline_weak_scaling", train__global_batch=batch) for batch in (4, 32)]


def falls_less_at_larger_batches() -> list[float]:
    """Return Welch's one-sided p that the logarithm of two stages' share of the rate is no higher, of four means."""
    (first, of_first), (second, of_second) = falls_over_stages()
    logs = [[math.log(one) for one in found] for found in (of_second, first, second, of_first)]
    margin = sum(map(mean, logs[:2])) - sum(map(mean, logs[2:]))
    variances = [statistics.variance(found) / len(found) for found in logs]
    freedom = sum(variances) ** 2 / sum(v**2 / (len(found) - 1) for v, found in zip(variances, logs, strict=True))
    return [float(stats.t.sf(margin / math.sqrt(sum(variances)), freedom))]


def efficiency_of_shared_layers() -> list[float]:
    plain = {"plan__dp": 1, "plan__sequence_parallel": False, "plan__overlap_input_grad_reduce": True}
    one, two = (
        by("plan__tp", "megatron2019/tensor_parallel_scaling", **plain, model__hidden_size=size, plan__tp=tp)
        for size, tp in ((256, 1), (384, 2))
    )
    return [greater(*one, *two)]


def deep_post_fails() -> list[float]:
    """Return the p of the models that fail, those of the higher rate."""
    perplexity = lambda one: math.exp(last(one, "valid")["nats"] / last(one, "valid")["tokens"])
    found = []
    for family in ("bert", "gpt"):
        post = {"model__norm_placement": "post", "train__lr": 4e-3, "model__family": family}
        shallow, deep = by("model__num_layers", "megatron2019/layernorm_placement", perplexity, **post)
        found.append(greater(deep, shallow, times=1.05))
    return found


def loss_by_seed(experiment: str, **wanted: object) -> dict[int, float]:
    """Return the last loss on held-out text of each seed of runs; `started` is whether they began with weights."""
    started = wanted.pop("started", False)
    every = [one for one in records(experiment, **wanted) if bool(one["config"]["start"]) == started]
    return {one["config"]["seed"]: last(one, "valid")["nats"] / last(one, "valid")["tokens"] for one in every}


def lower(small: dict[int, float], large: dict[int, float], *, times: float = 1.0) -> list[float]:
    """Return the one-sided p that a loss is not below `times` another, by the ratios of equal seeds."""
    assert small.keys() == large.keys()
    ratios = [small[seed] / large[seed] for seed in small]
    found: Any = stats.ttest_1samp(ratios, times, alternative="less")
    return [float(found.pvalue)]


def of_experts(**wanted: object) -> dict[int, float]:
    model = {
        "experts": 8, "experts_per_token": 1, "expert_prototypes": 1, "expert_capacity": None, "balance_loss": 0.01,
    }  # fmt: skip
    return loss_by_seed("m6_2021/prototyping", **{f"model__{name}": value for name, value in (model | wanted).items()})


def best_sizes(family: str) -> tuple[list[float], list[float]]:
    """Return logarithms of FLOPs, 6 N D, and of parabolas' lowest points in log N, N = 24 h^2, by budget and seed."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in records("proteins2024/compute_optimal", model__family=family):
        model, train = one["config"]["model"], one["config"]["train"]
        n = 24 * model["hidden_size"] ** 2
        flops = 6 * n * train["steps"] * train["global_batch"] * model["seq_len"]
        loss = last(one, "valid")["nats"] / last(one, "valid")["tokens"]
        found.setdefault((round(math.log2(flops / 1e10)), one["config"]["seed"]), []).append((math.log(n), loss))
    x, y = [], []
    for (doubled, _), profile in sorted(found.items()):
        sizes, losses = zip(*profile, strict=True)
        curvature, tilt, _ = np.polyfit(sizes, losses, 2)
        if curvature > 0 and min(sizes) <= -tilt / 2 / curvature <= max(sizes):
            x, y = [*x, doubled * math.log(2)], [*y, float(-tilt / 2 / curvature)]
    return x, y


SURE: dict[tuple[str, str], Callable[[], list[float]]] = {
    ("m6_2021/prototyping", "two experts a token end lower than one"): lambda: lower(
        of_experts(experts_per_token=2), of_experts()
    ),
    ("m6_2021/prototyping", "without a loss of balance one expert a token ends at most 1% above"): lambda: lower(
        of_experts(balance_loss=0.0), of_experts(), times=1.01
    ),
    ("m6_2021/pseudo_to_real", "the delinked model is ahead of the pseudo one"): lambda: lower(
        loss_by_seed("m6_2021/pseudo_to_real", started=True),
        loss_by_seed("m6_2021/pseudo_to_real", model__shared_layers=True, train__steps=800),
    ),
    ("frontier2023/scaling", "every increase of the devices lowers the rate per device at the same batch"): lambda: [
        greater(*by("plan__dp", "frontier2023/scaling", train__global_batch=16, train__microbatch=4))
    ],
    ("megatron2019/layernorm_placement",
     "with LayerNorm after each block every deeper model ends over 5% worse than shallow ones"): deep_post_fails,
    ("megatron2019/model_size_perplexity", "validation loss falls with model size"): lambda: falls_with_size(
        "valid", "tokens"
    ),
    ("megatron2019/model_size_perplexity", "bits per byte of WikiText fall with model size"): lambda: falls_with_size(
        "wikitext2.test.txt", "bytes"
    ),
    ("megatron2019/model_size_perplexity", "the loss of LAMBADA's last words falls with model size"): lambda: (
        falls_with_size("lambada", "words")
    ),
    **{
        ("ours/perplexity_by_size", f"with enough text, the loss of {what} falls with model size"): partial(
            falls_with_size, name, unit, "ours/perplexity_by_size", train__steps=6100
        )
        for name, unit, what in (
            ("books.test.txt", "tokens", "held-out books"), ("wikitext2.test.txt", "bytes", "WikiText-2"),
            ("lambada", "words", "LAMBADA's last words"),
        )
    },
    ("megatron2019/tensor_parallel_scaling",
     "efficiency falls with the tensor-parallel degree while the model grows with it"): efficiency_of_shared_layers,
    ("ptdp2021/pipeline_weak_scaling", "the rate per device falls with every increase of the pipeline ranks"): lambda: [
        greater(*line) for line in falls_over_stages()
    ],
    ("ptdp2021/pipeline_weak_scaling", "it falls less at the larger batch, whose steps have more microbatches"):
        falls_less_at_larger_batches,
    ("megatron2019/strong_scaling", "every doubling of the ranks is faster, and less than twice as fast"):
        strong_scaling,
    ("ptdp2021/microbatch_throughput",
     "a device computes faster with the largest microbatch than with the smallest"): lambda: [
        greater(*by("train__microbatch", "ptdp2021/microbatch_throughput")[::-4])
    ],
    ("ptdp2021/tensor_versus_data",
     "the fewest ranks to a layer are fastest and the most slowest, at as many ranks and the same batch"):
        tensor_versus_data,
}  # fmt: skip
"""One-sided p of each point that holds of the claims about a paper that noisy measurements reproduce, or partly."""


@pytest.mark.parametrize("claim", SURE, ids=" ".join)
def test_a_direction_that_is_reproduced_is_not_chance(claim: tuple[str, str]) -> None:
    found = SURE[claim]()
    assert found
    assert all(0 <= p <= 0.05 for p in found), found


def test_a_direction_that_is_open_is_not_sure() -> None:
    plain, divided = by("plan__zero_stage", "zero2019/data_parallel_only", model__hidden_size=256)
    assert min(greater(divided, plain), greater(plain, divided)) > 0.025


def test_powers_of_best_sizes_are_those_of_the_claims() -> None:
    """Best sizes that grow as fast with masks as without, to the last digit that is said."""
    with open(RESULTS / "proteins2024/compute_optimal/small/tables/claims.csv", newline="") as file:
        said = " ".join(row["numbers"] for row in csv.DictReader(file))
    for family, name in (("gpt", "causal"), ("bert", "masked")):
        x, y = map(np.array, best_sizes(family))
        budgets = np.unique(x)
        found: Any = stats.linregress(budgets, [y[x == one].mean() for one in budgets])
        wide = stats.t.ppf(0.975, len(budgets) - 2) * found.stderr
        assert f"{name} {found.slope:.2f} ± {wide:.2f} ({len(x)} best sizes" in said
