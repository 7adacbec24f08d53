"""Should GPUs share every layer of a model, or its depth?

PTD-P trains 162B parameters on 64 GPUs without data parallelism, from 32 ranks to a layer and 2 stages to 2 and 32
(section 5.4.1, figure 13). Tensor parallelism is best up to the GPUs of a node, eight, and pipelines beyond:
all-reduces between nodes are slow, and a deep pipeline has a large bubble where the batch is small.
"""

from collections.abc import Sequence

from experiments.ptdp2021 import DEVIATIONS, cost, layouts, on_selene
from harness.experiment.kit import (
    BATCH, MIB, PP, RANKS, TP, Claim, Comparison, Evidence, Experiment, ModelConfig, Plan, Record, points, tally,
)  # fmt: skip

FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 13",
    name="tensor_versus_pipeline",
    title="Tensor against pipeline parallelism",
    run_of=lambda row: on_selene(row, ModelConfig(num_layers=32, hidden_size=20480, num_heads=128)),
    shown=(BATCH, TP, PP),
    relative_to="the fastest layout of as many ranks at the same batch",
    group=(RANKS, BATCH),
    line=(RANKS, BATCH),
    at=(PP, TP),
)
NODE = 8
"""GPUs of one of Selene's nodes."""


def layers_cost_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether tensor-parallel ranks send more than as many pipeline ranks; holds with any number of cores."""
    sent: dict[tuple[int, int], dict[str, float]] = {}
    for one in points(records, lambda record: record.flop_rate):
        plan, ranks, batch = one.run.plan, one.run.plan.world_size, one.run.train.global_batch
        within, between = one.mean(lambda record: record.tp_bytes_sent), one.mean(lambda record: record.pp_bytes_sent)
        for way, degree, size in (("tp", plan.tp, within), ("pp", plan.pp, between)):
            if degree == ranks and size > 0:
                sent.setdefault((ranks, batch), {})[way] = size
    both = {at: ways for at, ways in sent.items() if len(ways) == 2}
    numbers = [f"{n} ranks, batch {b}: {w['tp'] / MIB:.3g} and {w['pp'] / MIB:.3g} MiB" for (n, b), w in both.items()]
    return tally([ways["tp"] > ways["pp"] for ways in both.values()], "batches", "; ".join(numbers))


TWO = (Plan(tp=2), Plan(pp=2))
FOUR = (Plan(tp=4), Plan(tp=2, pp=2), Plan(pp=4))

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.4.1, figure 13",
    expectation="fastest with eight ranks to a layer, a node's; up to half slower with other mixes",
    claims=(
        FIGURE.direction(
            "the fastest of the paper's layouts has as many ranks to a layer as a node has GPUs",
            FIGURE.fastest(TP, NODE, PP),
            "network",
            FIGURE.in_print(TP, PP),
        ),
        FIGURE.quantitative("162B on 64 GPUs has relative rates within 5 points of the published", "network"),
        Claim(
            "ranks that share layers send more than as many that share the depth",
            "section 3.2",
            layers_cost_more,
            kind="self-consistency",
        ),
    ),
    table=FIGURE.table,
    cost=cost("3 min", "15 min, 64 GPUs"),
    deviations=DEVIATIONS + "At `smoke` and `small` a "
    "model of eight small layers is on two ranks, in the two layouts there are; at `small`, layouts of four ranks "
    "share two cores, and say what is sent but nothing of speed. CPUs have no nodes: what the paper finds is absent.",
    runs={
        "smoke": layouts(128, TWO, (4, 32)),
        "small": layouts(256, TWO, (4, 32), repeats=3) + layouts(256, FOUR, (4,)),
        "paper": FIGURE.runs,
    },
)
