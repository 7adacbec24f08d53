"""Is training faster when data-parallel ranks divide a model's states than when more ranks share its layers?

Megatron's tensor parallelism has to grow with the model, and is slow where it leaves a node. ZeRO-100B (gradients and
optimizer states divided, layers recomputed from partitioned inputs) stays within one: 100B parameters reach 38 TFLOP/s
on each of 400 V100s, ten times the baseline (section 10.2, figure 2). The more ranks divide the states, the larger the
batch that each has room for: 60B parameters are more than twice as fast on twice the GPUs (section 10.3, figure 3).
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.zero2019 import (
    BY_A_FIFTH, FIGURES_2_AND_3, OF_ZERO_100B, PRINTED_RATE, SAME_VOLUME, STAGES, beside_printed, faster_than_megatron,
    fewest, megatron, over, super_linear, timed, volumes,
)  # fmt: skip
from harness.experiment.checks import measured_only, within_points, within_share
from harness.experiment.kit import (
    BATCH, DP, FLOP_RATE, MARK, MICROBATCH, MODEL, POINTS, RANKS, RUNS, TP, TP_SENT, ZERO_STAGE, Claim, Column,
    Experiment, ModelConfig, Plan, Record, Run, Table, about, and_absent, printed, share, tabulate,
)  # fmt: skip

NOTES = (
    "Rates: ours counts model FLOPs (palm_12). Published: figures 2 and 3, read off the plots, on V100s with 32 "
    "GB; the paper does not say whether recomputed FLOPs count, and only ratios are to be compared.",
    "Over Megatron's: the rate per device, over that of the same model with more ranks to a layer and undivided "
    "states. Of the fewest: the rate per device, over that on the fewest ranks, whose batch is smaller.",
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate our points, then those of figures 2 and 3; a published point that was run here shares one row."""
    scaling = {(one.run, one.device): one.relative for one in over(records, fewest)}
    dp_sent = lambda one: one.mean(lambda record: record.dp_bytes_sent) if one.run.plan.dp > 1 else None
    columns = (
        MODEL, RANKS, ZERO_STAGE, TP, DP, MICROBATCH, BATCH, FLOP_RATE, PRINTED_RATE,
        Column(key="speedup", header="over Megatron's", si="ratio", digits=3, of=lambda one: one.relative),
        printed("published_speedup", "over Megatron's, published", si="ratio"),
        share("scaling", "per device, of the fewest", lambda one: scaling.get((one.run, one.device))),
        share("published_scaling", "of the fewest, published", lambda one: one.printed.get("published_scaling")),
        replace(TP_SENT, key="dp_bytes_sent", header="sent to data-parallel ranks", of=dp_sent), TP_SENT, RUNS, MARK,
    )  # fmt: skip
    rows = and_absent(over(records, megatron), FIGURES_2_AND_3)
    return tabulate("zero_throughput", f"Throughput with divided states{about(records)}", columns, rows, NOTES)


def small_runs(layers: int, hidden: int, repeats: int) -> list[Run]:
    """Return runs of two ranks with eight sequences, in all stages and as Megatron's; and one with two sequences."""
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=4, seq_len=128)
    layouts = [*((Plan(dp=2, zero_stage=stage), 4) for stage in STAGES), (Plan(tp=2), 8)]
    layouts += [(Plan(zero_stage=OF_ZERO_100B), 2)]
    every = [(replace(plan, bucket_bytes=2**19), batch) for plan, batch in layouts]
    return [timed(model, *one, repeat) for repeat in range(repeats) for one in every]


EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 7, 10.2 and 10.3, figures 2 and 3, tables 5 and 6",
    expectation="1.1 to 10 times Megatron's rate per device, more for larger models; a rate per device that grows by a "
    "half from 64 GPUs to 128",
    claims=(
        Claim(
            "ZeRO-100B is faster than Megatron at every size", "figure 2", measured_only(faster_than_megatron),
            "1.1 to 10.2 times, 10.2 at 100B", kind="direction",
        ),
        Claim(
            "by the published factors, within a fifth", "figure 2",
            lambda records: within_share(beside_printed(records, megatron, "published_speedup"), BY_A_FIFTH, "models"),
            kind="quantitative", about="network", tolerance=BY_A_FIFTH,
        ),
        Claim(
            "more ranks, with larger batches each, are faster each", "figure 3", super_linear, kind="direction",
            about="network",
        ),
        Claim(
            "as much as published, within 5 points", "figure 3",
            lambda records: within_points(beside_printed(records, fewest, "published_scaling"), POINTS, "points"),
            kind="quantitative", about="network", tolerance=POINTS,
        ),
        Claim(
            "the stages 0 to 3 send 2, 2, 2 and 3 times the parameters, within a twentieth", "section 7", volumes,
            kind="self-consistency", tolerance=SAME_VOLUME,
        ),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "40 min, 400 GPUs with 32 GB"},
    deviations="No dropout, with fused attention; the paper names neither vocabulary nor sequence: 51,200 and 1,024. "
    "The baseline is ours too, not Megatron-LM of 2019. At `smoke` and `small` fp32, nothing is recomputed, and a "
    "small model is on two ranks, in all of ZeRO's stages beside two tensor-parallel ranks; one rank has a batch of "
    "two, two ranks of four each. There is no slow network, nor a memory that limits the batch.",
    runs={"smoke": small_runs(4, 128, 1), "small": small_runs(6, 256, 3), "paper": list(FIGURES_2_AND_3)},
)  # fmt: skip
