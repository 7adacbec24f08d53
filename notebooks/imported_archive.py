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
# # Another machine's archive
#
# *How far is what came from another machine from what the paper published?* `lmscale export` packs an
# experiment as one zip, `lmscale import` checks it and keeps it apart from your own records; nothing in it is executed.
# Here the archive is that of this repository's interleaved pipelines, made in the first cell; give yours in its place.

# %%
import contextlib
import io
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

from harness.cli import api as lmscale  # installed: import lmscale
from harness.experiment.loading import load
from harness.figures import style
from harness.records.environment import CODE
from harness.report.archive import export
from harness.report.inbox import environments, import_archive

# %matplotlib inline
matplotlib.rcParams.update(style.STYLE)
ARCHIVE = Path("interleaving.zip")
export("interleaving", results=Path(CODE, "results"), out=ARCHIVE)
# %% [markdown]
# ## What is in it
#
# The same as `lmscale import interleaving.zip`: every file's hash is checked, and it says who measured what, and where.

# %%
with contextlib.redirect_stdout(io.StringIO()):  # its tables come below
    import_archive(ARCHIVE, out=Path("inbox"), json=True)
[folder] = Path("inbox").glob("*interleaving*")
environments(lmscale.load(folder))

# %% [markdown]
# ## Its records as a frame
#
# `docs/results.md` has the columns. The archive holds two tiers: what was measured on processors, and what was
# simulated at the paper's scale, which are never compared with each other.

# %%
theirs = lmscale.load(folder, tier="paper")
rows = theirs.frame()
rows[["model", "schedule", "chunks", "global_batch", "system", "step_seconds", "bubble"]]

# %% [markdown]
# ## Beside the published numbers
#
# The experiment's own table has both: figure 12 of PTD-P, whose rates count the recomputed forward pass, as do these.

# %%
table = load("interleaving").table(theirs)
table

# %% [markdown]
# ## One figure for a paper's column
#
# 3.25 inches wide, letters of 8 points, vector: `figure12.pdf` is what `\includegraphics` takes.

# %%
printed = {"font.size": 8, "axes.titlesize": 8, "figure.figsize": (3.25, 2.4), "pdf.fonttype": 42}
with pyplot.rc_context(printed):
    figure, axes = pyplot.subplots(layout="constrained")
    for (chunks, points), colour in zip(table.frame.groupby("chunks"), style.COLOURS, strict=False):
        name = "1F1B" if chunks == 1 else f"interleaved, {chunks} chunks"
        axes.plot(points["global_batch"], points["simulated_counted_rate"], color=colour, label=f"{name}, simulated")
        axes.plot(points["global_batch"], points["published_rate"], "o", color=colour, label=f"{name}, published")
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.set(xlabel="global batch", ylabel="FLOP/s per GPU", ylim=(0, None))
    axes.legend(frameon=False, fontsize=7)
    figure.savefig("figure12.pdf")
