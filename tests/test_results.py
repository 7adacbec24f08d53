"""Every committed table and figure is what the code makes of the committed records, and no file is left over.

`make documents` writes them anew.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.experiment.loading import load
from harness.figures import figures
from harness.figures.style import content, save, style
from harness.records.store import Store, read_record
from harness.report import results
from harness.report.experiments_md import tracked_files
from tests.documents import DESCRIPTION, README, ROOT, alike, stores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = ROOT / "results"
KEPT = [(name, store.tier) for name, store in stores()]


def is_drawn(made: "Figure", kept: Path, folder: Path) -> bool:
    """Whether a file shows a figure: by the hash that it holds, else by all of it."""
    held = DESCRIPTION.search(text := kept.read_text())
    return (held is not None and held[1] == content(made)) or alike(save(made, folder / kept.name).read_text(), text)


@pytest.mark.parametrize(("name", "tier"), KEPT, ids=["-".join(one) for one in KEPT])
def test_tables_and_figures_are_what_the_records_give(name: str, tier: str, tmp_path: Path) -> None:
    experiment, store = load(name), Store(RESULTS, name, tier)
    records = store.with_simulated()
    assert store.ignored == {}
    made = results.all_tables(records, experiment.claims, table=experiment.table)
    written = results.write(made, tmp_path / "tables", table=experiment.table)
    assert {path.name for path in store.tables.iterdir()} == {path.name for path in written}
    stale = [path.name for path in written if not alike(path.read_text(), (store.tables / path.name).read_text())]
    with style():
        drawn = figures.drawn(records, table=experiment.table, figure=experiment.figure)
        assert {path.stem for path in store.figures.glob("*.svg")} == set(drawn)
        stale += [stem for stem, one in drawn.items() if not is_drawn(one, store.figures / f"{stem}.svg", tmp_path)]
    assert stale == [], "make documents"


def test_no_table_or_figure_is_of_an_experiment_that_is_gone() -> None:
    tracked = tracked_files(RESULTS)
    if tracked is None:
        pytest.skip("not in a git repository")
    folders = {(RESULTS / name / tier).resolve() for name, tier in KEPT}
    assert {path.parents[1] for path in tracked if path.parent.name in ("tables", "figures")} == folders
    assert {path.parents[1] for path in tracked if path.parent.name == "records"} <= folders, "records without tables"


def test_the_figure_of_the_readme_is_whole(tmp_path: Path) -> None:
    [link] = re.findall(r"\]\((results/[^)]+\.svg)\)", README.read_text())
    kept = ROOT / link
    *place, tier, _, _ = Path(link).relative_to("results").parts
    experiment = load("/".join(place))
    records = Store(RESULTS, experiment.id, tier).with_simulated()
    with style():
        drawn = figures.drawn(records, table=experiment.table, figure=experiment.figure)
        assert alike(save(drawn[kept.stem], tmp_path / kept.name).read_text(), kept.read_text())


def test_texts_are_alike_but_for_last_digits() -> None:
    assert alike("a 0.10000000001, b 2e-15", "a 0.1, b 1e-15")
    assert not alike("a 0.1001, b 2", "a 0.1, b 2")
    assert not alike("a 1", "b 1")
    assert not alike("a 1 2", "a 1")
    assert alike("<svg id='m0123456789' x='1.0001'>", "<svg id='mabcdef0123' x='1'>")


def test_records_that_were_left_out_can_be_read_and_are_in_no_table() -> None:
    folders = sorted(RESULTS.rglob("left_out"))
    assert folders
    for folder in folders:
        tier = folder.parent
        store = Store(RESULTS, tier.parent.relative_to(RESULTS).as_posix(), tier.name)
        paths = list(folder.glob("*.json"))
        assert paths
        for path in paths:
            assert read_record(path).id == path.stem
            assert store.read(path.stem) is None
            assert path.name in (folder / "README.md").read_text()
