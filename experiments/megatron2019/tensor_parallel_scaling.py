"""How much of a GPU's speed is left when a model grows with the ranks that share each of its layers?

Megatron-LM splits every layer's matrices over 1, 2, 4 and 8 GPUs and grows the model from 1.2B to 8.3B parameters, so
that each GPU keeps about as many of them (section 5.1, table 1). Figure 5 gives the rate of model FLOPs per GPU over
that of the 1.2B model on one, without and with 64-way data parallelism on top; table 8 keeps the model and adds GPUs.

Two choices are measured both ways beside that. What lies between the split blocks (LayerNorm, dropout, residuals) is
duplicated on every rank, as in the paper, or split over the tokens at the price of other collectives (sequence
parallelism). Input gradients are reduced while weight gradients are computed, or before.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import (
    CONSTANT, CPU, GPU, GROWS, GROWS_WITH_DATA, IN_PRINT, MODELS, POINTS, SENT, SENT_NOTE, SHARE, efficiencies, known,
    published_efficiency, repeated, speed,
)  # fmt: skip
from harness.experiment.checks import each, falls, within
from harness.experiment.kit import (
    FLOP_RATE, MARK, MIB, MODEL, RANKS, RUNS, VARIES, Check, Claim, Column, Evidence, Experiment, Plan, Point,
    Precision, Recipe, Record, Run, Table, Tier, about, apart_from, flop_rate, of_run, tabulate, tally,
)  # fmt: skip
from harness.records.labels import SHAPE, labels
from harness.records.measures import in_order, model_names, shape
from impl.cost.memory import state_bytes

LINES = {GROWS: "model grows", GROWS_WITH_DATA: "model and data grow", CONSTANT: "only ranks grow"}
"""Names of the curves in the figure."""
ORDER = [GROWS, GROWS_WITH_DATA, CONSTANT, "other"]
SLOWER = 0.98
"""Ratio of speeds that still counts as no slower; assumed, as repeats of one point differ."""
NOTES = (
    "Efficiency is the rate of model FLOPs per device over the first row's, one rank. Published: that of the "
    "paper's models of the same degrees, 1.2B to 8.3B (figure 5), and where only ranks grow, of 1.2B (table 8's "
    "speed-up over the number of GPUs); on V100s, whatever the size here.",
    "States: weights, gradients, master weights and moments of one rank. Split over tensor-parallel ranks are all "
    "matrices of the layers, the biases of column-parallel layers and the token embedding, padding included.",
    "Whole on every rank (GPT): gains and biases of LayerNorms, the position embedding, and the biases of row-parallel "
    "layers (attention's projection, the MLP's second layer).",
    SENT_NOTE,
)
HELD = (
    Column(key="split_state_bytes", header="states, split", unit="MiB", si="B", scale=MIB),
    Column(key="whole_state_bytes", header="states, whole", unit="MiB", si="B", scale=MIB, digits=3),
    replace(SENT, of=None),
)


def runs(
    tier: Tier, recipe: Recipe, repeats: int, constant: Sequence[int], with_data: Sequence[Plan],
    precision: Precision = "fp32",
) -> list[Run]:  # fmt: skip
    """Return figure 5's two curves and table 8's, and both choices the other way for every model that is split."""
    models = MODELS[tier]
    made = [(model, Plan(tp=tp)) for tp, model in models.items()]
    made += [(models[plan.tp], plan) for plan in with_data] + [(models[1], Plan(tp=tp)) for tp in constant]
    for tp, model in list(models.items())[1:]:
        made += [(model, Plan(tp=tp, sequence_parallel=True)), (model, Plan(tp=tp, overlap_input_grad_reduce=False))]
    return repeated([speed(*one, recipe, precision) for one in made], repeats)


def what_grows(run: Run) -> str:
    """Return what grows along the curve of a point; all curves begin at the first model on one rank."""
    tp, dp = run.plan.tp, run.plan.dp
    for models in MODELS.values():
        if models.get(tp) == run.model:
            return GROWS if dp == 1 else GROWS_WITH_DATA
        if models[1] == run.model and dp == 1:
            return CONSTANT
    return "other"


def begins(run: Run) -> bool:
    """Return True for the first model on one rank, where all curves begin."""
    return what_grows(run) == GROWS and run.plan.world_size == 1


def is_plain(run: Run) -> bool:
    """Return True if layers work as in the paper, and gradients are reduced as they come."""
    return not run.plan.sequence_parallel and run.plan.overlap_input_grad_reduce


def printed(one: Point) -> float:
    """Return what the paper prints for a point's degrees and curve, whatever the size of the model here."""
    plan = one.run.plan
    return published_efficiency(what_grows(one.run), plan.tp, plan.dp) if is_plain(one.run) else math.nan


def compared(records: Sequence[Record]) -> list[Point]:
    """Return timed points, each with its rate of model FLOPs per device over that of the first model on one rank."""
    return efficiencies(records, flop_rate, lambda one: begins(one.run), printed)


def table(records: Sequence[Record]) -> Table:
    """Tabulate efficiency next to the published one, and weights, gradients and optimizer states of a rank."""
    order = lambda one: (ORDER.index(what_grows(one.run)), one.run.plan.tp, not is_plain(one.run))
    found = sorted(compared(records), key=order)
    varies = dict(zip(found, labels([one.run for one in found], SHAPE), strict=True))
    columns = (
        of_run("grows", "what grows", what_grows, text=True), MODEL,
        replace(VARIES, of=varies.get), RANKS, FLOP_RATE, SHARE, IN_PRINT, *HELD, RUNS, MARK,
    )  # fmt: skip
    line = of_run("line", "line", line_of)
    title = f"Efficiency of tensor parallelism{about(records)}"
    return tabulate("tensor_parallel", title, columns, found, NOTES, line=line)


def line_of(run: Run) -> str:
    """Return the name of a point's line in the figure; empty where all begin."""
    if begins(run):
        return ""
    way = "" if is_plain(run) else ", sequence parallel" if run.plan.sequence_parallel else ", no input overlap"
    return LINES.get(what_grows(run), what_grows(run)) + way


def on_curve(records: Sequence[Record], grows: str) -> list[Point]:
    """Return a curve's plain points whose efficiency is known, by degree."""
    is_on = lambda run: what_grows(run) == grows or (grows == CONSTANT and begins(run))
    found = [one for one in known(compared(records)) if is_plain(one.run) and is_on(one.run)]
    return sorted(found, key=lambda one: one.run.plan.tp)


def as_published(grows: str) -> Check:
    """Return a check that the paper's models, the 8-way one among them, are as efficient here, within POINTS."""

    def found(records: Sequence[Record]) -> list[tuple[float, float, int]]:
        paper = MODELS["paper"]
        ours = [one for one in on_curve(records, grows) if one.run.model in paper.values()]
        ours = [one for one in ours if one.printed["published"] < 1]
        pairs = [(one.relative.mean, one.printed["published"], one.run.plan.world_size) for one in ours]
        return pairs if any(one.run.plan.tp == max(paper) for one in ours) else []

    return each(found, within(POINTS), "points", "{0:.1%} on {2} (published {1:.1%})")


def falls_along(grows: str) -> Check:
    """Return a check that efficiency falls with every increase of the tensor-parallel degree."""

    def check(records: Sequence[Record]) -> Evidence | None:
        curve = on_curve(records, grows)
        numbers = ", ".join(f"{one.relative.mean:.1%} (tp={one.run.plan.tp})" for one in curve)
        return falls([one.relative.mean for one in curve], "steps", numbers)

    return check


def states_fall(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every rank holds the bytes of the formula; shares are of models that one rank held whole, too."""
    names, exact = model_names(records), list[bool]()
    by_model: dict[str, dict[int, tuple[float, float]]] = {}
    for one in in_order(records):
        run, held = one.run, (one.split_state_bytes, one.whole_state_bytes)
        if not math.isnan(held[0]):
            vocab_size = one.resolved.vocab_size or 0
            exact.append(held == state_bytes(run.model, vocab_size, tp=run.plan.tp, precision=run.precision))
            by_model.setdefault(names[shape(run)], {})[run.plan.tp] = held
    numbers = [
        f"{model}, tp={tp}: {sum(at[tp]) / sum(at[1]):.1%} ({at[tp][1] / sum(at[1]):.1%} whole)"
        for model, at in by_model.items()
        for tp in sorted(at)
        if tp > 1 and 1 in at
    ]
    return tally(exact, "runs to the byte", "; ".join(numbers)) if numbers else None


def no_slower(way: str) -> Check:
    """Return a check that layers are no slower with a field of the plan on than off, wherever both were run.

    Equal predictions to the last bit are one prediction twice, as a system's habits override the field: no evidence.
    """

    def ratios(records: Sequence[Record]) -> list[tuple[float, str, int]]:
        split = [one for one in compared(records) if one.run.plan.tp > 1 and not one.is_oversubscribed]
        place = lambda one: (apart_from(one.run, f"plan.{way}"), one.device)
        off = {place(one): one for one in split if not getattr(one.run.plan, way)}
        rate = lambda one: one.mean(lambda record: record.tokens_per_second)
        found = [
            (one, rate(one) / rate(off[place(one)]))
            for one in split
            if getattr(one.run.plan, way) and place(one) in off
        ]
        return [(ratio, one.model, one.run.plan.tp) for one, ratio in found if not one.is_simulated or ratio != 1]

    text = "{:.3f} times as fast ({}, tp={})"
    return each(ratios, lambda ratio, *_: ratio >= SLOWER, "pairs", text, "; ")


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.1, tables 1 and 8, figure 5",
    expectation="efficiency falls with every doubling of the ranks that share a layer, to 77% on 8 GPUs and 74% on 512 "
    "with data parallelism on top; the same model on more ranks falls off faster; states of a rank fall as 1/t",
    claims=(
        Claim(
            "efficiency falls with the tensor-parallel degree while the model grows with it",
            "figure 5, model parallel", falls_along(GROWS), "100% (tp=1), 95% (tp=2), 82% (tp=4), 77% (tp=8)",
        ),
        Claim(
            "the paper's models on 2, 4 and 8 GPUs are within 5 points of its 95, 82 and 77%",
            "figure 5, model parallel", as_published(GROWS),
        ),
        Claim(
            "the paper's models on 64 to 512 GPUs are within 5 points of its 96, 83, 79 and 74%",
            "figure 5, model and data parallel", as_published(GROWS_WITH_DATA),
        ),
        Claim(
            "efficiency falls with the tensor-parallel degree while the model is constant", "table 8",
            falls_along(CONSTANT), "100% (tp=1), 82% (tp=2), 58.5% (tp=4), 37.3% (tp=8)",
        ),
        Claim(
            "1.2B on 2, 4 and 8 GPUs is within 5 points of 82, 58.5 and 37.3%: 1.64, 2.34 and 2.98 times as fast",
            "table 8", as_published(CONSTANT),
        ),
        Claim(
            "states of a rank fall as 1/t but for padding and for what is whole on every rank, to the byte",
            "section 3", states_fall,
        ),
        Claim(
            "input gradients that are reduced while weight gradients are computed make no step over 2% slower",
            "our own", no_slower("overlap_input_grad_reduce"),
        ),
        Claim(
            "splitting the duplicated work over the tokens makes no step over 2% slower",
            "Korthikanti et al. 2022, table 4", no_slower("sequence_parallel"),
        ),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "5 min, 2 CPU cores", "paper": "20 min, 512 GPUs with 80 GB"},
    deviations="bf16, not fp16; microbatches of 4 sequences and no recomputation, for GPUs with 80 GB. At `smoke` and "
    "`small` models are 1000 times smaller and the data-parallel degree is 2; degrees beyond the cores of the machine "
    "are there for their memory.",
    runs={
        "smoke": runs("smoke", CPU, 1, (2, 4), [Plan(dp=2)]),
        "small": runs("small", CPU, 3, (2, 4), [Plan(dp=2)]),
        "paper": runs("paper", GPU, 3, (2, 4, 8), [Plan(tp=tp, dp=64) for tp in MODELS["paper"]], "bf16"),
    },
)  # fmt: skip
