"""Is it better to compute LayerNorm, dropout and residuals on every rank, or once and send what they give?

Ranks that share a layer's matrices all need what lies between them. Megatron-LM computes it on each of them again,
rather than on one and send it (section 3). Computed by each rank for its part of the tokens and gathered, it would cost
two gathers more in each pass of a layer. Sequence parallelism (Korthikanti et al. 2022) has it computed once for none:
its gathers and scatters take the place of all-reduces. Here both of the two that are built run side by side, and are
simulated over model sizes, ranks that share a layer, and networks; what the gathers would add follows from the same
curves.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.ours import SLOWER, claim, in_turn
from harness.experiment.kit import (
    DEVICE, MARK, MODEL, RANKS, RUNS, Claim, Experiment, ModelConfig, Plan, Recipe, Record, Run, Table, about, cost,
    milliseconds, named, share, step_seconds, tabulate, untested,
)  # fmt: skip
from harness.predict.gathering import (
    NEAR, OF_TABLE_4, beats_gathering, compared, gathered, gathered_ratio, grows_with_ranks, no_slower, published_ratio,
    saves_as_published,
)  # fmt: skip

SHOWN = (
    MODEL, DEVICE, RANKS,
    milliseconds("duplicated", "step, computed on every rank", lambda cell: cell.of(False).estimate(step_seconds)),
    milliseconds("split", "step, each its part", lambda cell: cell.of(True).estimate(step_seconds)),
    share("ratio", "each its part, of every rank", lambda cell: cell.relative),
    share("published", "published", published_ratio), milliseconds("gathered", "step, once and gathered", gathered),
    share("gathered_ratio", "once and gathered, of every rank", gathered_ratio), RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate steps of both ways, and of the third by formula, by model, ranks and system."""
    found = compared(records)
    simulated = ", ".join(filter(None, dict.fromkeys(cell.system for cell in found)))
    notes = (
        "What lies between a layer's split matrices (LayerNorm, dropout, residuals): computed on every rank, as in "
        "Megatron-LM; by each rank for its part of the tokens, as in sequence parallelism; once and gathered: the "
        "latter's step and two gathers of all hidden states in each pass of a layer, by the system's curves. "
        "Published: one layer of 22B (Korthikanti et al. 2022, table 4).",
        *([f"Simulated for {simulated}; nothing was run there."] if simulated else []),
    )
    title = f"Duplicate or communicate{about(records)}"
    return tabulate("redundant_compute", title, SHOWN, found, notes, apart=True)


def both(run: Run) -> list[Run]:
    """Return the run with the work between split matrices done by every rank in full, and by each for its part."""
    return [replace(run, plan=replace(run.plan, sequence_parallel=is_split)) for is_split in (False, True)]


CPU = Recipe(steps=13, global_batch=8, microbatch=8, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=30, global_batch=4, microbatch=4, lr=1e-4, warmup_steps=5)
SMOKE = ModelConfig(num_layers=2, hidden_size=128, num_heads=4, seq_len=128, dropout=0.1)
SMALL = [replace(SMOKE, num_layers=4, hidden_size=hidden, num_heads=hidden // 32) for hidden in (128, 256, 512)]
LARGE = [(name, 4, tp) for name in ("gpt-1.2b", "gpt-8b", OF_TABLE_4) for tp in (2, 4, 8, 16)]
LARGE += [("korthikanti-1t", 2, tp) for tp in (8, 16)]
"""Models with as many layers left, as one layer decides a step; and ranks that share them, of nodes with 8 or 16."""
PAPER = [untested(replace(named(name), num_layers=layers), Plan(tp=tp), GPU, "bf16") for name, layers, tp in LARGE]

EXPERIMENT = Experiment(
    source="our own; Megatron-LM 2019, section 3; Korthikanti et al. 2022, section 4, table 4",
    expectation="computing again is faster than gathering on every network, by far on slow ones; splitting saves 3% of "
    "a layer of 22B on 8 GPUs, more on more ranks and less in wider models",
    claims=(
        Claim(
            "to compute LayerNorm and dropout on every rank is faster than to compute them once and gather",
            "Megatron-LM 2019, section 3", beats_gathering, kind="direction", about="network",
        ),
        Claim(
            "to split them over the tokens saves what table 4 says of a layer of 22B, within two points",
            "Korthikanti et al. 2022, table 4", saves_as_published, published="3.1%: 19.0 ms of 19.6",
            kind="quantitative", about="computing", tolerance=NEAR, hardware="A100",
        ),
        claim("to split them makes no step over 2% slower", no_slower(SLOWER), about="network", tolerance=SLOWER),
        claim("the more ranks share a layer, the more splitting saves", grows_with_ranks, about="computing"),
    ),
    table=table,
    cost=cost("6 min", "10 min, 16 GPUs with 80 GB"),
    deviations="Computing once and gathering is not built; it is told from the split step and the time of its gathers. "
    "The papers' models have two or four layers here, nothing is recomputed; bf16, and fp16 where there is no bf16.",
    runs={
        "smoke": in_turn(both, [untested(replace(SMOKE, hidden_size=size), Plan(tp=2), CPU) for size in (128, 256)], 1),
        "small": in_turn(both, [untested(model, Plan(tp=2), CPU) for model in SMALL], 8),
        "paper": in_turn(both, PAPER, 1),
    },
)  # fmt: skip
