"""Values of a figure's points, read back from its SVG: what a page shows of the point that a pointer is near.

Matplotlib writes the text of a label as a comment in front of its outlines. Scales follow from the ticks with numbers;
on an axis without numbers a point has the label of the nearest tick.
"""

import re
from collections.abc import Callable, Iterator
from math import log10
from typing import NamedTuple
from xml.etree import ElementTree

G, PATH, USE = (f"{{http://www.w3.org/2000/svg}}{name}" for name in ("g", "path", "use"))
NUMBERS = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MOST = 150
"""Points of a line that are kept, spread evenly."""
POWER = re.compile(r"(?:(-?[\d.]+)\s*\\times\s*)?(-?)10\^\{(-?\d+)\}")
Element = ElementTree.Element


class Scale(NamedTuple):
    """Axis: its label, and the text of the value at a position."""

    label: str
    text: Callable[[float], str]


class Line(NamedTuple):
    """Line, bars or marks of one colour, with the positions and texts of points."""

    name: str
    points: list[tuple[float, float, str]]


def points(svg: str) -> tuple[float, float, list[Line]]:
    """Return width and height of a figure, and the points of its lines, bars and marks, by the names in its legend."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.fromstring(svg, ElementTree.XMLParser(target=builder))
    width, height = map(float, (root.get("viewBox") or "0 0 1 1").split()[2:])
    names = dict(_legends(root))
    found = [line for axes in _groups(root, "axes_") for line in _of_axes(axes, names)]
    return width, height, [line for line in found if line.points]


def _of_axes(axes: Element, names: dict[str, str]) -> Iterator[Line]:
    both = [*_groups(axes, "matplotlib.axis_")]
    if len(both) != 2:
        return
    x, y = _scale(both[0], "x"), _scale(both[1], "y")
    names = names | dict(_legends(axes))
    for group in axes:
        kind = (group.get("id") or "").rpartition("_")[0]
        if kind not in ("line2d", "patch", "PathCollection"):
            continue
        name, at = names.get(_colour(group), ""), _positions(group, kind)
        thin = at[:: -(-len(at) // MOST)] if at else []
        of = lambda scale, value: f"{scale.label}: {text}" if (text := scale.text(value)) and scale.label else text
        texts = [", ".join(filter(None, (of(x, left), of(y, top)))) for left, top in thin]
        yield Line(name, [(left, top, text) for (left, top), text in zip(thin, texts, strict=True) if text])


def _positions(group: Element, kind: str) -> list[tuple[float, float]]:
    """Return the vertices of a line, the places of marks, or the middle of a bar's top."""
    marks = [(float(use.get("x") or 0), float(use.get("y") or 0)) for use in group.iter(USE)]
    if marks:
        return marks
    paths = [path for path in group.iter(PATH) if path.get("id") is None and path.get("d")]
    style = paths[0].get("style") or "" if paths else ""
    numbers = [float(text) for path in paths for text in NUMBERS.findall(path.get("d") or "")]
    at = list(zip(numbers[::2], numbers[1::2], strict=False))
    if kind == "line2d":
        return at
    if kind == "patch" and len(at) == 4 and "fill: none" not in style and "fill: #ffffff" not in style:
        (left, *_), (top, *_) = sorted({x for x, _ in at}), sorted({y for _, y in at})
        return [((left + max(x for x, _ in at)) / 2, top)]
    return []


def _scale(axis: Element, kind: str) -> Scale:
    """Return an axis from its ticks: linear or logarithmic where their labels are numbers, whichever fits better."""
    ticks = [(_at(tick, kind), _text(tick)) for tick in _groups(axis, f"{kind}tick_")]
    labelled = [(at, text) for at, text in ticks if at is not None and text]
    label = next((_text(group) for group in axis if (group.get("id") or "").startswith("text_")), "")
    known = [(at, number) for at, text in labelled if (number := _number(text)) is not None]
    if len(known) < 2 or known[0][0] == known[-1][0] or len(known) < len(labelled):
        nearest = lambda value: min(labelled, key=lambda tick: abs(tick[0] - value))[1] if labelled else ""
        return Scale(label, nearest)
    fits = [_fit(known, log=log) for log in (False, True) if not log or all(number > 0 for _, number in known)]
    is_power = all("10^" in text for _, text in labelled)
    _, read = fits[-1] if is_power else min(fits, key=lambda fit: fit[0])
    return Scale(label, lambda value: f"{read(value):.4g}")


def _fit(known: list[tuple[float, float]], *, log: bool) -> tuple[float, Callable[[float], float]]:
    """Return the largest relative error at the ticks, and the value at a position, by the line through both ends."""
    to, back = (log10, lambda value: 10.0**value) if log else (float, float)
    (first, low), (last, high) = known[0], known[-1]
    slope = (to(high) - to(low)) / (last - first)
    read = lambda value: back(to(low) + slope * (value - first))
    size = max(abs(number) for _, number in known) or 1.0
    return round(max(abs(read(at) - number) / size for at, number in known), 4), read


def _number(text: str) -> float | None:
    """Return the number that a tick's label is; None if it is none."""
    text = text.replace("\N{MINUS SIGN}", "-").replace(",", "")
    if (power := POWER.search(text)) is not None:
        return float(power[1] or 1) * (-1 if power[2] else 1) * 10.0 ** int(power[3])
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        return None


def _legends(parent: Element) -> Iterator[tuple[str, str]]:
    """Yield the colours in the legends of a figure or panel with their texts."""
    for legend in _groups(parent, "legend_"):
        colour = ""
        for group in legend:
            if (group.get("id") or "").startswith("text_"):
                if colour:
                    yield colour, _text(group)
            else:
                colour = _colour(group)


def _colour(group: Element) -> str:
    """Return the colour of what a group draws, with its dashes."""
    for drawn in (*group.iter(PATH), *group.iter(USE)):
        style = drawn.get("style") or ""
        if found := re.search(r"(?:stroke|fill): (#\w+)", style.replace("fill: #ffffff", "")):
            return found[1]
    return ""


def _at(tick: Element, kind: str) -> float | None:
    use = next(tick.iter(USE), None)
    return None if use is None else float(use.get(kind) or 0)


def _text(group: Element) -> str:
    """Return the text that a group draws, in plain letters where it is a formula."""
    comments = (child.text or "" for child in group.iter(ElementTree.Comment))  # type: ignore[arg-type]
    text = " ".join(map(str.strip, comments))
    return re.sub(r"\\mathdefault\{(.*)\}", r"\1", text.replace("$", "")) if "$" in text else text


def _groups(parent: Element, name: str) -> Iterator[Element]:
    """Yield the groups of this kind within another, the outermost ones only."""
    for child in parent:
        if (child.get("id") or "").startswith(name):
            yield child
        elif child.tag == G and not (child.get("id") or "").startswith(("axes_", "legend_")):
            yield from _groups(child, name)
