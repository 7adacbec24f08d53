"""The book: modules that are read in the order of docs/code.md, and import no others."""

import ast
import re
from pathlib import Path

from tests.test_floors import imports, modules

ROOT = Path(__file__).resolve().parents[1]
LINES = 10_000
CHAPTERS = re.compile(r"^## The book$(.*?)^## ", re.DOTALL | re.MULTILINE)


def book() -> dict[str, Path]:
    """Modules of the book in reading order, with the packages that they are in."""
    [text] = CHAPTERS.findall((ROOT / "docs/code.md").read_text())
    named = [ROOT / name for name in re.findall(r"`((?:impl|harness)/[\w/.]+)`", text)]
    files = [file for path in named for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    by_path = {path: name for name, path in modules().items()}
    assert not [str(file) for file in files if file not in by_path]
    packages = [folder / "__init__.py" for file in files for folder in file.parents]
    return {by_path[path]: path for path in [*files, *packages] if path in by_path}


def at_import(source: str) -> str:
    """The statements of a module that import something as it is imported."""
    tree = ast.parse(source)
    is_for_types = lambda node: isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    tree.body = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef) and not is_for_types(n)]
    return ast.unparse(tree)


def test_the_book_imports_no_lab() -> None:
    found, known = book(), set(modules())
    assert len(found) > 50
    lab = [
        f"{name} imports {other}"
        for name, path in found.items()
        for other in imports(name, at_import(path.read_text()), known, path.name == "__init__.py")
        if other not in found
    ]
    assert not lab, "\n".join(lab)


def test_the_book_is_under_10000_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in book().values()) < LINES


def test_imports_in_functions_and_for_types_are_not_counted() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c\nfor x in y:\n    import d\n"
    assert at_import(source).count("import") == 2
