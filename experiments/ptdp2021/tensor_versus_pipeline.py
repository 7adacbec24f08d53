"""Should GPUs share every layer of a model, or its depth?

PTD-P trains 162B parameters on 64 GPUs without data parallelism, from 32 ranks to a layer and 2 stages to 2 and 32
(section 5.4.1, figure 13). Tensor parallelism is best up to the GPUs of a node, eight, and pipelines beyond:
all-reduces between nodes are slow, and a deep pipeline has a large bubble where the batch is small.
"""

from collections.abc import Sequence

from experiments.ptdp2021 import AT_SAME_RANKS, DEVIATIONS, on_selene, two_ways
from harness.experiment.kit import (
    BATCH, MIB, PP, RANKS, TP, Claim, Comparison, Experiment, ModelConfig, Record, Run, cost, each, flop_rate, grouped,
    points,
)  # fmt: skip

FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 13",
    name="tensor_versus_pipeline",
    title="Tensor against pipeline parallelism",
    run_of=lambda row: on_selene(row, ModelConfig(num_layers=32, hidden_size=20480, num_heads=128)),
    shown=(BATCH, TP, PP),
    at=(PP, TP),
    **AT_SAME_RANKS,
)
NODE = 8
"""GPUs of one of Selene's nodes."""


def sent(records: Sequence[Record]) -> list[tuple[float, float, Run]]:
    """Return the MiB that tensor-parallel ranks send, and as many pipeline ranks; they count with any cores."""
    of_layers, of_depth = lambda record: record.tp_bytes_sent / MIB, lambda record: record.pp_bytes_sent / MIB
    both = [
        (tensor.mean(of_layers), deep.mean(of_depth), deep.run)
        for group in grouped(points(records, flop_rate), RANKS, BATCH)
        for tensor in group
        for deep in group
        if tensor.run.plan.tp == deep.run.plan.pp == deep.run.plan.world_size
    ]
    return [one for one in both if min(one[:2]) > 0]


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
            each(
                sent,
                lambda tensor, deep, _: tensor > deep,
                "batches",
                "{2.plan.world_size} ranks, batch {2.train.global_batch}: {0:.3g} and {1:.3g} MiB",
                "; ",
            ),
            kind="self-consistency",
        ),
    ),
    table=FIGURE.table,
    cost=cost("3 min", "15 min, 64 GPUs with 80 GB"),
    deviations=DEVIATIONS + "At `smoke` and `small` a "
    "model of eight small layers is on two ranks, in the two layouts there are; at `small`, layouts of four ranks "
    "share two cores, and say what is sent but nothing of speed. CPUs have no nodes: what the paper finds is absent.",
    runs={**two_ways("tp", "pp", (4, 32)), "paper": FIGURE.runs},
)
