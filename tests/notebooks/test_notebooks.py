"""Notebooks run from top to bottom, say what the records say today, and define no formula."""

import ast
import functools
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.documents import alike
from tests.notebooks.executed import COMPUTES, ROOT, SOURCES, execute, read, told

NAMES = {
    "add_your_own_ablation", "imported_archive", "layernorm_placement", "pipeline_timelines", "scaling_laws",
    "simulator_accuracy", "throughput_and_scaling", "zero_memory",
}  # fmt: skip
TEACHES = "add_your_own_ablation"
"""It shows how runs and a check are written."""
LESS = {
    "steps=200": "steps=20", "warmup_steps=40": "warmup_steps=4", "every=50": "every=10",
    "sequences=128": "sequences=4", "BATCHES = (2, 4)": "BATCHES = (2,)", "BATCHES = (2, 4, 8)": "BATCHES = (2, 4)",
}  # fmt: skip
"""How much it trains and evaluates, and how much is done of it here: what comes out is not compared."""
STALE = "python -m tests.documents"
KIBI = 2**10


def stems(path: Path) -> str:
    return path.stem


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the cells of each notebook say, all executed in one kernel, whose start takes longer than most notebooks."""
    for package in ("nbclient", "jupytext", "ipykernel"):
        pytest.importorskip(package, reason="pip install -e '.[notebooks]'")
    notebooks = {source.stem: read(source) for source in SOURCES}
    for much, little in LESS.items():
        [cell] = (cell for cell in notebooks[TEACHES].cells if much in cell.source)
        cell.source = cell.source.replace(much, little)
    execute(notebooks.values(), tmp_path_factory.mktemp("notebooks"))
    return {name: told(notebook) for name, notebook in notebooks.items()}


@functools.cache
def are_records_committed() -> bool:
    """Whether the results are those of the commit: what was run here since is in no notebook yet."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "results"]
    return not subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def test_every_notebook_has_a_source_and_outputs() -> None:
    assert {path.stem for path in SOURCES} == NAMES
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == NAMES


@pytest.mark.parametrize("source", SOURCES, ids=stems)
def test_it_runs_and_says_what_the_records_say(source: Path, again: dict[str, list[str]]) -> None:
    import nbformat

    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    cells = lambda notebook: [(cell.cell_type, cell.source, cell.id) for cell in notebook.cells]
    assert cells(committed) == cells(read(source)), f"not made of its source: {STALE}"
    if source.stem not in COMPUTES and are_records_committed():
        assert alike(" ".join(again[source.stem]), " ".join(told(committed))), f"records have changed: {STALE}"


@pytest.mark.parametrize("source", SOURCES, ids=stems)
def test_what_is_committed_is_whole_and_small(source: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[notebooks]'")
    path = source.with_suffix(".ipynb")
    assert path.stat().st_size < 1500 * KIBI
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    texts = [text for o in outputs for text in (o.get("text", ""), *o.get("data", {}).values()) if len(text) < 10**5]
    assert not [text for text in texts if "/tmp/" in text or str(ROOT) in text]


@pytest.mark.parametrize("source", [s for s in SOURCES if s.stem not in COMPUTES], ids=stems)
def test_no_records_are_no_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython", reason="pip install -e '.[notebooks]'")
    monkeypatch.setattr("harness.records.environment.CODE", tmp_path)
    assert not [value for name, value in runpy.run_path(str(source)).items() if name == "records" and value]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", SOURCES, ids=stems)
def test_no_formula_is_defined(source: Path) -> None:
    nodes = list(ast.walk(ast.parse(source.read_text())))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    assert functions == (["runs", "falls_with_the_batch"] if source.stem == TEACHES else [])
    arithmetic = [node for node in nodes if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr)]
    of_paths = {
        "CODE / 'results'", "RESULTS / 'accuracy.png'", "store.out / '.synthetic'", "RESULTS / placement.id",
        "RESULTS / law.id",
    }  # fmt: skip
    assert {ast.unparse(node) for node in arithmetic} <= of_paths
