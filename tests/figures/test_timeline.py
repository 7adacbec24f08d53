"""Timelines as rows, text and figures."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from harness.figures import timeline
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Timeline, simulate, uniform


def simulated(name: str, p: int, m: int, v: int = 1) -> Timeline:
    return simulate(build(name, p, m, v), uniform(chunks=v))


def test_document_is_json():
    found = json.loads(json.dumps(timeline.document(simulated("interleaved", 2, 4, 2))))
    assert found["bubble"] == 0.125
    assert found["bubble_per_rank"] == [0.125, 0.125]
    assert found["step_time"] == 13.5
    assert found["peak_in_flight"] == [5, 3]
    assert found["microbatches_in_flight"] == [2.5, 1.5]
    assert found["spans"][1][0] == ["1F0", 0.5, 1.0]


DRAWN = [
    ("one_f_one_b", 2, 3, 1, 120, {
        0: "drawn: step 12 s, bubble 0.3333, microbatches in flight 2 1",
        1: "r0 |F0 F1 ......B0--- F2 B1--- ...B2--- |",
        2: "r1 |...F0 B0--- F1 B1--- F2 B2--- ......|",
        3: "F forward, B backward, . idle; a column is 0.3333 s",
    }),
    ("zb_h1", 2, 2, 1, 120, {
        1: "r0 |F0 F1 ...I0 W0 I1 W1 |",
        2: "r1 |...F0 I0 F1 I1 W0 W1 |",
        3: "F forward, I input gradient, W weight gradient, . idle; a column is 0.3333 s",
    }),
    ("interleaved", 2, 2, 2, 120, {
        1: "r0 |F0 F1 f0 f1 ......b0--- ...b1--- B0--- B1--- |",
        3: "F forward, B backward (lower case: chunks 1, 3, ...), . idle; a column is 0.1667 s",
    }),
    ("one_f_one_b", 2, 12, 1, 50, {
        1: "r0 |01..aa2bb3cc4dd5ee6ff7gg8hh9ii0jj1aa.bb|",
        3: "0-9 forward, a-j backward (last digit of the microbatch), . idle; a column is 1 s",
    }),
    ("gpipe", 4, 100, 1, 120, {6: "cut: 115 of 309 columns are shown, the figure shows all"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m", "v", "width", "expected"), DRAWN)
def test_text_is_the_schedule_drawn(name: str, p: int, m: int, v: int, width: int, expected: dict[int, str]):
    lines = timeline.text("drawn", simulated(name, p, m, v), width=width).splitlines()
    assert {i: lines[i] for i in expected} == expected
    rows = lines[1 : p + 1]
    assert max(map(len, rows)) <= width
    assert {row[-1] for row in rows} == {">" if lines[-1].startswith("cut") else "|"}


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("m", [8, 16, 64])
def test_text_fits_the_width(name: str, m: int):
    v = 2 if name in ("interleaved", "zbv", "dualpipe_v") else 1
    assert max(map(len, timeline.text(name, simulated(name, 4, m, v)).splitlines())) <= 120


def test_measured_times_are_rounded_to_the_width():
    cost = lambda action: 0.0101 if action.op == "F" else 0.0203
    lines = timeline.text("measured", simulate(build("one_f_one_b", 2, 4), cost, 0.001)).splitlines()
    assert len(lines[1]) == len(lines[2]) == 120
    assert [lines[1].count(mark) for mark in ("F0", "F3", "B0", "B3")] == [1, 1, 1, 1]


def test_exact_times_without_a_useful_unit_are_rounded_to_the_width():
    cost = lambda action: Fraction(1000003, 10**9) if action.op == "F" else Fraction(2000003, 10**9)
    assert len(timeline.text("exact", simulate(build("gpipe", 2, 4), cost)).splitlines()[1]) == 120


def test_figures_are_written_and_the_same_timelines_give_the_same_bytes(tmp_path: Path):
    panels = {"predicted": simulated("one_f_one_b", 2, 4), "measured": simulated("gpipe", 2, 4)}
    written = [timeline.write(panels, tmp_path / folder / "steps.of.a.run") for folder in ("a", "b")]
    assert [path.name for path in written[0]] == ["steps.of.a.run.png", "steps.of.a.run.svg"]
    for one, other in zip(*written, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_panels_share_the_axis_and_boxes_are_numbered():
    slow = Timeline.from_rows([[["0F0", 5.0, 6.0], ["0B0", 7.0, 25.0]], [["1F0", 6.0, 6.001], ["1B0", 6.1, 6.2]]])
    figure = timeline.draw({"predicted": simulated("interleaved", 2, 2, 2), "measured": slow})
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, 20.0)
    assert above.get_title(loc="left").startswith("predicted: step 7.5 s, bubble 0.25")
    assert len(above.texts) == 2 * 2 * 2 * 2
    assert len(below.texts) == 2  # the other two have no room for a number
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward", "forward, chunk 1", "backward", "backward, chunk 1", "idle"]
