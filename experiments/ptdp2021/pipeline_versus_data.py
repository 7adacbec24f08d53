"""Should GPUs share a model's depth, or each have all of it and a part of the batch?

PTD-P trains 5.9B parameters on 64 GPUs, from 2 stages and 32-way data parallelism to 32 stages and 2-way (section
5.4.2, figure 14). The bubble is (n - d) / (B / b) for n GPUs of which d are data-parallel: the deeper the pipeline, the
slower. Pipelines are for models that do not fit, and data parallelism is for speed.
"""

from experiments.ptdp2021 import AT_SAME_RANKS, DEVIATIONS, on_selene, two_ways
from harness.experiment.kit import BATCH, DP, PP, Comparison, Experiment, ModelConfig, cost

MODEL = ModelConfig(num_layers=32, hidden_size=3840, num_heads=32)
FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 14",
    name="pipeline_versus_data",
    title="Pipeline against data parallelism",
    run_of=lambda row: on_selene(row, MODEL),
    shown=(BATCH, PP, DP),
    at=(PP, DP),
    **AT_SAME_RANKS,
)

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.4.2, figure 14",
    expectation="slower with every doubling of the stages, to 69% at batch 32 and 61% at batch 512",
    claims=(
        FIGURE.direction(
            "the deeper the pipeline, the slower, at as many ranks and the same batch",
            FIGURE.ordered(PP),
            "bubble",
            FIGURE.in_print(PP),
        ),
        FIGURE.quantitative("5.9B on 64 GPUs has relative rates within 5 points of the published", "bubble"),
    ),
    table=FIGURE.table,
    cost=cost("3 min", "10 min, 64 GPUs with 80 GB"),
    deviations=DEVIATIONS
    + "At `smoke` and `small` a model of eight small layers is on two ranks, in the two layouts there "
    "are; at `small`, layouts of four ranks share two cores, and say nothing of speed.",
    runs={**two_ways("dp", "pp", (8, 32)), "paper": FIGURE.runs},
)
