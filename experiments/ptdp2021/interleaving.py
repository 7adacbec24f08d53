"""How much faster are pipelines whose ranks own several chunks of the model, and when does it stop paying?

PTD-P trains GPT-3 (175B) on 96 GPUs, eight to a layer and twelve deep, with one stage of eight layers a rank and with
four chunks of two (section 5.3.2, figure 12). Interleaving divides the bubble by the chunks and multiplies what is
sent; as the batch grows the bubble, and with it the gain, gets smaller.
"""

from collections.abc import Sequence
from typing import Any

from experiments.ptdp2021 import DEVIATIONS, layouts, on_selene
from harness.experiment.kit import (
    BATCH, CHUNKS, PP, SCHEDULE, TP, Comparison, Experiment, Plan, Printed, Run, cost, named,
)  # fmt: skip

CHUNKS_OF = {"hardware_flop_rate_one_f_one_b": 1, "hardware_flop_rate_interleaved": 4}


def plan_of(chunks: int) -> dict[str, Any]:
    return {"schedule": "one_f_one_b" if chunks == 1 else "interleaved", "chunks": chunks}


def run_of(printed: Printed) -> Run:
    return on_selene(printed, named("gpt-175b"), **plan_of(CHUNKS_OF[printed["quantity"]]))


FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 12",
    name="interleaving",
    title="Interleaved pipelines",
    run_of=run_of,
    shown=(TP, PP, SCHEDULE, CHUNKS, BATCH),
    baseline=lambda point: point.run.plan.chunks,
    relative_to="one chunk a rank (1F1B) at the same batch",
    line=(SCHEDULE, CHUNKS),
)


def runs(seq_len: int, microbatches: Sequence[int], chunks: Sequence[int], repeats: int) -> list[Run]:
    """Return runs two ranks deep; the paper's batches are 1 to 5 times the pipeline's depth, in microbatches."""
    return layouts(seq_len, [Plan(pp=2, **plan_of(v)) for v in chunks], [2 * m for m in microbatches], repeats)


EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.3.2, figure 12",
    expectation="45% faster at one microbatch for every pipeline rank, 8% at five",
    claims=(
        FIGURE.direction(
            "interleaved is faster than 1F1B at every batch",
            FIGURE.faster(CHUNKS),
            "bubble",
            "+45, +23, +16, +10 and +8% at batches 12 to 60",
        ),
        FIGURE.direction(
            "what it gains shrinks as the batch grows", FIGURE.gain_shrinks(CHUNKS, "numbers of chunks"), "bubble"
        ),
        FIGURE.quantitative("175B on 96 GPUs gains within 5 points of the published 45, 23, 16, 10 and 8%", "bubble"),
    ),
    table=FIGURE.table,
    cost=cost("7 min", "15 min, 96 GPUs with 80 GB"),
    deviations=DEVIATIONS
    + "Both schedules scatter what they send, which the paper says of the interleaved one only. At "
    "`smoke` and `small` the pipeline is two ranks deep, of a model of eight small layers, with the paper's ratio of "
    "microbatches to ranks.",
    runs={"smoke": runs(128, (2, 10), (1, 2), 1), "small": runs(256, (2, 6, 10), (1, 2, 4), 8), "paper": FIGURE.runs},
)
