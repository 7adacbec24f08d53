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
# # ZeRO's memory
#
# Who keeps what, when data-parallel ranks divide a model's states among themselves (ZeRO 2019): stage 1 divides the
# optimizer's states, 2 gradients too, 3 weights too.

# %%
import matplotlib
from matplotlib.ticker import EngFormatter

from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.figures import style
from harness.records.environment import CODE
from harness.records.measures import frame
from harness.records.store import Store

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
RESULTS = CODE / "results"
KEPT = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer's states",
    "activations_bytes": "activations",
    "buffers_bytes": "buffers",
}

# %% [markdown]
# ## Counted
#
# All tensors on the fullest rank, at the fullest moment of a step, by what they are.

# %%
memory = load("zero2019/zero_memory")
records = Store(RESULTS, memory.id, "small").records()
rows = frame(records).reindex(columns=["dp", "zero_stage", *KEPT]).rename(columns=KEPT)
if records:
    stacked = rows.set_index(["dp", "zero_stage"]).sort_index(ascending=False)
    axes = stacked.plot.barh(stacked=True, color=style.COLOURS, figsize=(9, 5), width=0.8)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.autoscale(axis="x")
    axes.set(xlabel="memory of the fullest rank", ylabel="(ranks, ZeRO stage)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)

# %% [markdown]
# ## Counted, predicted, published
#
# Figure 1 and table 1 of the paper are model states alone. What is predicted before a run is launched
# (`lmscale memory`) is held against what was counted.

# %%
table = memory.table(records)
if records:
    states = table.frame.query("model == 'GPT 7.5B' and dp == 64").drop_duplicates("zero_stage").set_index("zero_stage")
    bars = states[["published", "formula_states_bytes"]].set_axis(["published", "formula"], axis="columns")
    axes = bars.plot.bar(color=style.COLOURS, rot=0, figsize=(6, 3.5))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.set(title="7.5B parameters on 64 GPUs", xlabel="ZeRO stage", ylabel="model states on each GPU")

# %%
claims_table(memory.claims, records)

# %% [markdown]
# ## The largest model that fits
#
# Table 2: here the memory is 20 MB and all of it counts; the deepest model that is predicted to fit was trained, and
# one with two layers more.

# %%
largest = load("zero2019/zero_max_model_size")
largest.table(Store(RESULTS, largest.id, "small").records())

# %% [markdown]
# ## Activations
#
# ZeRO-R's configurations C1 to C5 (tables 3 and 7 to 9, figures 6 to 8) partition and offload what layers keep.

# %%
activations = load("zero2019/zero_r")
activations.table(Store(RESULTS, activations.id, "small").records())
