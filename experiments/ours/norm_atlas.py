"""Which norm placement trains best, if one learning rate serves a ladder of sizes?

Since Megatron-LM moved LayerNorm before its blocks (section 5.4), many placements were proposed. Here ten of them, and
the element-wise tanh in place of LayerNorm, are trained on one ladder of four sizes in the maximal update
parametrization: up to which rate does each train, where does it end at its best rate, and does the smallest size's best
rate serve the others?
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from experiments.megatron2019 import scaled
from experiments.ours import SMALL, claim
from harness.analysis.stability import table
from harness.experiment import placements
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, Kind, ModelConfig, Plan, Recipe, Run, cost,
)  # fmt: skip
from harness.figures.placements import of_stability as figure

PLACED = ("pre", "post", "sandwich", "peri", "olmo2", "qk", "deepnorm", "sub", "scaled", "hybrid")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
BASE = scaled(2, 64)
LADDER = [
    replace(BASE, num_layers=n, hidden_size=h, num_heads=h // 32) for n, h in ((2, 64), (4, 96), (6, 128), (8, 192))
]
PAPER = ModelConfig(hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=51200)
SMALLER = "our own: {} has larger initial weights"


def kinds(model: ModelConfig) -> Iterable[ModelConfig]:
    """Yield the model with every placement of LayerNorm, and with the dynamic tanh before each block."""
    yield from (replace(model, norm_placement=placement) for placement in PLACED)
    yield replace(model, norm="dyt")


def ladder(models: Sequence[ModelConfig], rates: Sequence[float], recipe: Recipe, seeds: int, run: Run) -> list[Run]:
    """Return every size, kind and rate, seed by seed, with the first model as base; and pre without one."""
    base = {"base_hidden_size": models[0].hidden_size, "base_layers": models[0].num_layers}
    mup = replace(recipe, parametrization="mup", **base)
    rows = [(kind, mup) for model in models for kind in kinds(model)] + [(model, recipe) for model in models]
    return [
        replace(run, seed=seed, model=kind, train=replace(train, lr=lr, min_lr=lr / 10))
        for seed in range(seeds) for kind, train in rows for lr in rates
    ]  # fmt: skip


def ends_lower(name: str, other: str, source: str, kind: Kind = "direction") -> Claim:
    text = f"at each placement's best rate, {name} ends lower than {other}, at every size (a diverged run: infinite)"
    return Claim(text, source, placements.best_beats(name, other), kind=kind)


EXPERIMENT = Experiment(
    source="our own; the question: Megatron-LM 2019, section 5.4, and the papers of the placements",
    expectation="post trains at the lowest rates; most others end within noise of pre at these sizes; the smallest "
    "size's best rate serves all in the maximal update parametrization",
    claims=(
        Claim(
            "with 6 layers and more, pre trains at higher rates than post, by the runs that diverge",
            "Xiong et al. 2020 (2002.04745)", placements.stable_at_higher_rates(6), kind="direction",
        ),
        Claim(
            "deepnorm trains at all rates that post trains at, by the runs that diverge",
            SMALLER.format("DeepNorm (2203.00555)"), placements.as_stable("deepnorm", "post"),
        ),
        Claim(
            "olmo2 trains at all rates that pre trains at, by the runs that diverge", "OLMo 2 (2501.00656)",
            placements.as_stable("olmo2", "pre"), kind="direction",
        ),
        ends_lower("deepnorm", "post", SMALLER.format("DeepNorm (2203.00555)"), "own question"),
        ends_lower("peri", "pre", "Peri-LN (2502.02732)"),
        ends_lower("sub", "pre", SMALLER.format("Magneto (2210.06423)"), "own question"),
        ends_lower("scaled", "pre", "LayerNorm scaling (2502.05795)"),
        ends_lower("hybrid", "pre", "HybridNorm (2503.04598)"),
        claim(
            "the dynamic tanh in place of LayerNorm, nothing else changed, ends at most 1% above it, at every size",
            placements.no_worse("pre dyt", "pre", SMALL), tolerance=SMALL,
        ),
        Claim(
            "the smallest size's best rate costs larger ones at most 1% of their lowest loss, for every placement that "
            "trains (a diverged run: infinite)",
            "Yang et al. 2022 (2203.03466); Dey et al. 2025 (2505.01618)",
            placements.rate_transfers(SMALL), kind="direction", tolerance=SMALL,
        ),
        claim(
            "so does that of pre in the standard parametrization", placements.rate_transfers(SMALL, ("pre standard",))
        ),
    ),
    table=table,
    figure=figure,
    cost=cost(
        "12 h", "a month, 64 GPUs with 80 GB", smoke="2 min",
        note=f"{AT_ONCE}; 25 min, 1 GPU with `--jobs 15`{NEEDS_TEXT}",
    ),
    deviations="GPTs on bytes of books, 0.8M tokens, up to 3.6M parameters: the papers train 1,000 times more, and so "
    "large models that their depth matters. BERT is left to `paper`: two cores cannot give it the tokens that a "
    "verdict takes. OLMo 2's norms of queries and keys are over all heads of a token, ours over each. DeepNorm's and "
    "Magneto's initial weights are normal, with 0.02 times their factors: at these widths that is a sixth to a quarter "
    "of Xavier's deviation, which their papers start from. The paper of the dynamic tanh (2503.10622) also multiplies "
    "a language model's embeddings by a learnt factor, without which it says that none converges, and ties no heads. "
    "Placements with a law of depth of their own keep it in the maximal update parametrization. A placement's best "
    "rate is chosen by the text that it is compared on.",
    runs={
        "smoke": ladder(
            [replace(scaled(1, 32), num_layers=n, hidden_size=h, num_heads=h // 32) for n, h in ((1, 32), (2, 64))],
            (1e-2,), Recipe(steps=30, global_batch=8, microbatch=8, warmup_steps=4), 1,
            Run(evaluation=EvaluationConfig(sequences=32)),
        ),
        "small": ladder(
            LADDER, RATES, Recipe(steps=800, global_batch=8, microbatch=8, warmup_steps=40), 3,
            Run(data=DataConfig(dataset="data/books-byte"), evaluation=EvaluationConfig(every=200, sequences=128)),
        ),
        "paper": [
            run for family in ("gpt", "bert") for run in ladder(
                [
                    replace(PAPER, family=family, num_layers=n, hidden_size=h, num_heads=h // 64)
                    for n, h in ((12, 512), (24, 1024), (36, 1536), (48, 2048))
                ],
                (3e-4, 1e-3, 3e-3, 1e-2), Recipe(steps=20_000, global_batch=256, microbatch=8, warmup_steps=500), 3,
                Run(
                    plan=Plan(dp=8), data=DataConfig(dataset="data/openwebtext-gpt2"), precision="bf16",
                    evaluation=EvaluationConfig(every=1000, sequences=1024),
                ),
            )
        ],
    },
)  # fmt: skip
