"""How close does one device come to the rate of its own matrix products?

One rank trains alone, so that nothing communicates: what is missing to the rate that the model's largest kind of matrix
product reaches by itself is attention, what lies between the products, the update, and Python. By model size,
precision, microbatch, recomputation and torch.compile, and by engine: ours, PyTorch's own model, the same in FSDP2's
hands, and in DeepSpeed's.
"""

from dataclasses import replace

from experiments.ours import MODEL_23M, claim, in_both, in_turn
from harness.experiment.contests import PRECISION
from harness.experiment.kit import (
    FLOP_RATE, MARK, MICROBATCH, MODEL, RATE, RUNS, Experiment, Plan, Recipe, Tolerance, cost, gib, milliseconds, named,
    of_run, ratio, repeated, share, table_of, untested,
)  # fmt: skip
from harness.experiment.one_device import (
    MFU, SAME_RATE, all_ways, best_is_ours, close_to_alone, contestants, enough_on_h200, every_way, faster_than_plain,
    hardware_rate, recomputation_costs_its_operations, who_trains,
)  # fmt: skip

OF_PLAIN, OF_ALONE = Tolerance(0.85, "a goal", "2026-11-21"), Tolerance(1.25, "a goal", "2026-11-21")
SHOWN = (
    MODEL, of_run("engine", "engine", who_trains, text=True), PRECISION,
    of_run("recompute", "recompute", lambda run: run.plan.recompute, text=True),
    of_run("compiled", "compiled", lambda run: "yes" if run.compile else "no", text=True), MICROBATCH, RATE,
    milliseconds("step_seconds", "step, median"), ratio("over_native", "step over native's", lambda one: one.relative),
    FLOP_RATE,
    share("gemm_share", "share of GEMM rate", lambda one: one.mean(lambda record: record.flop_rate / record.gemm_rate)),
    share(
        "hardware_share", "recomputation counted",
        lambda one: one.mean(lambda record: hardware_rate(record) / record.gemm_rate),
    ),
    share("mfu", "MFU"), share("hfu", "HFU"), gib("peak_memory_bytes", "memory"), RUNS, MARK,
)  # fmt: skip


NOTES = (
    "Rates count model FLOPs (palm_12), those that training needs. The GEMM rate is what [b s, h] x [h, 4h] "
    "reached alone in the same run; recomputation counted: the rate of all operations, as a share of it.",
    "Over native's: medians of a run's steps by an engine and by ours with the same settings, mean over the pairs "
    "of repeats, with its 95% t-interval; above 1 ours is faster.",
)
table = table_of("single_device", "One device", SHOWN, contestants, NOTES)


CPU = Recipe(steps=13, global_batch=8, microbatch=4, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=15, global_batch=32, lr=1.5e-4, warmup_steps=2)
OF_23M = untested(MODEL_23M, Plan(), CPU)
OF_8B = replace(named("gpt-8.3b"), num_layers=24)
LARGE = ((named("gpt-1.2b"), (4, 8, 16)), (named("gpt-2.5b"), (2, 4, 8)), (OF_8B, (2, 4, 8)))
"""Models, and microbatches that fit a GPU with 141 GB."""
ON_GPU = [(untested(replace(model, seq_len=2048, dropout=0.0), Plan(), GPU, "bf16"), sizes) for model, sizes in LARGE]

EXPERIMENT = Experiment(
    source="our own; Megatron-LM 2019, section 5.1, and PTD-P 2021, section 5.1, report 30% and 52% of a GPU's peak",
    expectation="55% of an H200's peak for models of 1.2B and more; on a CPU, three quarters of the GEMM rate in fp32, "
    "and less in bf16, whose products are seven times as fast while all else is not",
    claims=(
        claim("every model reaches 55% MFU on an H200 with its best settings", enough_on_h200, tolerance=MFU),
        claim("no engine's best settings are faster than ours on a GPU", best_is_ours),
        claim(
            "on a CPU, the 23M model's step in bf16 takes at most 85% of PyTorch's own model's",
            faster_than_plain(replace(OF_23M, precision="bf16"), OF_PLAIN), tolerance=OF_PLAIN,
        ),
        claim(
            "on a CPU, its step in fp32 takes at most 1.25 times what its products and attention take alone",
            close_to_alone(OF_23M, OF_ALONE), tolerance=OF_ALONE,
        ),
        claim(
            "recomputation costs what its operations do: rates that count them differ by 10% at most",
            recomputation_costs_its_operations, tolerance=SAME_RATE,
        ),
    ),
    table=table,
    profiles=True,
    cost=cost("12 min", "5 h, 1 GPU with 141 GB", cores="1 CPU core"),
    deviations="One CPU core is the device where there is no GPU. The 8.3B model has 24 of its 72 layers: all "
    "take 150 GB with their gradients and moments. Sequences are of 2,048 tokens, and there is no dropout.",
    runs={
        "smoke": in_turn(all_ways, in_both(named("gpt-0.5m"), [Plan()], CPU), 1),
        "small": in_turn(all_ways, in_both(MODEL_23M, [Plan()], CPU), 3),
        "paper": [run for one, sizes in ON_GPU for run in repeated(every_way(one, sizes), 3)],
    },
)  # fmt: skip
