"""Notebooks run from top to bottom on records that no run has made, and on none."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from harness.store import Store
from tests.harness.made_up_records import record

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "results.py"
SIZES = ((64, 1, 124_736, 2.4), (128, 2, 461_952, 2.2))


def run(folder: Path) -> dict[str, Any]:
    return runpy.run_path(str(NOTEBOOK), {"RESULTS": folder, "EXPERIMENT": "made_up", "TIER": "smoke"})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store = Store(tmp_path, "made_up", "smoke")
    for hidden, heads, parameters, nats in SIZES:
        for norm, worse in (("pre", 0.0), ("post", 0.1)):
            shape = {"model__hidden_size": hidden, "model__num_heads": heads, "model__norm_placement": norm}
            store.write(record(nats=nats + worse, parameters=parameters, train__steps=20, **shape))
    store.write(record(status="failed", reason="rank 1 was killed by SIGKILL", model__norm_placement="sandwich"))
    return tmp_path


def test_throughput_perplexity_and_a_figure(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(results)
    assert len(shown["runs"]) == 5
    assert list(shown["throughput"].frame["tokens_per_second"]) == pytest.approx([16 * 128 / 0.1] * 4)
    [perplexity] = shown["perplexities"].values()
    assert {"pre", "post"} <= set(perplexity.columns)
    assert len(shown["evaluated"]) == 4
    assert isinstance(shown["figure"], Figure)
    assert "4 ok, 1 failed" in capsys.readouterr().out


def test_no_records_are_no_error(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert shown["records"] == []
    assert shown["figure"] is None


def test_no_formula_is_defined() -> None:
    nodes = list(ast.walk(ast.parse(NOTEBOOK.read_text())))
    assert not [n for n in nodes if isinstance(n, ast.FunctionDef | ast.Lambda)]
    arithmetic = {ast.unparse(n) for n in nodes if isinstance(n, ast.BinOp)}
    assert arithmetic <= {"CODE / 'results'"}
