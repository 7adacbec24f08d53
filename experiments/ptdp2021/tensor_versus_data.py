"""Should GPUs share every layer of a model, or each have all of it and a part of the batch?

PTD-P trains 5.9B parameters on 64 GPUs, from 2 ranks to a layer and 32-way data parallelism to 32 and 2 (section 5.4.3,
figure 15). Data parallelism reduces gradients once a step; tensor parallelism reduces activations in every layer, for
every microbatch, and beyond a node slowly, and its matrices get small.
"""

from experiments.ptdp2021 import AT_SAME_RANKS, DEVIATIONS, on_selene, two_ways
from experiments.ptdp2021.pipeline_versus_data import MODEL
from harness.experiment.kit import BATCH, DP, TP, Comparison, Experiment, cost

FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 15",
    name="tensor_versus_data",
    title="Tensor against data parallelism",
    run_of=lambda row: on_selene(row, MODEL),
    shown=(BATCH, TP, DP),
    at=(TP, DP),
    **AT_SAME_RANKS,
)

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.4.3, figure 15",
    expectation="fastest with the fewest ranks to a layer; 32 of them have 39, 21 and 17% of that speed at batches of "
    "32, 128 and 512",
    claims=(
        FIGURE.direction(
            "the fewest ranks to a layer are fastest and the most slowest, at as many ranks and the same batch",
            FIGURE.ends(TP),
            "network",
            FIGURE.in_print(TP),
        ),
        FIGURE.quantitative("5.9B on 64 GPUs has relative rates within 5 points of the published", "network"),
    ),
    table=FIGURE.table,
    cost=cost("3 min", "15 min, 64 GPUs with 80 GB"),
    deviations=DEVIATIONS
    + "At `smoke` and `small` a model of eight small layers is on two ranks, in the two layouts there "
    "are; at `small`, layouts of four ranks share two cores, and say nothing of speed.",
    runs={**two_ways("dp", "tp", (8, 32)), "paper": FIGURE.runs},
)
