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
# # Throughput and scaling
#
# What does another device buy? Every number here is read from records: of runs on two CPU cores (`small`), or of
# simulated runs at the papers' scale (`paper`), beside what the papers print. `lmscale run` and `predict`
# write them.

# %%
import matplotlib

from harness.analysis import tables
from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.figures import figures, style
from harness.records.environment import CODE
from harness.records.measures import frame
from harness.records.store import Store

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
RESULTS = CODE / "results"

# %% [markdown]
# ## One row a run
#
# `frame` turns raw records into one row a run, in SI units, for whatever analysis is wanted; a run that did not end
# well keeps its row, with status and reason.

# %%
tensor = load("megatron2019/tensor_parallel_scaling")
small = Store(RESULTS, tensor.id, "small").records()
frame(small).reindex(columns=["model", "tp", "dp", "status", "step_seconds", "tokens_per_second", "gemm_share"]).head(6)

# %% [markdown]
# ## Ranks that share every layer
#
# Megatron-LM 2019, figure 5 and tables 1 and 8: how much of a GPU's speed is left when the model grows with the ranks
# (weak scaling), and when it does not (strong scaling). First simulated, beside the published numbers.

# %%
at_scale = Store(RESULTS, tensor.id, "paper").with_simulated()
figures.efficiency(tensor.table(at_scale))

# %%
claims_table(tensor.claims, at_scale)

# %% [markdown]
# The same question on two cores, measured: a core is no GPU, but ranks do the same work and exchange the same bytes.

# %%
figures.efficiency(tensor.table(small))

# %%
tables.scaling_table(small)

# %% [markdown]
# ## Ranks that share the depth
#
# PTD-P 2021, figure 11: the model grows in depth with the pipeline's ranks; a larger batch pays for the bubble. The
# published rates count the forward pass that is computed again, and so do those beside them.

# %%
depth = load("ptdp2021/pipeline_weak_scaling")
figures.lines(depth.table(Store(RESULTS, depth.id, "paper").with_simulated()))

# %%
depth.table(Store(RESULTS, depth.id, "small").records())

# %% [markdown]
# ## Ranks that divide the states
#
# PTD-P 2021, table 2 and figure 10: ZeRO-3 against shared layers and depth, as GPUs are added at the same batch.

# %%
divided = load("ptdp2021/zero3_versus_ptdp")
simulated = Store(RESULTS, divided.id, "paper").with_simulated()
figures.lines(divided.table(simulated))

# %%
claims_table(divided.claims, simulated)

# %% [markdown]
# ## All of them together
#
# PTD-P 2021, table 1: ten models from 1.7 billion parameters to a trillion, on 32 to 3,072 GPUs.

# %%
together = load("ptdp2021/end_to_end")
simulated = Store(RESULTS, together.id, "paper").with_simulated()
together.table(simulated)

# %% [markdown]
# Frontier 2023: more replicas of one pipeline, with a batch that grows (weak scaling) and with one that does not
# (strong scaling).

# %%
frontier = load("frontier2023/scaling")
simulated = Store(RESULTS, frontier.id, "paper").with_simulated()
figures.efficiency(frontier.table(simulated))

# %%
claims_table(frontier.claims, simulated)
