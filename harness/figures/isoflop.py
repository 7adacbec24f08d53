"""Losses by model size at equal training FLOPs, with parabolas, and the best sizes by FLOPs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.analysis.isoflop import Profile, exponent
from harness.figures.style import COLOURS, MARKERS, legend, line, mark, panels
from harness.records.measures import size_name


def isoflop(found: Mapping[str, Sequence[Profile]], title: str) -> Any:
    """Draw a panel of profiles for each kind of model, and one of all kinds' best sizes with their power of FLOPs.

    None if no kind has two sizes.
    """
    if not any(len(one.sizes) > 1 for of in found.values() for one in of):
        return None
    figure, (*axes, last) = panels(len(found) + 1)
    budgets = sorted({one.flops for of in found.values() for one in of})
    for ax, (name, of) in zip(axes, found.items(), strict=True):
        for one in of:
            _profile(ax, one, COLOURS[budgets.index(one.flops) % len(COLOURS)])
        ax.set(title=f"{name} models", xlabel="weights of the layers, N", ylabel="nats a token", xscale="log")
        sizes = sorted({size for one in of for size in one.sizes})
        ax.set_xticks(sizes, [size_name(round(size)) for size in sizes])
        ax.minorticks_off()
    for i, (name, of) in enumerate(found.items()):
        best = [(one.flops, one.best) for one in of if not math.isnan(one.best)]
        power = exponent(of).mean
        if best and not math.isnan(power):
            flops, sizes = np.array(best).T
            last.plot(flops, sizes, linestyle="", **mark(i))
            middle = np.exp(np.log(sizes).mean() - power * np.log(flops).mean())
            ends = np.array([flops.min(), flops.max()])
            last.plot(ends, middle * ends**power, color=mark(i)["color"], label=f"{name}, power {power:.2f}")
            last.legend()
    last.set(title="best size", xlabel="training FLOPs, 6 N D", ylabel="N", xscale="log", yscale="log")
    last.set_xticks(budgets, [f"{flops:.0e}" for flops in budgets], rotation=30)
    low, high = last.get_ylim()
    ticks = [tick for tick in {size for of in found.values() for one in of for size in one.sizes} if low < tick < high]
    last.set_yticks(ticks, [size_name(round(tick)) for tick in ticks])
    last.minorticks_off()
    named = [line(f"{flops:.1e} FLOPs", COLOURS[i % len(COLOURS)]) for i, flops in enumerate(budgets)]
    legend(figure, [*named, line("best size of a seed", linestyle="", marker="*", markersize=10)])
    figure.suptitle(title)
    return figure


def _profile(ax: Any, one: Profile, color: str) -> None:
    """Draw a dot for each run, the parabola, and a star at its lowest point."""
    ax.plot(one.sizes, one.losses, MARKERS[one.seed % len(MARKERS)], color=color, markersize=4)
    if len(one.sizes) > 2:
        sizes = np.geomspace(min(one.sizes), max(one.sizes))
        ax.plot(sizes, np.polyval(one.parabola, np.log(sizes)), color=color, linewidth=1)
        ax.plot(one.best, np.polyval(one.parabola, math.log(one.best)), "*", color=color, markersize=10)
