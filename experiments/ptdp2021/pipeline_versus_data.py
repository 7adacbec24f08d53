"""Should GPUs share a model's depth, or each have all of it and a part of the batch?

PTD-P trains 5.9B parameters on 64 GPUs, from 2 stages and 32-way data parallelism to 32 stages and 2-way (section
5.4.2, figure 14). The bubble is (n - d) / (B / b) for n GPUs of which d are data-parallel: the deeper the pipeline, the
slower. Pipelines are for models that do not fit, and data parallelism is for speed.
"""

from experiments.ptdp2021.pipeline_weak_scaling import DEVIATIONS, layouts, on_selene
from harness.analysis.tables import FLOP_RATE
from harness.experiment.claims import Claim
from harness.experiment.comparison import AS_SIMULATED, Figure, as_published, faster_at_larger_batch, in_print, ordered
from harness.experiment.experiment import Experiment
from impl.model.config import ModelConfig
from impl.plan import Plan

MODEL = ModelConfig(num_layers=32, hidden_size=3840, num_heads=32)
FIGURE = Figure(
    paper="ptdp2021",
    where="figure 14",
    name="pipeline_versus_data",
    title="Pipeline against data parallelism",
    run_of=lambda row: on_selene(row, MODEL),
    shown=("global_batch", "pp", "dp"),
    baseline=lambda row: -row[FLOP_RATE.key],
    relative_to="the fastest layout of as many ranks at the same batch",
    group=("ranks", "global_batch"),
    line=("ranks", "global_batch"),
    at=("pp", "dp"),
)
TWO = (Plan(dp=2), Plan(pp=2))
FOUR = (Plan(dp=4), Plan(dp=2, pp=2), Plan(pp=4))

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.4.2, figure 14",
    expectation="slower with every doubling of the stages, to 69% at batch 32 and 61% at batch 512",
    claims=(
        Claim(
            text="the deeper the pipeline, the slower, at as many ranks and the same batch",
            source="figure 14",
            check=ordered(FIGURE, "pp"),
            published=in_print(FIGURE, "pp"),
        ),
        Claim(
            text="every layout is faster at a larger batch", source="figure 14", check=faster_at_larger_batch(FIGURE)
        ),
        Claim(
            text="5.9B on 64 GPUs has relative rates within 5 points of the published",
            source="figure 14",
            check=as_published(FIGURE),
        ),
        AS_SIMULATED,
    ),
    found="A pipeline of two ranks keeps 83% of the rate of two data-parallel ranks at batch 8 and 86% at 32, and "
    "steps are within 3% of the simulated ones.",
    table=FIGURE.table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "3 min, 2 CPU cores", "paper": "10 min, 64 GPUs with 80 GB"},
    deviations=DEVIATIONS
    + "At `smoke` and `small` a model of eight small layers is on two ranks, in the two layouts there "
    "are; at `small`, layouts of four ranks share two cores, and say nothing of speed.",
    runs={
        "smoke": layouts(128, TWO, (8, 32)),
        "small": layouts(256, TWO, (8, 32), repeats=3) + layouts(256, FOUR, (8,)),
        "paper": FIGURE.runs,
    },
)
