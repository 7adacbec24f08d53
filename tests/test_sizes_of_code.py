"""Files and functions that fit a sitting and a screen."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("impl", "harness")
FILE_LINES = 400
EXPERIMENT_LINES = 200
FUNCTION_LINES = 60


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and number of lines of every function and method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_longer_than_a_sitting():
    """Of experiments apart from what those of a paper share, which is in the `__init__` of their package."""
    own = [path for path in (ROOT / "experiments").rglob("*.py") if path.name != "__init__.py"]
    for paths, most in ((sources(), FILE_LINES), (own, EXPERIMENT_LINES)):
        lines = {path: len(path.read_text().splitlines()) for path in paths}
        assert len(lines) > 10
        long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lines.items() if n > most]
        assert not long, "\n".join(long)


def test_no_function_is_over_60_lines():
    long = [
        f"{path.relative_to(ROOT)}:{line} {name}: {n} lines"
        for path in sources()
        for name, line, n in functions(path.read_text())
        if n > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_lengths_are_counted_from_def_to_the_last_line():
    source = "class C:\n    def method(self):\n        x = 1\n        return x\n\nasync def one(): pass\n"
    assert sorted(functions(source)) == [("method", 2, 3), ("one", 6, 1)]
