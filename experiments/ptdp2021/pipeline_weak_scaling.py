"""How much of a GPU's speed is left when a model grows in depth with the ranks that share its layers?

PTD-P adds three layers to a GPT for every pipeline rank of eight tensor-parallel GPUs, from 15B parameters on 8 GPUs to
121B on 64, at batches of 8 and 128 sequences (section 5.3.1, figure 11). A step has as many microbatches as its batch
has sequences, so that the pipeline bubble is (p - 1) / 8 or (p - 1) / 128: the larger batch scales better.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.ptdp2021 import DEVIATIONS, on_selene, timed
from harness.experiment.kit import (
    BATCH, PP, TP, Comparison, Evidence, Experiment, ModelConfig, Plan, Record, Run, cost, repeated, tally,
)  # fmt: skip

FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 11",
    name="pipeline_weak_scaling",
    title="Weak scaling of pipelines",
    run_of=lambda row: on_selene(row, ModelConfig(num_layers=3 * int(row["pp"]), hidden_size=20480, num_heads=128)),
    shown=(BATCH, TP, PP),
    baseline=lambda point: point.run.plan.pp,
    relative_to="the fewest pipeline ranks at the same batch",
)


def small_batch_falls_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the deepest pipeline keeps more of its speed at the larger batch."""
    deepest = {line[-1].run.train.global_batch: line[-1] for line in FIGURE.lines(records, PP)}
    if len(deepest) < 2:
        return None
    small, large = deepest[min(deepest)], deepest[max(deepest)]
    at = f"{small.relative:.0%} at batch {min(deepest)}, {large.relative:.0%} at {max(deepest)}"
    return tally([large.relative / small.relative - 1], "", f"pp {large.run.plan.pp}: {at}")


def runs(hidden: int, seq_len: int, repeats: int) -> list[Run]:
    """Return runs of four layers a rank; two and sixteen microbatches, for a bubble of a half and of a sixteenth."""
    model = ModelConfig(hidden_size=hidden, num_heads=hidden // 64, seq_len=seq_len)
    every = [(replace(model, num_layers=4 * pp), Plan(pp=pp), batch) for batch in (4, 32) for pp in (1, 2)]
    return repeated([timed(*one) for one in every], repeats)


EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.3.1, figure 11",
    expectation="the rate per GPU falls with the pipeline ranks, to 52% of one rank's at batch 8 and 91% at batch 128 "
    "in model FLOPs",
    claims=(
        FIGURE.direction(
            "the rate per device falls with every increase of the pipeline ranks",
            FIGURE.ordered(PP),
            "bubble",
            FIGURE.in_print(PP),
        ),
        FIGURE.direction(
            "it falls less at the larger batch, whose steps have more microbatches", small_batch_falls_more, "bubble"
        ),
        FIGURE.quantitative("the paper's models are within 5 points of its relative rates", "bubble"),
    ),
    table=FIGURE.table,
    cost=cost("4 min", "15 min, 64 GPUs with 80 GB"),
    deviations=DEVIATIONS
    + "At `smoke` and `small` a rank has four small layers, the pipeline is one or two ranks deep "
    "and a step has 2 or 16 microbatches of 2 sequences; no layer is split.",
    runs={"smoke": runs(128, 128, 1), "small": runs(128, 256, 8), "paper": FIGURE.runs},
)
