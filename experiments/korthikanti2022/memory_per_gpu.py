"""What fills a GPU of 80 GB when models of 22 billion to a trillion parameters train, and what is left of it to save?

Weights, gradients and optimizer states take 32 to 46 GiB of each GPU with the layouts of table 3, and with nothing but
tensor parallelism the activations take 59 to 131 GiB more: no model fits (Korthikanti et al. 2022, figure 1). With
sequence parallelism and selective recomputation they take a fifth of that, and all fit.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from experiments.korthikanti2022 import (
    BOTH, LAYER, NOTHING, P, PAPER, SMOKE, T, Saved, few_steps, in_print, layer, of_table_5, saved, size_of, way_of,
    with_way,
)  # fmt: skip
from harness.experiment.kit import (
    GIB, MODEL, Claim, Column, Experiment, Plan, Point, Record, Run, Tolerance, about, cost, each, gib, mebibytes,
    printed, share, table_of,
)  # fmt: skip
from harness.figures.style import COLOURS, legend, panels, to_draw
from impl.cost.activations import layer_bytes
from impl.cost.place import parameter_bytes

A100 = 80 * GIB
"""Bytes."""
SMALL = replace(SMOKE, seq_len=384)
"""On two ranks its attention scores have about the share of the activations that they have in the paper's models."""
A_QUARTER = Tolerance(0.25, "the paper says a fifth, of models with other 5as/h than ours", "2026-11-22")
"""Largest share of the activations that both ways leave."""
WAYS = {NOTHING: "activations_gib", BOTH: "activations_gib_sequence_parallel_selective"}
"""Quantity of figure 1 for each way of saving."""


@cache
def of_the_figure() -> dict[Run, Saved]:
    """Return every bar of figure 1 by its run."""
    found: dict[Run, Saved] = {}
    for name in PAPER:
        for way, quantity in WAYS.items():
            run, states = of_table_5(name, way), in_print("state_gib", name) * GIB
            sizes = {"published_states": states, "published_activations": in_print(quantity, name) * GIB}
            found[run] = Saved(run, model=f"GPT {size_of(name)}", printed=sizes)
    return found


def compared(records: Sequence[Record]) -> list[Saved]:
    """Return runs of the two ways that are bars of figure 1, or whose layers were counted."""
    bars = of_the_figure()
    known = lambda record: 1.0 if record.point in bars else layer(record)
    found = [one for one in saved(records, known, bars, failed=True) if way_of(one.run) in WAYS]
    return sorted(found, key=lambda one: (one.parameters, one.run.plan.pp, way_of(one.run)))


def drawn(records: Sequence[Record]) -> list[Saved]:
    """Return points of figure 1 whose whole memory is predicted."""
    return [one for one in compared(records) if one.printed and not math.isnan(needed(one))]


def needed(one: Point) -> float:
    """Return the predicted memory of the fullest rank."""
    return one.mean(lambda record: record.peak_memory_bytes if record.is_memory_predicted else math.nan)


def states(one: Point) -> float:
    """Return the bytes of states as figure 1 draws them, spread evenly over all ranks."""
    return one.parameters * sum(parameter_bytes(one.run)) / (one.run.plan.tp * one.run.plan.pp)


def activations(one: Point) -> float:
    """Return figure 1's bytes of a rank's layers for the microbatches in flight, embedding and head left out.

    Source: Korthikanti et al. 2022, sections 4.2.3 and 6.1, table 2.
    """
    run = one.run
    in_flight = one.mean(lambda record: record.microbatches_in_flight) if run.plan.pp > 1 else 1.0
    return in_flight * run.model.num_layers / run.plan.pp * layer_bytes(run) if one.printed else math.nan


SAVED = lambda one: "sequence parallelism, selective" if way_of(one.run) else "nothing"
COLUMNS = (
    MODEL, T, P, Column(key="saved", header="saved by", text=True, of=SAVED),
    gib("formula_states", "states, formula", of=states),
    printed("published_states", "states, published", "GiB", GIB, "B"),
    gib("formula_activations", "activations, formula", of=activations),
    printed("published_activations", "activations, published", "GiB", GIB, "B"),
    gib("needed", "all, predicted", of=needed),
    share("share", "of 80 GiB", lambda one: needed(one) / A100),
    mebibytes(LAYER, "layer, counted"),
    mebibytes("predicted_layer", "layer, predicted", lambda one: float(layer_bytes(one.run))),
)  # fmt: skip
NOTES = (
    "Formula: 18 bytes of states a parameter, spread evenly, and what the layers of the first pipeline rank keep "
    "of the microbatches in flight; published: figure 1 as another tool (Calculon) gives it by the same formulas. "
    "All, predicted: everything on the fullest rank, the embedding, the output head and what is computed at that "
    "moment too.",
    "Layer: bytes that the forward pass of one microbatch keeps for the backward pass in the last layer, on the "
    "rank with most.",
)


def figure(records: Sequence[Record]) -> Any:
    """Draw states, activations and other predicted memory of a GPU, a bar for each model and way; 80 GiB dashed."""
    records, simulated = to_draw(records)
    found = drawn(records)
    if not found:
        return None
    figure, (ax,) = panels(1)
    names = [f"{one.model}\n{'both' if way_of(one.run) else 'nothing'}" for one in found]
    below = [0.0] * len(found)
    rest = lambda one: needed(one) - states(one) - activations(one)
    parts = {"states": states, "activations of layers": activations, "all else": rest}
    for colour, (name, size) in zip(COLOURS, parts.items(), strict=False):
        heights = [max(size(one), 0.0) / GIB for one in found]
        ax.bar(names, heights, bottom=below, color=colour, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    published = [sum(one.printed.values()) / GIB for one in found]
    ax.plot(names, published, "D", color="black", markerfacecolor="white", label="published, of states and layers")
    ax.axhline(A100 / GIB, color="black", linestyle="--", linewidth=1, label="80 GiB")
    ax.set(ylabel="GiB a GPU")
    ax.tick_params(axis="x", labelsize=8)
    legend(figure, ax.get_legend_handles_labels()[0])
    figure.suptitle(f"What fills a GPU{about(records)}{simulated}")
    return figure


def filled(records: Sequence[Record]) -> list[tuple[float, str, str]]:
    """Return the predicted GiB of each bar, its model, and ", both" if both ways of saving are on."""
    return [(needed(one) / GIB, one.model, ", both" if way_of(one.run) else "") for one in drawn(records)]


def left(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return the share of the activations that remains with both ways: counted where ranks trained, or by formula."""
    found = [one for one in compared(records) if way_of(one.run)]
    shares = [(one.share(), one.model) for one in found if not math.isnan(one.share())]
    return shares or [(one.share(activations), one.model) for one in found if not math.isnan(needed(one))]


def both_ways(tp: int, pp: int, microbatches: int) -> list[Run]:
    """Return two-step runs of a small model with dropout, for memory only, with nothing saved and with both ways."""
    run = few_steps(SMALL, Plan(tp=tp, pp=pp), 4, microbatches)
    return [with_way(run, way) for way in WAYS]


EXPERIMENT = Experiment(
    source="Korthikanti et al. 2022, section 1, figure 1",
    expectation="105 to 164 GiB a GPU with nothing saved, 55 to 60 GiB with sequence parallelism and selective "
    "recomputation: only then do the models fit 80 GB",
    claims=(
        Claim(
            "each model needs more than 80 GB with nothing saved, and fits with both ways", "figure 1",
            each(filled, lambda size, _, both: (size <= A100 / GIB) == bool(both), "bars", "{:.0f} GiB ({}{})"),
            "105 to 164 GiB, 55 to 60 GiB (states and activations, by formula)", kind="arithmetic",
        ),
        Claim(
            "both ways leave at most a quarter of the activations", "section 1: a fifth",
            each(left, lambda share, _: share <= A_QUARTER, "models", "{:.0%} ({})"), "16 to 20%",
            kind="self-consistency", tolerance=A_QUARTER,
        ),
    ),
    table=table_of("memory_per_gpu", "What fills a GPU", COLUMNS, compared, NOTES, is_timed=False),
    figure=figure,
    cost=cost("1 min", "30 min, 512 GPUs with 80 GB"),
    deviations="bf16 with gradients of 32 bits: 18 bytes of states a parameter, as the figure's. At `smoke` and "
    "`small` a model of 0.5M with the paper's dropout, on two and four ranks, two layers, for two steps.",
    runs={
        "smoke": both_ways(2, 1, 1),
        "small": [*both_ways(2, 1, 1), *both_ways(1, 2, 4), *both_ways(2, 2, 4)],
        "paper": [*of_the_figure()],
    },
)  # fmt: skip
