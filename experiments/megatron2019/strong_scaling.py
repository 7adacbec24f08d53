"""How much faster does the same model train when two, four and eight GPUs share each of its layers?

Megatron-LM keeps 1.2 billion parameters and a batch of 8 sequences, and adds GPUs: 1.64, 2.34 and 2.98 times as fast
(appendix D, table 8). What a GPU computes falls as 1/t, but what it sends for every layer does not: four all-reduces
of all activations, of which a ring sends 2 (t - 1) / t, and the kernels that are left become small.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from experiments.megatron2019 import (
    IN_PRINT, PRINTED_SPEEDUP, SENT, SENT_NOTE, SHARE_OF_RANKS, SPEEDUP, faster_but_less_so, on_v100s, printed_speedup,
    sped_up, speed, times_as_fast,
)  # fmt: skip
from harness.experiment.kit import (
    MARK, MIB, MODEL, RANKS, RATE, RUNS, TP, Claim, Column, Evidence, Experiment, ModelConfig, Plan, Recipe, Record,
    Run, Tolerance, cost, known, named, repeated, table_of, within_share,
)  # fmt: skip

NEAR = Tolerance(0.1, "assumed: neither repeats nor the cards' clocks are in the paper", "2026-11-21")
"""Relative tolerance of a speed-up against the published one."""
SAME = Tolerance(0.02, "scalars that are reduced besides activations", "2026-11-21")
LARGE = named("gpt-1.2b")
TEN_STEPS = Recipe(steps=10, global_batch=8, microbatch=8, warmup_steps=2)
SHOWN = (
    MODEL, RANKS, TP, RATE, SPEEDUP, PRINTED_SPEEDUP, SHARE_OF_RANKS, IN_PRINT, SENT, RUNS, MARK,
)  # fmt: skip
LINE = Column(key="line", header="line", of=lambda one: "" if one.run.plan.tp == 1 else "only ranks grow")
NOTES = (
    "Speed-up: tokens a second over one rank's, at the same batch; efficiency: that over the number of ranks. "
    "Published: table 8, of 1.2B on V100s, whatever the size here.",
    SENT_NOTE,
)


table = table_of("strong_scaling", "Strong scaling of one model", SHOWN, sped_up, NOTES, line=LINE)


def as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge the speed-ups of the paper's model."""
    found = [one for one in known(sped_up(records)) if one.run.plan.tp > 1 and one.run.model == LARGE]
    pairs = [(one.relative, printed_speedup(one)) for one in found]
    return within_share(pairs, NEAR, "degrees", times_as_fast(found))


def sends_no_less(records: Sequence[Record]) -> Evidence | None:
    """Judge whether bytes that a rank sends grow as (t - 1) / t; they count with any number of cores."""
    sizes = {one.run.plan.tp: one.tp_bytes_sent for one in records if one.run.plan.tp > 1}
    sent = sorted((t, size) for t, size in sizes.items() if not math.isnan(size))
    grown = [(b / a, (1 - 1 / u) / (1 - 1 / t)) for (t, a), (u, b) in pairwise(sent)]
    return within_share(grown, SAME, "", ", ".join(f"{size / MIB:.3g} MiB (t={t})" for t, size in sent))


def runs(model: ModelConfig, repeats: int) -> list[Run]:
    return repeated([speed(model, Plan(tp=tp), TEN_STEPS) for tp in (1, 2, 4)], repeats)


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, appendix D, table 8",
    expectation="1.64, 2.34 and 2.98 times as fast on 2, 4 and 8 GPUs: what is sent for every layer does not fall",
    claims=(
        Claim(
            "every doubling of the ranks is faster, and less than twice as fast", "table 8", faster_but_less_so,
            "1.64, 2.34 and 2.98 times on 2, 4 and 8", kind="direction", about="computing",
        ),
        Claim(
            "1.2B speeds up as published, within a tenth", "table 8", as_published, kind="quantitative",
            about="network", tolerance=NEAR,
        ),
        Claim(
            "what a rank sends in a step does not fall with t, but grows as (t - 1) / t, within 2%", "section 3; rings",
            sends_no_less, kind="self-consistency", tolerance=SAME,
        ),
    ),
    table=table,
    cost=cost("2 min", "5 min, 8 GPUs with 32 GB"),
    deviations="At `paper` every layer is recomputed and a step is one microbatch. At `smoke` and `small` the model is "
    "small and in fp32; four ranks share two cores there, and say what is sent but nothing of speed.",
    runs={
        "smoke": runs(ModelConfig(num_layers=2, hidden_size=128, num_heads=4, seq_len=128, dropout=0.1), 1),
        "small": runs(ModelConfig(num_layers=4, hidden_size=384, num_heads=8, seq_len=256, dropout=0.1), 3),
        "paper": [on_v100s(LARGE, tp) for tp in (1, 2, 4, 8)],
    },
)  # fmt: skip
