from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer

from harness.analysis.render import Table
from harness.analysis.scaling_law import Fitted, Law, Observation
from harness.figures import figures, placements, style
from harness.records.record import Record
from impl.errors import InputError
from tests.harness.made_up_records import changed, document, record, with_pipeline, without_numbers


def sweep() -> list[Record]:
    runs = [
        record(parameters=n, model__hidden_size=h, model__norm_placement=norm, train__steps=20)
        for n, h in ((481_152, 128), (2_000_000, 256))
        for norm in ("pre", "post")
    ]
    runs[-1] = changed(runs[-1], status="nan", evaluations=[])
    return [*runs, record(plan__dp=2, train__steps=20, cores=1), record(status="invalid", plan__dp=3)]


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of figures are empty, for tests of which there are: drawing pixels takes most of their time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)


def on(run: Record, system: str) -> dict[str, Any]:
    """What changes a record into one that was simulated for this system."""
    return {"source": "simulated", "environment": document(run)["environment"] | {"system": system}}


def points_of(ax: Axes) -> list[tuple[list[float], list[float]]]:
    """The points of every line."""
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in ax.lines]


def test_only_figures_with_data_are_written_and_stale_ones_go(tmp_path: Path) -> None:
    first = figures.write(sweep(), tmp_path)
    assert {p.name for p in first} == {
        f"{stem}.{suffix}" for stem in ("curves", "scaling", "perplexity_valid") for suffix in ("png", "svg")
    }
    figures.write([record(train__steps=20)], tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {"curves"}


def test_scaling_has_a_line_for_every_degree_and_way_that_grows() -> None:
    runs = [
        record(plan__dp=dp, plan__tp=tp, train__microbatch=1) for dp, tp in ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2))
    ]
    runs += [record(plan__tp=2, train__microbatch=1, plan__sequence_parallel=True)]
    figure = figures.scaling(runs)
    assert figure is not None
    drawn = {
        str(line.get_label()): np.asarray(line.lines[0].get_xdata()).tolist()
        for line in figure.axes[1].containers
        if isinstance(line, ErrorbarContainer) and line.lines[0] is not None
    }
    assert drawn == {
        "strong dp": [1, 2],
        "strong tp": [1, 2, 4],
        "strong dp with tp=2": [1, 4],
        "strong tp sequence_parallel=on": [1, 2],
    }


def test_lines_that_grow_alike_from_other_batches_have_names_of_their_own() -> None:
    runs = [record(plan__dp=dp, train__microbatch=1, train__global_batch=batch) for dp in (1, 2) for batch in (16, 24)]
    figure = figures.scaling(runs)
    assert figure is not None
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["strong from batch=16", "strong from batch=24", "ideal"]


def test_each_device_has_panels_of_its_own_where_lines_are_many() -> None:
    runs = [
        changed(run := record(plan__tp=tp, train__microbatch=1, plan__sequence_parallel=way), **on(run, name))
        for name in ("here", "there", "far", "near", "away")
        for way in (False, True)
        for tp in (2, 4)
    ]
    for names, panels, lines in ((("here", "there"), 2, 4), (("here", "there", "far", "near", "away"), 10, 2)):
        figure = figures.scaling([run for run in runs if run.environment.system in names])
        assert figure is not None
        assert (len(figure.axes), len(figure.legends[0].get_texts())) == (panels, lines + len(["ideal"]))


def test_what_lies_below_zero_is_drawn_whole() -> None:
    for ours, published in ((-1.0, 2.0), (2.0, -1.0)):
        figure = style.beside_published("t", "x", "y", {"a": [(1, ours), (2, 3.0)]}, {"a": [(1, published), (2, 3.0)]})
        assert figure is not None
        assert figure.axes[0].get_ylim()[0] < -1.0
        figure = style.beside_published("t", "x", "y", {"a": [(1e-3, 1.0), (2, 3.0)]}, {})
        assert figure is not None
        assert figure.axes[0].get_ylim()[0] == 0.0


def test_a_point_at_zero_leaves_the_others_apart() -> None:
    figure = style.beside_published("t", "x", "y", {"a": [(0, 1.0), (4, 2.0), (8, 3.0)]}, {})
    assert figure is not None
    assert figure.axes[0].get_xscale() == "linear"


def test_every_size_of_a_law_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    law = Law(1.0, 100.0, 100.0, 0.3, 0.3)
    points = [Observation(1e5 * size, tokens, 2.0, f"{size}") for size in range(1, 12) for tokens in (1e5, 1e6)]
    monkeypatch.setattr(placements, "fits", lambda records: {"pre": Fitted(law, law, tuple(points), 0.0)})
    legend = placements.of_laws([record()]).axes[0].get_legend()
    assert len(legend.get_texts()) == 11


@pytest.mark.usefixtures("unsaved")
def test_a_tables_efficiencies_are_drawn_beside_the_published_ones(tmp_path: Path) -> None:
    nan = float("nan")

    def table(records: Sequence[Record]) -> Table:
        lines = [("", 1, 1.0, 1.0), ("mine", 2, 0.9, 0.95), ("mine", 4, nan, 0.82), ("other", 2, 0.5, nan)]
        rows = pd.DataFrame(lines if records else [], columns=pd.Index(["line", "ranks", "efficiency", "published"]))
        return Table("own", "Of my own", (), rows.assign(efficiency_half_width=nan))

    assert {path.stem for path in figures.write([record(train__steps=20)], tmp_path, table=table)} == {"curves", "own"}
    figure = figures.efficiency(table([record()]))
    assert figure is not None
    drawn = points_of(figure.axes[0])
    for line in (([1, 2], [100, 90]), ([1, 2, 4], [100, 95, 82]), ([1, 2], [100, 50])):
        assert line in drawn
    figures.write([], tmp_path, table=table)
    assert list(tmp_path.iterdir()) == []


def test_what_was_simulated_alone_says_so() -> None:
    nan = float("nan")
    rows = {"line": ["", "mine"], "ranks": [1, 2], "efficiency": [nan, nan], "simulated_efficiency": [1.0, 0.9]}
    frame = pd.DataFrame({**rows, "published": [1.0, 0.95], "efficiency_half_width": [nan, nan]})
    figure = figures.efficiency(Table("own", "Of my own", (), frame))
    assert figure is not None
    assert figure.get_suptitle() == "Of my own, simulated"
    runs = [record(plan__dp=dp, train__microbatch=1) for dp in (1, 2)]
    for mine, is_said in ((runs, False), ([changed(run, **on(run, "selene")) for run in runs], True)):
        figure = figures.scaling(mine)
        assert figure is not None
        assert figure.get_suptitle().endswith(", simulated") == is_said


def test_layouts_of_as_many_ranks_are_no_scaling() -> None:
    assert figures.scaling([record(plan__dp=2, train__microbatch=1), record(plan__tp=2, train__microbatch=1)]) is None


def test_models_of_one_kind_share_a_range_of_losses_from_the_first_down() -> None:
    runs = [
        record(model__family=f, model__hidden_size=h, model__norm_placement=norm, parameters=n, nats=nats)
        for f, nats in (("gpt", 2.2), ("bert", 4.0))
        for h, n in ((128, 481_152), (256, 2_000_000))
        for norm in ("pre", "post")
    ]
    runs[0].steps.losses[30] = 1e6
    figure = figures.curves(runs)
    assert figure is not None
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "BERT's training: plus next sentence" in said, "which its validation does not have"
    ranges = {ax.get_title().split()[0]: ax.get_ylim() for ax in figure.axes}
    assert len(ranges) == 2
    assert all(5.5 < top < 6 for _, top in ranges.values()), "what stands out is cut off"
    assert ranges["GPT"][0] < 2.2 < ranges["BERT"][0] < 4.0
    shared = [ax.get_ylim() for ax in figure.axes if ax.get_title().startswith("GPT")]
    assert len(set(shared)) == 1


@pytest.mark.usefixtures("unsaved")
def test_masked_and_causal_perplexity_have_files_of_their_own(tmp_path: Path) -> None:
    runs = [
        record(model__family=family, model__hidden_size=h, parameters=n, train__steps=20)
        for family in ("gpt", "bert")
        for h, n in ((128, 481_152), (256, 2_000_000))
    ]
    stems = {path.stem for path in figures.write(runs, tmp_path)}
    assert stems == {"curves", "perplexity_valid", "perplexity_masked_valid"}


@pytest.mark.usefixtures("unsaved")
def test_an_experiments_own_figure_takes_the_place_of_its_tables(tmp_path: Path) -> None:
    table = lambda records: Table("own", "Of my own", (), pd.DataFrame())
    drawn = lambda records: style.panels(1)[0] if records else None
    written = figures.write([record(train__steps=20)], tmp_path, table=table, figure=drawn)
    assert {path.name for path in written} >= {"own.png", "own.svg"}
    figures.write([], tmp_path, table=table, figure=drawn)
    assert list(tmp_path.iterdir()) == []


def test_rates_are_drawn_beside_the_published_in_a_panel_of_their_own() -> None:
    nan = float("nan")
    columns = ["line", "at", "flop_rate", "published_rate", "oversubscribed"]
    ours = [("batch 8", "pp 1", 4e12, nan, False), ("batch 8", "pp 2", 3e12, nan, True)]
    papers = [("batch 9", "pp 1", nan, 165e12, False), ("batch 9", "pp 8", nan, 87e12, False)]

    def drawn(rows: list[tuple]) -> dict[str, list[tuple[list[float], list[float]]]]:
        figure = figures.lines(Table("own", "Of my own", (), pd.DataFrame(rows, columns=pd.Index(columns))))
        return {ax.get_title(): points_of(ax) for ax in (figure.axes if figure else [])}

    measured, published = "measured, model FLOPs", "published, recomputation counted"
    assert drawn([*ours, *papers]) == {
        measured: [([0, 1], [4, 3]), ([1], [3])],  # the oversubscribed one again, hollow
        published: [([0, 1], [165, 87])],
    }
    figure = figures.lines(Table("own", "Of my own", (), pd.DataFrame([*ours, *papers], columns=pd.Index(columns))))
    assert figure is not None
    assert [round(ax.get_ylim()[1]) for ax in figure.axes] == [4, 177], "a few cores' rates are seen beside a GPU's"
    repeated = pd.DataFrame([*ours, *papers], columns=pd.Index(columns)).assign(flop_rate_half_width=5e11)
    figure = figures.lines(Table("own", "Of my own", (), repeated))
    assert figure is not None
    drawn_bars = [[part for part in ax.collections if isinstance(part, LineCollection)] for ax in figure.axes]
    bars = [[part.get_segments() for part in parts] for parts in drawn_bars]
    assert [[[y for _, y in one.tolist()] for one in part] for part in bars[0]] == [[[3.5, 4.5], [2.5, 3.5]]]
    assert bars[1] == [], "what is printed has no interval"
    assert set(drawn([ours[0], *papers])) == {published}
    assert drawn([ours[0], papers[0]]) == {}
    models = [("", f"GPT {size}", nan, rate * 1e12, False) for size, rate in (("1T", 3), ("7.5B", 1), ("22B", 2))]
    assert drawn(models) == {published: [([0, 1, 2], [1, 2, 3])]}, "from the smallest to the largest"
    assert figures.lines(Table("other", "", (), pd.DataFrame())) is None


@pytest.mark.usefixtures("unsaved")
def test_one_timeline_for_every_schedule_and_stale_ones_go(tmp_path: Path) -> None:
    runs = [
        with_pipeline(record(plan__pp=2, plan__schedule=schedule, train__global_batch=batch, train__steps=20))
        for batch in (32, 16)
        for schedule in ("gpipe", "zb_h1")
    ]
    one = record(train__steps=20)
    stems = lambda written: {path.stem for path in written if path.stem.startswith("timeline")}
    names = {"timeline_pp_2_schedule_gpipe_batch_16", "timeline_pp_2_schedule_zb_h1_batch_16"}
    assert stems(figures.write([*runs, one], tmp_path)) == names
    assert stems(figures.write([runs[2], one], tmp_path)) == {"timeline_pp_2_schedule_gpipe"}
    assert stems(tmp_path.iterdir()) == {"timeline_pp_2_schedule_gpipe"}


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        figures.write([record(train__steps=20)], tmp_path / folder)
    for name in ("curves.png", "curves.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_runs_without_numbers_draw_nothing(tmp_path: Path) -> None:
    assert figures.write([record(status="invalid"), without_numbers(record(seed=1), "timeout")], tmp_path) == []
    assert figures.write([], tmp_path) == []


def test_mixed_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiers"):
        figures.write([record(), record(tier="paper")], tmp_path)


def test_running_mean_never_looks_ahead() -> None:
    assert figures.running_mean([2.0, 4.0, 6.0, 8.0], 2) == [2.0, 3.0, 5.0, 7.0]
