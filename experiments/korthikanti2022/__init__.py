"""What the experiments of Korthikanti et al. 2022 (arXiv 2205.05198) share: its models, and ways of saving memory."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from experiments.ptdp2021 import on_selene
from harness.experiment.kit import (
    PP, TP, UNKNOWN, Estimate, Measure, ModelConfig, Plan, Point, Precision, Recipe, Record, Run, Tolerance, apart_from,
    named, of_run, points, published, published_number, untested, with_printed,
)  # fmt: skip
from impl.cost.activations import layer_bytes
from impl.cost.parameters import ELEMENT_BYTES

PAPER = {name: named(name) for name in ("korthikanti-22b", "korthikanti-175b", "korthikanti-530b", "korthikanti-1t")}
"""Models of table 3, by their names among the published numbers."""
MICROBATCH = {"korthikanti-22b": 4}
"""Microbatch of the models of table 3 whose microbatch is not 1."""
SAME_SHARE = Tolerance(0.01, "a point: what the figure is read to", "2026-11-21")
"""Largest difference between equal shares of memory."""
DEGREE = 8
"""The tensor-parallel degree of all of them."""
SMOKE = ModelConfig(hidden_size=128, num_heads=8, seq_len=256, dropout=0.1)
NOTHING, SPLIT, SELECTIVE, FULL = "", "_sequence_parallel", "_selective", "_full_recompute"
BOTH = SPLIT + SELECTIVE
WAYS = {way: (SPLIT in way, recompute) for way, recompute in (
    (NOTHING, "none"), (SPLIT, "none"), (SELECTIVE, "selective"), (BOTH, "selective"), (FULL, "full"),
)}  # fmt: skip
"""Ways of saving memory, by the suffixes of the names of published quantities: `sequence_parallel` and `recompute`."""
T, P = replace(TP, header="t"), replace(PP, header="p")
PARALLEL = of_run(
    "parallel", "parallel", text=True,
    value=lambda run: "no" if run.plan.tp == 1 else "tensor, sequence" if run.plan.sequence_parallel else "tensor",
)  # fmt: skip
LAYER = "layer_activation_bytes"
layer, rate_of = attrgetter(LAYER), attrgetter("tokens_per_second")
"""Measures of a record: bytes that the last layer keeps of one microbatch, on the rank with most; tokens per second."""
in_print = partial(published_number, "korthikanti2022")
"""Function of a quantity and a model that returns what the paper prints; NaN: nothing."""


def counted(one: Point) -> float:
    """Return the mean of `layer` over a point's records."""
    return one.mean(layer)


def rate(one: Point) -> float:
    """Return the sequences per second."""
    return one.mean(rate_of) / one.run.model.seq_len


@dataclass(frozen=True, eq=False)
class Saved(Point):
    """Point that saves memory in one way, among those that are equal but for the way."""

    same: Mapping[str, "Saved"] = field(default_factory=dict)
    """These points by their way, itself among them."""

    def share(self, of: Callable[["Saved"], float] = counted) -> float:
        """Return the share of the bytes of nothing saved; NaN if that was not run."""
        return of(self) / of(self.same[NOTHING]) if NOTHING in self.same else math.nan

    @property
    def is_split(self) -> bool:
        """True if ranks share a layer, and what tensor parallelism duplicates is split over the sequence."""
        return self.run.plan.sequence_parallel and self.run.plan.tp > 1

    @property
    def formula_share(self) -> float:
        """Predicted bytes of a layer, as a share of those with nothing saved."""
        return layer_bytes(self.run) / layer_bytes(with_way(self.run, NOTHING))

    def rate_over(self, way: str) -> Estimate:
        """Return the tokens per second over those of another way; NaN if that was not run, or ranks shared cores."""
        return self.over(self.same[way], rate_of) if way in self.same else UNKNOWN


def saved(
    records: Sequence[Record],
    measure: Measure = layer,
    paper: Mapping[Run, Point] | None = None,
    *,
    failed: bool = False,
) -> list[Saved]:
    """Return the points that have a measure, each with those of other ways on its device, and with a paper's numbers.

    `paper` has its points by their runs; with `failed` unsuccessful runs are returned too.
    """
    groups: dict[tuple[Run, str], dict[str, Saved]] = {}
    found: list[Saved] = []
    for one in with_printed(points(records, measure, failed=failed), paper or {}):
        same = groups.setdefault((apart_from(one.run, "plan.sequence_parallel", "plan.recompute"), one.device), {})
        found.append(Saved(**vars(one), same=same))
        same.setdefault(way_of(one.run), found[-1])
    return found


def way_of(run: Run) -> str:
    """Return a run's way of saving memory."""
    own = run.plan.sequence_parallel, run.plan.recompute
    return next((way for way, plan in WAYS.items() if plan == own), "none of these")


def with_way(run: Run, way: str) -> Run:
    """Return the run with another way of saving memory."""
    sequence_parallel, recompute = WAYS[way]
    plan: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    return replace(run, plan=replace(run.plan, **plan))


def few_steps(
    model: ModelConfig,
    plan: Plan,
    microbatch: int,
    microbatches: int = 1,
    steps: int = 2,
    precision: Precision = "bf16",
) -> Run:
    """Return a run for the memory of a layer; two steps suffice."""
    batch = microbatch * microbatches
    recipe = Recipe(steps=steps, global_batch=batch, microbatch=microbatch, warmup_steps=0)
    return untested(model, plan, recipe, precision)


def quarter(model: ModelConfig) -> ModelConfig:
    """Return the model with a quarter of the heads and the sequence, so that 5as/h and the share stay the same."""
    head_size = model.hidden_size // model.num_heads // 4
    shape = {"num_layers": 2, "hidden_size": DEGREE * head_size, "num_heads": DEGREE, "seq_len": model.seq_len // 4}
    return replace(model, **shape, vocab_size=None)


def shallow(name: str) -> ModelConfig:
    """Return one of the paper's models with two layers, which fits eight GPUs with any recomputation."""
    return replace(PAPER[name], num_layers=2)


def two_layers(name: str) -> Run:
    """Return a two-layer run of one of the paper's models, which fits eight GPUs with any recomputation."""
    run = few_steps(shallow(name), Plan(tp=DEGREE), MICROBATCH.get(name, 1), steps=10)
    return replace(run, train=replace(run.train, lr=1e-4, warmup_steps=2))


def scores(model: ModelConfig) -> float:
    """Return 5as/h: bytes of attention's scores, in units of sbh."""
    return 5 * model.num_heads * model.seq_len / model.hidden_size


def activation_bytes_per_layer(
    config: ModelConfig, microbatch: int, *, tp: int, sequence_parallel: bool, element_size: int = 2
) -> float:
    """Return the bytes that one layer with dropout keeps of a microbatch.

    sbh (10 + 24/t + 5as/ht); with sequence parallelism 34/t for the first two terms.

    Sizes are of 16-bit activations with masks of a byte; attention is not fused, as dropout with reproducible masks
    needs. Norms are two a layer in the source; here they are counted. Means and deviations of norms are left out, as in
    the source.

    Source: Korthikanti et al. 2022, equations 2 and 4, table 2.
    """
    b, s, h, e = microbatch, config.seq_len, config.hidden_size, element_size
    # inputs of norms and of the column-parallel layers, two dropout masks
    tokens = e * config.norms.of_tokens + 2 * e + 2
    kept = sum(config.qkv_sizes) + h + sum(config.mlp_outputs) + config.mlp_inner
    features = kept / h * e  # q, k and v, context, both sides of the GELU
    scores = (2 * e + 1) * config.num_heads * s / h  # probabilities before and after dropout, its mask
    return s * b * h * (tokens / (tp if sequence_parallel else 1) + (features + scores) / tp)


def by_table_2(one: Point) -> float:
    """Return table 2's bytes of a layer, which leave out what is small beside sbh."""
    run = one.run
    sizes = {"tp": run.plan.tp, "sequence_parallel": run.plan.sequence_parallel}
    return activation_bytes_per_layer(
        run.model, run.train.microbatch, **sizes, element_size=ELEMENT_BYTES[run.precision]
    )


def share_by_table_2(one: Point) -> float:
    """Return table 2's share of the bytes of nothing saved."""
    return by_table_2(one) / by_table_2(Point(with_way(one.run, NOTHING)))


def same_in_paper(run: Run) -> list[str]:
    """Return the paper's models that have the same t and 5as/h, of a run with dropout that saves in some way."""
    if way_of(run) == NOTHING or not run.model.dropout or run.plan.tp != DEGREE:
        return []
    return [name for name, model in PAPER.items() if scores(model) == scores(run.model)]


def published_share(run: Run) -> float:
    """Return figure 7's share of the bytes of nothing saved, of a model with the same t and 5as/h; NaN without one."""
    names = same_in_paper(run)
    return in_print(f"activation_memory{way_of(run)}", names[0]) / 100 if names else math.nan


def beside_figure_7(found: Iterable[Saved]) -> list[tuple[float, float]]:
    """Return the points' shares of the bytes of nothing saved, counted and published."""
    return [(one.share(), published_share(one.run)) for one in found]


def size_of(name: str) -> str:
    """Return the size of one of the paper's models, as `530B`."""
    return name.rpartition("-")[2].upper()


def of_table_5(name: str, way: str) -> Run:
    """Return the run behind a row of table 5; 175B and 530B run with three chunks a rank (table 3)."""
    row = next(row for row in published("korthikanti2022", "parameters").to_dict("records") if row["model"] == name)
    chunks: dict[str, Any] = {"schedule": "interleaved", "chunks": 3} if "3 chunks" in row["note"] else {}
    return with_way(on_selene(row, PAPER[name], MICROBATCH.get(name, 1), **chunks), way)
