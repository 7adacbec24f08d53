"""`table --format parquet`: tables and records as files that other programs read, with types and units."""

from itertools import permutations
from pathlib import Path

import pandas
import pytest

from harness.analysis import parquet
from harness.analysis.render import Column, Table
from tests.documents import ROOT
from tests.harness.calls import call, refused
from tests.harness.made_up_records import changed, document, record, with_pipeline

arrow = pytest.importorskip("pyarrow.parquet")
SWEEP = ("table", "ptdp2021/interleaving", "--tier", "small", "--out", ROOT / "results", "--format")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.report.results.write_results", _only_made)
    for _ in range(2):  # the second call replaces what the first wrote
        answer = call(*SWEEP, "parquet")
        assert answer.status == 0, answer.errors
    folder = Path("ptdp2021-interleaving-small")
    assert answer.output.split()[2:] == [str(folder / f"{name}.parquet") for name in NAMES]
    return folder


NAMES = ("throughput", "interleaving", "claims", "records")


def _only_made(store: object, experiment: object, records: object) -> tuple[list[str], list[Table]]:
    """The tables of committed records, without writing them again."""
    from harness.report.results import all_tables

    return [], all_tables(records, experiment.claims, table=experiment.table)  # pyright: ignore


def test_a_file_has_the_numbers_of_the_csv_with_their_units(written: Path) -> None:
    found = arrow.read_table(written / "throughput.parquet")
    field = found.schema.field("tokens_per_second")
    assert (str(field.type), field.metadata[b"unit"]) == ("double", b"tokens/s")
    assert found.schema.metadata[b"title"].startswith(b"Throughput")
    csv = pandas.read_csv(ROOT / "results/ptdp2021/interleaving/small/tables/throughput.csv")
    assert found["tokens_per_second"].to_pylist() == csv["throughput (tokens/s)"].to_list()
    assert found["model"].to_pylist() == csv["model"].to_list()


def test_records_have_a_row_each_and_every_measure(written: Path) -> None:
    found = pandas.read_parquet(written / "records.parquet")
    assert len(found) == len(list((ROOT / "results/ptdp2021/interleaving/small/records").glob("*.json")))
    assert {"id", "status", "schedule", "tokens_per_second", "bubble", "seed"} <= set(found)
    assert set(found["point"]) <= set(found["id"]), "that of the run with seed and repeat 0, which ran there"


def test_reasons_in_columns_of_numbers_and_mixed_texts_are_kept_apart(tmp_path: Path) -> None:
    columns = (Column(key="x", header="x", si="s"), Column(key="name", header="name", text=True))
    rows = pandas.DataFrame({"x": [1, 2.5, "no memory", None], "name": [1, "two", None, True]}, dtype=object)
    [path, _] = parquet.write(tmp_path / "out", [Table("t", "a title", columns, rows)], [])
    assert arrow.read_table(path).to_pydict() == {"x": [1.0, 2.5, None, None], "name": ["1", "two", None, "True"]}


def test_records_of_several_experiments_are_read_together(tmp_path: Path) -> None:
    simulated = changed(record(), source="simulated", environment=document(record())["environment"] | {"cores": None})
    sweeps = ([record()], [with_pipeline(record(plan__pp=2))], [simulated], [record(status="failed", reason="killed")])
    files = [parquet.write(tmp_path / str(i), [], found)[-1] for i, found in enumerate(sweeps)]
    for first, second in permutations(files, 2):
        found = arrow.read_table([first, second]).to_pandas()
        assert len(found) == 2
        assert {str(found[name].dtype) for name in ("bubble", "mfu", "others_share")} == {"float64"}


def test_without_pyarrow_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parquet, "find_spec", lambda _: None)
    monkeypatch.setattr("harness.report.results.write_results", _only_made)
    assert "needs the package pyarrow; install it: pip install 'lmscale[parquet]'" in refused(*SWEEP, "parquet")
    assert not list(tmp_path.iterdir())
