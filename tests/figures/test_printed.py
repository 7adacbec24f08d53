"""Figures as PDF: vector, fonts embedded, exactly as wide as a paper's column or page, with nothing cut off."""

import re
from pathlib import Path

import pytest

from harness.figures import figures, printed, style
from tests.documents import ROOT
from tests.harness.calls import call, refused
from tests.harness.made_up_records import record, with_pipeline

RECORDS = [
    *(record(plan__dp=n, seed=s, train__steps=20) for n in (1, 2) for s in (0, 1)),
    with_pipeline(record(plan__pp=2, plan__schedule="gpipe", train__microbatch=1, train__steps=20)),
]


def box(path: Path) -> tuple[float, float]:
    """Width and height of the only page, in points."""
    [found] = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", path.read_bytes())
    return float(found[0]), float(found[1])


def test_they_have_the_width_and_embed_their_fonts(tmp_path: Path) -> None:
    written = printed.write(RECORDS, tmp_path / "out", "column")
    assert len(written) > 1
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"%PDF-")
        assert box(path)[0] == 234
        assert b"/FontFile2" in content
        assert b"/Subtype /Image" not in content
        assert b"/CreationDate" not in content
    assert any("small tier" in title or "smoke tier" in title for title in written.values())
    again = printed.write(RECORDS, tmp_path / "again", "column")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_nothing_is_outside_of_the_page() -> None:
    with printed.for_paper("column"):
        for name, one in figures.drawn(RECORDS).items():
            one.suptitle("")
            for ax in one.axes:
                printed._break_titles(ax, 3.25)
            one.set_size_inches(3.25, one.get_size_inches()[1])
            one.draw_without_rendering()
            assert one.get_tightbbox().width < 3.3, name


def test_figures_on_a_screen_are_as_before() -> None:
    with style.style():
        before = {name: style.content(one) for name, one in figures.drawn(RECORDS).items()}
    with printed.for_paper("column"):
        figures.drawn(RECORDS)
    with style.style():
        assert {name: style.content(one) for name, one in figures.drawn(RECORDS).items()} == before


def test_the_verbs_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.report.results.write_results", lambda *_: ([], []))
    command = ["table", "ptdp2021/interleaving", "--tier", "small", "--out", ROOT / "results", "--format", "pdf"]
    answer = call(*command, "--width", "page")
    assert answer.status == 0, answer.errors
    path = "ptdp2021-interleaving-small/interleaving.pdf"
    assert f"{path}  Interleaved pipelines: ptdp2021/interleaving, small tier" in answer.output
    assert box(Path(path))[0] == 486
    assert "width" in refused(*command, "--width", "poster")
    answer = call("timeline", "--plan.pp", "2", "--out", "own/schedule.pdf")
    assert (answer.status, list(Path("own").iterdir())) == (0, [Path("own/schedule.pdf")]), answer
    assert box(Path("own/schedule.pdf"))[0] == 234
