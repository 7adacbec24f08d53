"""How much activation memory is left when what tensor parallelism duplicates is split over the sequence?

Tensor parallelism splits the activations inside attention and MLP, and keeps those of LayerNorms and dropouts, 10 sbh
bytes a layer, whole on every rank; sequence parallelism splits these as well (section 4, table 2). Figure 7 draws what
is left of the memory for models of 22B to 1T parameters, as a share of tensor parallelism's alone; here without its
selective recomputation. By the formula that share depends on t and on 5as/h only, so that a small model with the
paper's degree, and its ratio of sequence to head size, has the share of the large one.
"""

from collections.abc import Sequence

from experiments.korthikanti2022 import (
    DEGREE, LAYER, MICROBATCH, NOTHING, PAPER, PARALLEL, SAME_SHARE, SMOKE, SPLIT, T, Saved, beside_figure_7,
    by_table_2, counted, few_steps, published_share, quarter, same_in_paper, saved, scores, shallow, share_by_table_2,
    size_of, with_way,
)  # fmt: skip
from harness.experiment.kit import (
    MODEL, Claim, Column, Experiment, ModelConfig, Plan, Record, Run, Tolerance, as_expected, cost, each, mebibytes,
    of_run, share, table_of, within,
)  # fmt: skip

CLOSE = Tolerance(0.02, "the formula leaves out what is small beside sbh", "2026-11-20")
"""Relative distance of counted bytes from the formula's."""


def memory(model: ModelConfig, tp: int, microbatch: int) -> list[Run]:
    """Return two-step runs for the memory only, without sequence parallelism and, if ranks share a layer, with it."""
    run = few_steps(model, Plan(tp=tp), microbatch)
    return [with_way(run, way) for way in ((NOTHING, SPLIT) if tp > 1 else (NOTHING,))]


def counts(records: Sequence[Record]) -> list[Saved]:
    return saved(records, failed=True)


def shares(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return the shares that sequence parallelism leaves, counted and published."""
    return beside_figure_7(one for one in counts(records) if one.is_split)


COLUMNS = (
    MODEL, of_run("hidden", "h", lambda run: run.model.hidden_size),
    of_run("heads", "a", lambda run: run.model.num_heads), of_run("seq_len", "s", lambda run: run.model.seq_len),
    of_run("microbatch", "b", lambda run: run.train.microbatch), T,
    of_run("scores", "5as/h", lambda run: scores(run.model)), PARALLEL,
    mebibytes(LAYER, "layer, measured"), mebibytes("formula", "layer, formula", by_table_2),
    Column(key="measured_over_formula", header="measured over formula", of=lambda one: counted(one) / by_table_2(one)),
    share("share", "share, measured", lambda one: one.share() if one.is_split else None),
    share("formula_share", "share, formula", lambda one: share_by_table_2(one) if one.is_split else None),
    share("published", "share, published", lambda one: published_share(one.run)),
    of_run("same", "published of", lambda run: ", ".join(map(size_of, same_in_paper(run))), text=True),
)  # fmt: skip
NOTES = (
    "Bytes that the forward pass of one microbatch keeps for the backward pass in the last layer, parameters left "
    "out, on the rank with most of them. Formula: Korthikanti et al. 2022, table 2.",
    "Share: of the bytes of tensor parallelism alone. Published: figure 7, of models with the same t and 5as/h, on "
    "which alone the formula's share depends.",
)

EXPERIMENT = Experiment(
    source="Korthikanti et al. 2022, section 4, tables 2 and 3, figure 7",
    expectation="a layer keeps what table 2's formulas say; sequence parallelism leaves 66.8% (22B), 62.0% (175B) and "
    "58.3% (530B, 1T) of it at 8 ranks",
    claims=(
        Claim(
            "bytes of a layer are the formula's, within 2%", "table 2",
            as_expected(counts, counted, by_table_2, CLOSE, digits=2), kind="self-consistency", tolerance=CLOSE,
        ),
        Claim(
            "sequence parallelism leaves the share of figure 7, within a point, for the same t and 5as/h", "figure 7",
            each(shares, within(SAME_SHARE), "points", "{:.1%} (published {:.1%})"),
            "66.8% (22B), 62.0% (175B), 58.3% (530B and 1T)", kind="self-consistency", tolerance=SAME_SHARE,
        ),
    ),
    table=table_of("activation_memory", "Activation memory of a layer", COLUMNS, counts, NOTES, is_timed=False),
    cost=cost("4 min", "5 min, 8 GPUs with 80 GB"),
    deviations="bf16, not fp16. The paper's models have two layers of their width here: one layer is what is "
    "compared, and without pipelines and recomputation all of them do not fit 8 GPUs. At `small` heads and sequence "
    "are a quarter of the paper's, with one head a rank: t and 5as/h, on which the share depends, are the paper's. "
    "Selective and full recomputation, figure 7's other bars, are in korthikanti2022/activation_recomputation. Two "
    "steps a run, often on fewer cores than ranks: the times say nothing.",
    runs={
        "smoke": [run for tp in (1, 2, 4) for run in memory(SMOKE, tp, 4)],
        "small": [
            *(run for tp in (1, 2, 4) for run in memory(quarter(PAPER["korthikanti-175b"]), tp, 16)),
            *(run for name in PAPER if name != "korthikanti-1t" for run in memory(quarter(PAPER[name]), DEGREE, 16)),
        ],  # 1T's quarter is 530B's
        "paper": [run for name in PAPER for run in memory(shallow(name), DEGREE, MICROBATCH.get(name, 1))],
    },
)  # fmt: skip
