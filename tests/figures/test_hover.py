"""Values that are read back from a figure's SVG are those that were drawn."""

from pathlib import Path

import matplotlib
import pytest

matplotlib.use("agg")
from matplotlib import pyplot

from harness.figures import hover, style

ROOT = Path(__file__).resolve().parents[2]


def read(figure: pyplot.Figure, folder: Path) -> list[hover.Line]:
    style.save(figure, folder / "figure.svg")
    width, height, lines = hover.points((folder / "figure.svg").read_text())
    assert all(0 <= x <= width and 0 <= y <= height for line in lines for x, y, _ in line.points)
    pyplot.close(figure)
    return lines


def numbers(line: hover.Line) -> list[list[float]]:
    return [[float(part.rpartition(": ")[2]) for part in text.split(", ")] for _, _, text in line.points]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_points_of_lines_have_their_values_and_names(scale: str, tmp_path: Path) -> None:
    figure, axes = pyplot.subplots()
    rows = {"ours": [3.0, 40.0, 500.0, 600.0], "theirs": [2.0, 30.0, 300.0, 700.0]}
    for name, values in rows.items():
        axes.plot([1, 10, 100, 1000], values, marker="o", label=name)
    axes.set(xscale=scale, yscale=scale, xlabel="tokens", ylabel="loss")
    axes.legend()
    found = {line.name: line for line in read(figure, tmp_path)}
    assert set(found) == set(rows)
    for name, values in rows.items():
        for (x, y), before, value in zip(numbers(found[name]), (1, 10, 100, 1000), values, strict=True):
            assert x == pytest.approx(before, rel=0.02, abs=3 * (scale == "linear"))
            assert y == pytest.approx(value, rel=0.02, abs=3 * (scale == "linear"))
    assert found["ours"].points[0][2].startswith("tokens: ")


def test_bars_have_their_heights_at_the_labels_of_categories(tmp_path: Path) -> None:
    figure, axes = pyplot.subplots()
    axes.bar(["pre", "post"], [2.0, 3.5], color="#336699", label="perplexity")
    axes.legend()
    texts = [text for line in read(figure, tmp_path) for _, _, text in line.points]
    assert texts == ["pre, 2", "post, 3.5"]


def test_a_long_line_keeps_points_spread_over_it(tmp_path: Path) -> None:
    figure, axes = pyplot.subplots()
    axes.plot(range(1000), [i % 7 for i in range(1000)])
    [line] = read(figure, tmp_path)
    assert hover.MOST / 2 < len(line.points) <= hover.MOST
    assert numbers(line)[-1][0] > 900


def test_most_committed_figures_have_values() -> None:
    """All but timelines and maps of colours; figure 12 of PTD-P reads as it was published."""
    files = [path for path in sorted((ROOT / "results").rglob("*.svg")) if not path.name.startswith("timeline")]
    found = {path: hover.points(path.read_text())[2] for path in files}
    assert len([path for path, lines in found.items() if lines]) >= len(files) - 5
    [figure] = [lines for path, lines in found.items() if "ptdp2021/interleaving/paper" in str(path)]
    values = [[round(y) for _, y in numbers(line)] for line in figure]
    assert [119, 134, 140, 146, 149][:2] == values[2][:2]
    assert values[3][:2] == [82, 109]
