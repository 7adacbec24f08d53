"""How large a model fits, when data-parallel ranks divide its states among themselves?

Table 2 gives the largest model on V100s with 32 GB, for one to 16 tensor-parallel ranks and 64 data-parallel ones: from
2 to 32 billion parameters without ZeRO, to 2 trillion with all three stages, by the memory of the model's states alone.
Here the memory is small and all of it counts, activations and buffers too: the deepest model that is predicted to fit
is trained, and one with two layers more, and the memory of all their tensors is counted in a step.
"""

from collections.abc import Sequence

from experiments.zero2019 import (
    COUNTED, LIMIT, N, PREDICTED, STAGES, T, V100, by_depth, deep, edge_is_where_predicted, for_memory,
    grows_with_the_stage, table_2,
)  # fmt: skip
from harness.experiment.kit import (
    ZERO_STAGE, Claim, Column, Experiment, ModelConfig, Plan, Run, ZeroStage, gigabytes, printed, table_of,
)  # fmt: skip

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


COLUMNS = (
    T, N, ZERO_STAGE, gigabytes("limit", "memory", lambda one: LIMIT if one.records else V100),
    Column(key="layers", header="layers", of=lambda one: one.run.model.num_layers if one.records else None),
    Column(key="parameters", header="parameters", unit="billion", scale=1e9, of=lambda one: one.parameters), COUNTED,
    PREDICTED, printed("formula", "largest, formula", "billion", 1e9, digits=4),
    printed("published", "largest, published", "billion", 1e9, digits=4),
)  # fmt: skip
NOTES = (
    "Counted: storages of all tensors on the fullest rank, at the fullest moment of the first step. Predicted: the "
    "same by `lmscale memory`.",
    "Largest: parameters whose states alone fill the memory. Published: table 2, maximum theoretical model size.",
)

EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 5.4 and 10.3, table 2",
    expectation="64 data-parallel ranks with 32 GB hold 2B parameters, and 7.6B, 14.4B and 128B with stages 1 to 3",
    claims=(
        Claim(
            "fits what is predicted to, and nothing else", "our own", edge_is_where_predicted, kind="self-consistency",
        ),
        Claim(
            "no stage fits less than the one before", "table 2", grows_with_the_stage,
            "2, 7.6, 14.4 and 128 billion parameters (t=1, N=64)", kind="direction",
        ),
    ),
    table=table_of(
        "max_model_size", "The largest model that fits", COLUMNS, lambda records: [*by_depth(records), *table_2()],
        NOTES, is_timed=False,
    ),
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "20 min, 1024 GPUs with 32 GB"},
    deviations="What is trained at `smoke` and `small` is small, with 20 MB for each of 2 and 4 ranks, that share two "
    "cores. At `paper` the models that table 2 says were trained run, without ZeRO and with stage 1, with full "
    "recomputation; the theoretical sizes are in the table by formula. The paper writes 512, 1,024 and 2,048 billion "
    "as 0.5T, 1T and 2T.",
    runs={
        "smoke": both_sides([1], (0, 3)),
        "small": both_sides([1, 2], STAGES),
        "paper": [on_v100s(*size, tp, stage) for stage, sizes in MEASURED.items() for tp, size in sizes.items()],
    },
)  # fmt: skip
