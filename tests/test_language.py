"""Docstrings and comments are in plain English, and experiments read typed records."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for room in ("impl", "harness", "experiments") for path in sorted((ROOT / room).rglob("*.py"))]
PLAIN = {
    "told": "passed, reported", "tells": "reports", "whoever": "any process", "nobody": "no process",
    "somebody": "another process", "anew": "again",
}  # fmt: skip
"""Words that describe no data or code, with plain ones."""
ARCHAIC = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a file, each with its line."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("room", ["impl", "harness", "experiments"])
def test_docstrings_and_comments_use_plain_words(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word} (plain: {PLAIN[word.lower()]})"
        for path in SOURCES
        if path.is_relative_to(ROOT / room)
        for line, text in prose(path)
        for word in ARCHAIC.findall(text)
    ]
    assert not found, "\n".join(found)


def test_no_experiment_parses_json() -> None:
    """Records are typed, and so are points."""
    parsing = [path for path in SOURCES if path.is_relative_to(ROOT / "experiments") and "json" in imported(path)]
    assert not parsing


def imported(path: Path) -> set[str]:
    """Return the names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
