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
# # Pipeline timelines
#
# A schedule is a table, one row of actions a rank. It is simulated, executed and drawn by three small readers, so a
# simulated and a measured step can stand under each other. `lmscale timeline` does the same from a terminal.

# %%
import matplotlib
from IPython.display import display

from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.figures import figures, style, timeline
from harness.records.environment import CODE
from harness.records.store import Store
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate, uniform

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
RESULTS = CODE / "results"
CHUNKS = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2, "zb_h1": 1}

# %% [markdown]
# ## Four schedules, simulated
#
# Four ranks, eight microbatches; a forward pass, an input gradient and a weight gradient take equally long. GPipe and
# 1F1B idle as much as each other, but GPipe keeps eight microbatches, not four; interleaving halves the idle time, and
# zero bubble's H1 fills it with weight gradients.

# %%
schedules = {name: build(name, 4, 8, chunks) for name, chunks in CHUNKS.items()}
steps = {name: simulate(schedules[name], uniform(chunks=chunks)) for name, chunks in CHUNKS.items()}
timeline.draw(steps, "forward passes")

# %% [markdown]
# As text, where there is no screen for figures:

# %%
print(timeline.text("zb_h1", steps["zb_h1"], "forward passes"))

# %% [markdown]
# ## Measured
#
# The last step of a run of each schedule on two cores, under the simulation with the run's own median times: what is
# between the two are transfers and passes that are not all equally long.

# %%
measured = load("ptdp2021/pipeline_schedules")
records = Store(RESULTS, measured.id, "small").records()
for name, figure in timeline.of_records(records).items():
    print(name)
    display(figure)

# %% [markdown]
# ## Idle time and activations
#
# Beside the papers' closed forms: (p - 1) / m, divided by the chunks, and a third of it.

# %%
measured.table(records)

# %%
claims_table(measured.claims, records)

# %% [markdown]
# ## At the paper's scale
#
# GPT-3 on 96 GPUs, simulated: interleaving pays where microbatches are few.

# %%
interleaving = load("ptdp2021/interleaving")
simulated = Store(RESULTS, interleaving.id, "paper").with_simulated()
figures.lines(interleaving.table(simulated))

# %%
claims_table(interleaving.claims, simulated)
