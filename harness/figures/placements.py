"""Figures of norm placements during training: outlier dimensions, and losses with the law through them."""

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import numpy as np

from harness.analysis.outliers import looks
from harness.analysis.placement_laws import fits
from harness.analysis.stability import arms, outcome
from harness.figures.style import COLOURS, panels
from harness.records.measures import about, size_name
from harness.records.record import Record
from impl.model.norm_placement import PLACEMENTS


def of_outliers(records: Sequence[Record]) -> Any:
    """Draw the largest dimension over the median during training: a panel a model, a line a placement and seed."""
    found = looks(records)
    if not found:
        return None
    models = list(dict.fromkeys(one.model for one in found))
    placements = dict.fromkeys((*PLACEMENTS, *(one.norm for one in found)))
    made, axes = panels(len(models))
    for ax, model in zip(axes, models, strict=True):
        for norm, colour in zip(placements, cycle(COLOURS), strict=False):
            own = [one for one in found if (one.model, one.norm) == (model, norm)]
            for i, run in enumerate(dict.fromkeys(one.record.id for one in own)):
                line = [(one.tokens, one.ratio) for one in own if one.record.id == run]
                ax.plot(*zip(*line, strict=True), "o-", markersize=3, color=colour, label=norm if i == 0 else None)
        ax.set(title=model, xlabel="tokens", ylabel="largest dimension over median", ylim=(1, None))
        ax.legend()
    made.suptitle(f"How far one dimension stands out{about(records)}")
    return made


def of_laws(records: Sequence[Record]) -> Any:
    """Draw loss against tokens of every model, a panel a placement, with its law; None without a law."""
    laws = fits(records)
    if not laws:
        return None
    every = [point.loss for one in laws.values() for point in one.points]
    limits = 0.98 * min(every), 1.02 * max(every)
    made, axes = panels(len(laws))
    for ax, (norm, one) in zip(axes, laws.items(), strict=True):
        sizes = sorted({point.parameters for point in one.points})
        for colour, size in zip(cycle(COLOURS), sizes, strict=False):
            own = [point for point in one.points if point.parameters == size]
            tokens = np.geomspace(min(point.tokens for point in own), max(point.tokens for point in own))
            ax.plot([p.tokens for p in own], [p.loss for p in own], "o", markersize=3, alpha=0.6, color=colour)
            ax.plot(tokens, one.law.loss(size, tokens), color=colour, label=size_name(round(size)))
        ax.set(title=norm, xlabel="tokens", ylabel="loss (nats per token)", xscale="log", ylim=limits)
        ax.legend(title="parameters", fontsize=8)
    made.suptitle(f"Losses, and the law through them{about(records)}")
    return made


def of_stability(records: Sequence[Record]) -> Any:
    """Draw the loss over depth and learning rate: a panel a placement and warm-up, a cell a model at a rate.

    A cell is crossed out where a run diverged, with how many did; the rates below are those that train.
    """
    found = arms(records)
    if not found:
        return None
    norms = list(dict.fromkeys(arm.norm for arm in found))
    warmups, depths = (sorted({getattr(arm, name) for arm in found}) for name in ("warmup", "layers"))
    rates = list(found[0].losses)
    known = [loss for arm in found for losses in arm.losses.values() for loss in losses if np.isfinite(loss)]
    middle = (min(known, default=0) + max(known, default=1)) / 2
    made, axes = panels(len(warmups) * len(norms))
    for ax, (warmup, norm) in zip(axes, product(warmups, norms), strict=True):
        own = {arm.layers: arm for arm in found if (arm.norm, arm.warmup) == (norm, warmup)}
        losses = [[own[depth].losses[rate] if depth in own else [] for rate in rates] for depth in depths]
        means = np.array([[np.mean(cell) if cell else np.nan for cell in row] for row in losses])
        drawn = ax.imshow(
            np.where(np.isfinite(means), means, np.nan), aspect="auto", origin="lower", cmap="viridis_r",
            vmin=min(known, default=0), vmax=max(known, default=1),
        )  # fmt: skip
        for (y, x), mean in np.ndenumerate(means):
            failed = outcome(losses[y][x]) if losses[y][x] else None
            text = failed.removesuffix(" diverged") if failed else "" if np.isnan(mean) else f"{mean:.2f}"
            text = f"\u00d7\n{text}" if failed else text
            ink = "white" if np.isfinite(mean) and mean > middle else "black"
            ax.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
        ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        ax.set_yticks(range(len(depths)), [str(depth) for depth in depths])
        ax.set(title=f"{norm}, warm-up {warmup}", xlabel="learning rate", ylabel="layers")
        ax.grid(visible=False)
    made.colorbar(drawn, ax=axes, label="loss (nats per token)")
    made.suptitle(f"Where each placement trains; \u00d7: so many runs diverged{about(records)}")
    return made
