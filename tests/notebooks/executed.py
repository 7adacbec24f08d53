"""The notebooks of `notebooks/*.py` as `.ipynb`, with what their cells show."""

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
COMPUTES = ("add_your_own_ablation", "imported_archive", "simulator_accuracy")
"""What they show is not of records alone: they train, fit, or write an archive, in which this code is."""
SECONDS = 300
"""A cell may take."""


def read(source: Path) -> Any:
    """A notebook without outputs; the same source gives the same notebook."""
    import jupytext

    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"{source.stem}-{i}", {}
    return notebook


def executed(source: Path) -> str:
    """The notebook as JSON, executed in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell does.
    """
    import nbformat

    notebook = read(source)
    with tempfile.TemporaryDirectory() as folder:
        execute([notebook], folder)
    return nbformat.writes(without_what_varies(notebook)) + "\n"


def execute(notebooks: Iterable[Any], folder: Path | str) -> None:
    """Execute cells in one kernel; no notebook sees the names of one before it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell does.
    """
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    together = new_notebook(cells=[c for one in notebooks for c in (*one.cells, new_code_cell("%reset -f"))])
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(together, timeout=SECONDS, resources=place, record_timing=False).execute(env=environment(folder))


def environment(folder: Path | str) -> dict[str, str]:
    """Variables for a kernel that imports this code and keeps its own files in a folder."""
    own = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**inherited, **own}


def without_what_varies(notebook: Any) -> Any:
    """The notebook without what differs from one execution to the next, or is said twice."""
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        for data in (output.data for output in cell.get("outputs", ()) if "data" in output):
            if "text/markdown" in data or "image/png" in data:
                data.pop("text/plain", None)  # the same for programs, and longer
    return notebook


def told(notebook: Any) -> list[str]:
    """What every cell of code says, but for figures; joined, as one print may come as several outputs."""
    return ["".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    if "image/png" in data:
        return "a figure"
    text = data.get("text/markdown") or data.get("text/plain") or "\n".join(output.get("traceback", ()))
    return re.sub(r" at 0x[0-9a-f]+", "", text)
