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
# # What predictions are worth
#
# The simulator's few constants are fitted to some published steps, and held against others. `make accuracy` does all
# sets, which takes a while, and writes `results/accuracy.md`; here are those with few rows, fitted anew.

# %%
import matplotlib
from IPython.display import Image

from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.figures import style
from harness.predict import accuracy, held_out
from harness.records.environment import CODE
from harness.records.store import Store

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
RESULTS = CODE / "results"

# %% [markdown]
# ## Published steps
#
# PTD-P's tables 1 and 2, and Korthikanti et al.'s table 5. Beside the simulator's errors stand those of a constant
# utilization and of data-sheet rates, with one factor fitted to the same rows, and of a published tool.

# %%
chosen = [case for case in held_out.CASES if case.id in ("H1", "H2", "H3", "H4", "H7")]
results = [held_out.result_of(case) for case in chosen]
accuracy.errors_table(results, {})

# %% [markdown]
# All sets, as `make accuracy` left them; extrapolations are on the right.

# %%
Image(RESULTS / "accuracy.png") if (RESULTS / "accuracy.png").exists() else "not run here"

# %% [markdown]
# ## On the machine itself
#
# `calibrate` measures products, links and a few small runs of this machine; other runs are then predicted and trained.

# %%
own = load("ours/predicted")
records = Store(RESULTS, own.id, "small").with_simulated()
own.table(records)

# %%
claims_table(own.claims, records)
