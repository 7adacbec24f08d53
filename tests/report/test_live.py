"""The page of a sweep that runs: what its files say so far, as text, and nothing from elsewhere."""

import json
import re
from pathlib import Path

import pytest

from harness.cli import status
from harness.experiment.experiment import Point
from harness.rank.job import keep
from harness.records.attempts import Attempts
from harness.records.store import Store
from harness.report import live
from impl.run import Run
from tests.harness.calls import call, refused
from tests.harness.made_up_orders import made_up
from tests.harness.made_up_records import document, record

LOSSES = (5.0, 4.0, 3.0, None)


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Store, list[Point]]:
    """A point that runs, one that has ended, and one that is missing."""
    store, ended = Store(tmp_path / "runs", "quickstart", "smoke"), record()
    store.write(document(ended) | {"experiment": "quickstart", "tier": "smoke"})
    points = [Point(Run(seed=3), "one <b>"), Point(ended.run, "two"), Point(Run(seed=5), "three")]
    attempt = Attempts(store).new(points[0].id)
    made_up().write(attempt)
    keep(attempt, "slurm", "7")
    lines = [{"step": i, "loss": loss, "seconds": 0.5, "peak_memory_bytes": 2**30} for i, loss in enumerate(LOSSES)]
    (attempt / "rank-0.steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    (attempt / "rank-0.log").write_text("a warning <script>\n\x1b[31mred\n")
    return store, points


def written(path: Path, sweep: tuple[Store, list[Point]]) -> str:
    with live.kept(path, *sweep, lambda: [("running", ""), ("ok", ""), ("missing", "waits & waits")]):
        text = path.read_text()
    assert "setInterval" in text
    assert "setInterval" not in path.read_text(), "it has ended"
    return text


def test_a_page_shows_steps_losses_rates_memory_and_logs(sweep: tuple[Store, list[Point]], tmp_path: Path) -> None:
    text = written(tmp_path / "live.html", sweep)
    cells = [re.sub("<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", text)]
    steps, rate = Run().train.steps, Run().tokens_per_step / 0.5
    assert cells[:7] == ["one &lt;b&gt;", "running", f"4 / {steps}", "", f"{rate:,.0f}", "1 GiB", ""]
    assert cells[7:9] == ["two", "ok"]
    assert cells[14:] == ["three", "missing", f"0 / {steps}", "", "", "", "waits &amp; waits"]
    assert text.count("<polyline") == 2
    assert "a warning &lt;script&gt;" in text
    assert "\x1b" not in text


def test_a_page_loads_nothing(sweep: tuple[Store, list[Point]], tmp_path: Path) -> None:
    text = written(tmp_path / "live.html", sweep)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text


def test_a_long_course_is_drawn_with_some_of_its_points() -> None:
    course = live.Course("one", "running", "", [1.0 - i / 5000 for i in range(5000)], 1.0, "", [], 5000)
    [(number, line)] = live.curves([course])
    assert (number, len(line.split())) == (0, pytest.approx(live.MOST_STEPS, rel=0.1))
    assert live.curves([course._replace(losses=[None, None])]) == []


def test_another_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thesis = tmp_path / "thesis.html"
    thesis.write_text("years")
    assert "is no page of `watch`" in refused("watch", "quickstart", "--tier", "smoke", "--html", thesis)
    assert thesis.read_text() == "years"
    monkeypatch.setattr(status, "_wait_for", lambda *_: None)
    for _ in range(2):
        assert call("watch", "quickstart", "--tier", "smoke", "--html", "live.html").status == 0
    assert "missing" in Path("live.html").read_text()
