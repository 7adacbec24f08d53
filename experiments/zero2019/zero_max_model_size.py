"""How large a model fits, when data-parallel ranks divide its states among themselves?

Table 2 gives the largest model on V100s with 32 GB, for one to 16 tensor-parallel ranks and 64 data-parallel ones: from
2 to 32 billion parameters without ZeRO, to 2 trillion with all three stages, by the memory of the model's states alone.
Here the memory is small and all of it counts, activations and buffers too: the deepest model that is predicted to fit
is trained, and one with two layers more, and the memory of all their tensors is counted in a step. The largest models
that were trained (table 2's measured columns) are held against what is predicted to fit 32 GB.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from experiments.zero2019 import COUNTED, PREDICTED, PRINTED_V100, STAGES, V100, N, T, deepest, for_memory
from harness.experiment.kit import (
    GB, ZERO_STAGE, Claim, Column, Evidence, Experiment, ModelConfig, Plan, Point, Record, Run, Tolerance, ZeroStage,
    cost, each, gigabytes, near, points, printed, published, table_of, tally,
)  # fmt: skip
from impl.cost.memory import model_state_bytes
from impl.cost.parameters import count_parameters

LIMIT = 20e6
"""Bytes that a rank may take here."""
SHAPE = ModelConfig(hidden_size=128, num_heads=4, seq_len=64, vocab_size=512)
DEEPEST: dict[tuple[int, ZeroStage], int] = {
    (1, 0): 5, (1, 1): 8, (1, 2): 8, (1, 3): 10,
    (2, 0): 10, (2, 1): 16, (2, 2): 18, (2, 3): 21,
}  # fmt: skip
"""Layers of the largest model that is predicted to take at most LIMIT, by tensor-parallel ranks and stage."""
MORE = 2
MEASURED: dict[ZeroStage, dict[int, tuple[float, int]]] = {
    0: {1: (1.3, 1536), 2: (2.5, 2048), 4: (5, 3072), 8: (10, 4096), 16: (20, 6144)},
    1: {1: (6.2, 3072), 2: (12.5, 4096), 4: (25, 6144), 8: (50, 6144), 16: (100, 8192)},
}
"""Table 2's measured columns: billions of parameters, with a hidden size, by tensor-parallel ranks."""
NEAR = Tolerance(0.1, "as for figure 6's largest models in zero_r", "2026-11-24")
"""Relative distance of the largest model that was trained from the largest predicted to fit."""


def deep(layers: int, tp: int, zero_stage: ZeroStage, dp: int = 2) -> Run:
    plan = Plan(tp=tp, dp=dp, zero_stage=zero_stage, bucket_bytes=2**16)
    return for_memory(replace(SHAPE, num_layers=layers), plan, batch=1)


def both_sides(degrees: Sequence[int], stages: Sequence[ZeroStage]) -> list[Run]:
    """Return runs predicted to fit, and runs predicted not to."""
    chosen = [(at, layers) for at, layers in DEEPEST.items() if at[0] in degrees and at[1] in stages]
    return [deep(layers + more, *at) for at, layers in chosen for more in (0, MORE)]


def on_v100s(billions: float, hidden: int, tp: int, zero_stage: ZeroStage) -> Run:
    """Return one of the models that were trained according to table 2; the shapes are near those of tables 5 to 10."""
    layers, heads = round(billions * 1e9 / (12 * hidden**2)), hidden // 128
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_len=1024, vocab_size=51200)
    plan = Plan(tp=tp, dp=64, zero_stage=zero_stage, recompute="full", partition_activations=tp > 1)
    return for_memory(model, plan, batch=1)


def in_paper() -> list[Point]:
    """Return table 2: parameters whose states fill a device's memory, and the largest that were trained."""
    rows = published("zero2019").query("where == 'table 2' and not quantity.str.contains('measured')")
    found = []
    for row in rows.to_dict("records"):
        stage, tp = STAGES[int(row["quantity"].rpartition("_")[2])], row["tp"]
        run = deep(1, tp, stage, row["dp"])
        numbers = {"formula": tp * PRINTED_V100 / model_state_bytes(run, 1), "published": row["value"] * 1e9}
        if stage in MEASURED:
            size = MEASURED[stage][tp]
            fits = count_parameters(deepest(on_v100s(*size, tp, stage)))
            numbers |= {"predicted": fits, "trained": size[0] * 1e9}
        found.append(Point(run, printed=numbers))
    return sorted(found, key=lambda one: (one.run.plan.tp, one.run.plan.zero_stage))


billions = partial(printed, unit="billion", scale=1e9, digits=4)
COLUMNS = (
    T, N, ZERO_STAGE, gigabytes("limit", "memory", lambda one: LIMIT if one.run.plan.dp == 2 else PRINTED_V100),
    Column(key="layers", header="layers", of=lambda one: one.run.model.num_layers if one.records else None),
    replace(billions("parameters", "parameters"), of=lambda one: one.parameters), COUNTED, PREDICTED,
    billions("formula", "largest, formula"), billions("published", "largest, published"),
    billions("predicted", "largest, predicted to fit"), billions("trained", "largest, trained, published"),
)  # fmt: skip
NOTES = (
    "Counted: storages of all tensors on the fullest rank, at the fullest moment of the first step. Predicted: the "
    "same by `lmscale memory`.",
    "Largest: parameters whose states alone fill the memory. Published: table 2, maximum theoretical model size. "
    "Predicted to fit: the deepest model of a trained model's width, one sequence a replica, all memory of a step "
    "counted. Trained, published: table 2's measured columns.",
)


def counted(records: Sequence[Record]) -> list[Point]:
    """Return the points whose memory was counted, or simulated, by layout and size."""
    size = lambda record: record.peak_memory_bytes if record.is_simulated else record.memory_bytes
    found = points(records, size, failed=True)
    return sorted(found, key=lambda one: (one.run.plan.tp, one.run.plan.zero_stage, one.parameters))


def edge_is_where_predicted(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the runs predicted to fit do, and the others do not."""
    found = [one for one in records if one.run.plan.dp == 2 and one.memory_bytes > 0]
    right = [(one.memory_bytes <= LIMIT) == (one.predicted_memory_bytes <= LIMIT) for one in found]
    closest = min((abs(one.memory_bytes / LIMIT - 1) for one in found), default=0.0)
    return tally(right, "points", f"the nearest is {closest:.1%} from the edge")


def grows_with_the_stage(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model that was counted to fit is larger, or as large, with every stage."""
    fits: dict[int, dict[int, int]] = {}
    for one in records:
        plan, layers = one.run.plan, one.run.model.num_layers
        if plan.dp == 2 and one.memory_bytes <= LIMIT:
            of_tp = fits.setdefault(plan.tp, {})
            of_tp[plan.zero_stage] = max(of_tp.get(plan.zero_stage, 0), layers)
    whole = {tp: [of_tp[s] for s in STAGES] for tp, of_tp in sorted(fits.items()) if len(of_tp) == len(STAGES)}
    numbers = [f"{', '.join(map(str, layers))} layers (t={tp})" for tp, layers in whole.items()]
    return tally([a <= b for layers in whole.values() for a, b in pairwise(layers)], "steps", "; ".join(numbers))


def needed(records: Sequence[Record]) -> list[tuple[float, int, int]]:
    """Return the predicted GB, and tp and ZeRO stage, of the models that table 2 says were trained."""
    found = [(one.peak_memory_bytes / GB, one.run.plan) for one in records if one.is_simulated and one.run.plan.dp > 2]
    return sorted((size, plan.tp, plan.zero_stage) for size, plan in found)


def largest_of_all(records: Sequence[Record]) -> list[tuple[float, float, Plan]]:
    """Return the billions of parameters predicted to fit at most, and trained at most; none without simulated runs."""
    known = [one for one in in_paper() if "trained" in one.printed and any(record.is_simulated for record in records)]
    return [(one.printed["predicted"] / 1e9, one.printed["trained"] / 1e9, one.run.plan) for one in known]


EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 5.4 and 10.3, table 2",
    expectation="64 data-parallel ranks with 32 GB hold 2B parameters, and 7.6B, 14.4B and 128B with stages 1 to 3",
    claims=(
        Claim(
            "fits what is predicted to, and nothing else", "our own", edge_is_where_predicted, kind="self-consistency"
        ),
        Claim(
            "no stage fits less than the one before", "table 2", grows_with_the_stage,
            "2, 7.6, 14.4 and 128 billion parameters (t=1, N=64)", kind="direction",
        ),
        Claim(
            "the models that were trained are predicted to fit 32 GB", "table 2, measured",
            each(needed, lambda size, *_: size <= V100 / GB, "models", "{:.1f} GB (t={}, stage {})"), kind="arithmetic",
        ),
        Claim(
            "the largest models predicted to fit 32 GB are those that were trained, within 10%", "table 2, measured",
            each(
                largest_of_all, lambda fits, trained, _: near(fits / trained, 1, NEAR), "models",
                "{0:.1f}B (t={2.tp}, stage {2.zero_stage}; trained {1:g}B)",
            ),
            "1.3 to 20B without ZeRO, 6.2 to 100B with stage 1 (t=1 to 16)",
            kind="arithmetic", tolerance=NEAR,
        ),
    ),
    table=table_of(
        "max_model_size", "The largest model that fits", COLUMNS, lambda records: [*counted(records), *in_paper()],
        NOTES, is_timed=False,
    ),
    cost=cost("2 min", "20 min, 1024 GPUs with 32 GB"),
    deviations="What is trained at `smoke` and `small` is small, with 20 MB for each of 2 and 4 ranks, that share two "
    "cores. At `paper` the models that table 2 says were trained run, without ZeRO and with stage 1, with full "
    "recomputation; the theoretical sizes are in the table by formula. Their batch is not known to us, so that one "
    "sequence of 1,024 tokens is assumed, and their depth follows from the printed sizes. The paper writes 512, 1,024 "
    "and 2,048 billion as 0.5T, 1T and 2T.",
    runs={
        "smoke": both_sides([1], (0, 3)),
        "small": both_sides([1, 2], STAGES),
        "paper": [on_v100s(*size, tp, stage) for stage, sizes in MEASURED.items() for tp, size in sizes.items()],
    },
)  # fmt: skip
