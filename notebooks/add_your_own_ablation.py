# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Add your own ablation
#
# From a question to a verdict in under a minute, on one CPU core, without data: the built-in synthetic language has
# exactly known probabilities, so that every perplexity stands beside the floor that no model can beat.

# %%
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

from harness.analysis.perplexity import perplexity_table
from harness.analysis.tables import throughput_table
from harness.experiment.checks import falls
from harness.experiment.claims import Claim, Evidence, means
from harness.experiment.claims_table import claims_table
from harness.experiment.experiment import Experiment, points
from harness.figures import figures, style
from harness.launch.attempt import Options
from harness.launch.preflight import Datasets
from harness.launch.sweep import Sweep
from harness.records.record import Record
from harness.records.store import Store
from impl.evaluation_config import EvaluationConfig
from impl.model.sizes import named
from impl.recipe import Recipe
from impl.run import Run

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)

# %% [markdown]
# ## 1. A question, and the runs that answer it
#
# *Does a larger batch reach a lower perplexity in the same number of steps?* A run is data: model, plan, recipe,
# evaluation. A sweep is a comprehension over runs, here of one value; two values are two `for`.

# %%
TINY = replace(named("gpt-0.5m"), hidden_size=64, num_heads=1)
BATCHES = (2, 4)


def runs(batches: Sequence[int]) -> list[Run]:
    return [
        Run(
            model=TINY,
            train=Recipe(steps=200, global_batch=batch, microbatch=batch, lr=2e-3, warmup_steps=40),
            evaluation=EvaluationConfig(every=50, sequences=128),
        )
        for batch in batches
    ]


# %% [markdown]
# ## 2. What would answer it
#
# A claim has a source and a check of the records: one row for each run and evaluation. None: these runs cannot tell.


# %%
def falls_with_the_batch(records: Sequence[Record]) -> Evidence | None:
    ended = ((record.run.train.global_batch, last) for record in records for last in record.last_evaluations)
    found = sorted(means((batch, last.token_perplexity) for batch, last in ended).items())
    numbers = ", ".join(f"{perplexity:.3g} (batch {batch})" for batch, perplexity in found)
    return falls([perplexity for _, perplexity in found], "steps", numbers)


CLAIMS = (Claim("perplexity falls with the batch", "our own", falls_with_the_batch),)

# %% [markdown]
# ## 3. Run it
#
# Each point becomes a record in a folder of your own, with raw values of every step. What has a finished record is not
# run again.

# %%
store = Store(Path("my-results"), "mine/batch_size", "smoke")
sweep = Sweep(store, Datasets(store.out / ".synthetic"), Options())
sweep.run(points(runs(BATCHES)))
records = store.records()
claims_table(CLAIMS, records)

# %%
perplexity_table(records, "valid", "causal")

# %% [markdown]
# ## 4. Add a value
#
# One word: only the new point is trained, the others stay.

# %%
BATCHES = (2, 4, 8)
print(f"{len(sweep.missing(points(runs(BATCHES))))} of {len(BATCHES)} points are missing")
sweep.run(points(runs(BATCHES)))
records = store.records()
claims_table(CLAIMS, records)

# %%
figures.curves(records)

# %%
throughput_table(records)

# %% [markdown]
# ## 5. Keep it
#
# As a file, `experiments/batch_size.py`, whose docstring opens with the question, it is found by
# `lmscale run batch_size`, has tiers, runs on a cluster, is predicted for machines that are not here, and
# stands in EXPERIMENTS.md. All it takes besides the cells above is this, with `small` and `paper` as large as they
# should be:

# %%
Experiment(
    source="our own",
    expectation="perplexity falls with the batch, less and less",
    cost={"smoke": "1 min, 1 CPU core", "small": "1 min, 1 CPU core", "paper": "1 min, 1 CPU core"},
    runs={tier: runs(BATCHES) for tier in ("smoke", "small", "paper")},
    claims=CLAIMS,
).expectation
