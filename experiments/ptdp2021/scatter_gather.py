"""What is gained when tensor-parallel ranks send the next stage a part each, which is gathered there?

All tensor-parallel ranks of a stage have the same activations. Sent as they are, every rank sends all of them over its
own network card; scattered, each sends 1/t, and the receivers gather the parts over NVLink (PTD-P, section 4.1). PTD-P
trains GPT-3 (175B) on 96 GPUs both ways, with four chunks a rank, which send most (section 5.7, figure 18).
"""

from collections.abc import Sequence

from experiments.ptdp2021 import DEVIATIONS, layouts, on_selene
from harness.experiment.kit import (
    BATCH, CHUNKS, MIB, PP, SCATTER_GATHER, TP, Claim, Comparison, Experiment, Plan, Printed, Record, Run, by_choice,
    cost, each, named, points,
)  # fmt: skip


def run_of(printed: Printed) -> Run:
    is_on = printed["quantity"].endswith("scatter_gather")
    return on_selene(printed, named("gpt-175b"), schedule="interleaved", chunks=4, scatter_gather=is_on)


FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 18",
    name="scatter_gather",
    title="Scattered transfers between stages",
    run_of=run_of,
    shown=(TP, PP, CHUNKS, SCATTER_GATHER, BATCH),
    baseline=lambda point: point.run.plan.scatter_gather,
    relative_to="everything sent by every rank, at the same batch",
    line=(SCATTER_GATHER,),
)


def sent(records: Sequence[Record]) -> list[tuple[float, float, Run]]:
    """Return the MiB that a rank sends to other stages, scattered and whole; bytes count with any number of cores."""
    size = lambda record: record.pp_bytes_sent / MIB
    both = by_choice(points(records, size), lambda run: run.plan.scatter_gather, "plan.scatter_gather")
    return [(ways[True].mean(size), ways[False].mean(size), run) for (run, _), ways in both.items() if len(ways) == 2]


def runs(seq_len: int, microbatches: Sequence[int]) -> list[Run]:
    """Return runs with two ranks to a layer, two deep, with two chunks each: four ranks, which share two cores."""
    plans = [Plan(tp=2, pp=2, schedule="interleaved", chunks=2, scatter_gather=is_on) for is_on in (False, True)]
    return layouts(seq_len, plans, [2 * m for m in microbatches])


EXPERIMENT = Experiment(
    source="PTD-P 2021, sections 4.1 and 5.7, figure 18",
    expectation="1/t of the bytes; 11% faster, at every batch",
    claims=(
        Claim(
            "a rank sends 1/t of the bytes to other stages, exactly",
            "section 4.1",
            each(
                sent,
                lambda part, whole, run: run.plan.tp * part == whole,
                "batches",
                "batch {2.train.global_batch}, t={2.plan.tp}: {0:.3g} of {1:.3g} MiB",
                "; ",
            ),
            kind="self-consistency",
        ),
        FIGURE.direction(
            "it is faster at every batch", FIGURE.ordered(SCATTER_GATHER, falls=False), "network", "+10 to +11%"
        ),
        FIGURE.quantitative("175B on 96 GPUs gains within 5 points of the published 10 to 11%", "network"),
    ),
    table=FIGURE.table,
    cost=cost("2 min", "10 min, 96 GPUs with 80 GB"),
    deviations=DEVIATIONS
    + "At `smoke` and `small` four ranks share two cores, and say what is sent but nothing of speed.",
    runs={"smoke": runs(128, (2,)), "small": runs(256, (2, 6, 10)), "paper": FIGURE.runs},
)
