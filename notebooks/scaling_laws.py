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
# # Scaling laws
#
# How loss falls with parameters and tokens, and whether the place of LayerNorm changes that: L(N, D) in the form of
# Hoffmann et al. 2022 (2203.15556), fitted to a family of small models for each placement, with bootstrap intervals.

# %%
import matplotlib
from IPython.display import display

from harness.analysis.perplexity import perplexity_tables
from harness.experiment.claims_table import claims_table
from harness.experiment.findings import findings
from harness.experiment.loading import load
from harness.figures import figures, style
from harness.records.environment import CODE
from harness.records.store import Store

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
RESULTS = CODE / "results"

# %% [markdown]
# ## The fit

# %%
law = load("ours/layernorm_scaling_law")
records = Store(RESULTS, law.id, "small").records()
law.table(records)

# %%
law.figure(records)

# %% [markdown]
# ## What it says of larger models
#
# The further from the sizes that were trained, the less it says: the intervals are what to look at.

# %%
claims_table(law.claims, records)

# %%
print(findings(RESULTS / law.id) or "nothing was found yet")

# %% [markdown]
# ## Does perplexity fall with size at all?
#
# Megatron-LM 2019, table 3 and figure 6, on three small models: on the validation text, on WikiText-2's words, and
# LAMBADA's last words.

# %%
sizes = load("megatron2019/model_size_perplexity")
trained = Store(RESULTS, sizes.id, "small").records()
for table in perplexity_tables(trained):
    display(table)

# %%
for figure in figures.drawn(trained).values():
    display(figure)

# %%
claims_table(sizes.claims, trained)
