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
# # What the records of an experiment say
#
# Choose the experiment and its tier in the next cell; `python -m harness status EXPERIMENT` says what there is.

# %%
from pathlib import Path

import matplotlib

from harness import figures, tables
from harness.environment import CODE
from harness.measures import frame
from harness.perplexity import comparable, evaluations, perplexity_table, placement_table
from harness.store import Store

given = globals()  # whoever runs this file as a script may set these beforehand
RESULTS = Path(given.get("RESULTS", CODE / "results"))
EXPERIMENT = given.get("EXPERIMENT", "quickstart")
TIER = given.get("TIER", "smoke")

# %%
store = Store(RESULTS, EXPERIMENT, TIER)
records = store.records()
print(f"{store.folder}: {tables.denominators(records) if records else 'no records'}")

# %% [markdown]
# ## One row a run
#
# All numbers are in SI units; a run that did not end well keeps its row, with its status and reason.

# %%
runs = frame(records)
runs

# %% [markdown]
# ## Throughput and scaling
#
# Repeats and seeds are combined; `_half_width` columns hold the 95% t-interval.

# %%
throughput = tables.throughput_table(records)
throughput.frame

# %%
scaling = tables.scaling_table(records)
scaling.frame

# %% [markdown]
# ## Perplexity
#
# The last evaluation of each run and text; then one table for each comparability key: sizes against norm placements
# where these vary, else points.

# %%
evaluated = evaluations(records)
evaluated

# %%
perplexities = {}
for name, kind, apart, chosen in comparable(records):
    table = placement_table(chosen, name, kind, apart) or perplexity_table(chosen, name, kind, apart)
    perplexities[table.title] = table.frame
    print(table.title)
    print(table.frame[[column.key for column in table.columns]].to_string(index=False), end="\n\n")

# %% [markdown]
# ## Training and validation loss

# %%
# %matplotlib inline
with matplotlib.rc_context(figures.STYLE):
    figure = figures.curves(records)
figure
