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
# # Where LayerNorm stands
#
# Megatron-LM 2019, figure 7: with LayerNorm after each block, as in the original BERT, larger models train worse or not
# at all; before each block, they train. Here small models of two depths, with LayerNorm before, after, and on both
# sides.

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

# %%
placement = load("megatron2019/layernorm_placement")
records = Store(RESULTS, placement.id, "small").records()
print(findings(RESULTS / placement.id) or "nothing was found yet")

# %% [markdown]
# ## Perplexity by placement
#
# A table for each comparability key: values on other texts, or under other rules, never share one. Repeats and seeds
# are combined; ± is the half-width of a 95% interval.

# %%
for table in perplexity_tables(records):
    display(table)

# %% [markdown]
# ## Size, and loss against tokens

# %%
for figure in figures.drawn(records).values():
    display(figure)

# %%
claims_table(placement.claims, records)

# %% [markdown]
# ## Outliers
#
# Whether a few dimensions of the residual stream grow apart from the others (BERT Busters, 2105.06990), by placement.

# %%
outliers = load("ours/layernorm_outliers")
outlying = Store(RESULTS, outliers.id, "small").records()
outliers.table(outlying)

# %%
outliers.figure(outlying)

# %%
claims_table(outliers.claims, outlying)
