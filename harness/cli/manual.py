"""Documents for the report's site: those of a checkout, its notebooks, and pages on verbs and API made of the code."""

import base64
import contextlib
import inspect
import io
import json
import os
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.cli.main import parse
from harness.cli.verb_table import VERBS
from harness.records.privacy import CODE
from impl.run import Run

COPIED = (
    *("*.md", "docs/*.md", "docs/*.csv", "docs/*.json", "docs/*.txt", "notebooks/*.md"),
    *("results/*.md", "results/*.png", "results/bench/*.md"),
)
"""Files of a checkout that the site has, at the same paths."""
IMAGE = re.compile(r"!\[[^\]]*\]\(([^):]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
OF_EXPERIMENTS = ("Experiment", "Claim", "Evidence", "Comparison", "Tolerance", "Record", "points", "tabulate")
PUBLIC = {
    "lmscale": ("run", "load", "frame", "Records"),
    "harness.experiment.kit": OF_EXPERIMENTS,
    "harness.experiment.checks": ("falls", "rises", "within_share", "at_most"),
    "impl.run": ("Run", "from_dict", "to_dict"),
    "impl.plan": ("Plan",),
    "impl.model.config": ("ModelConfig",),
    "impl.recipe": ("Recipe",),
}
"""Names that code of one's own uses, by module."""
DOCS = ("extending", "texts", "clusters", "results", "faq")
REFERENCE = ["reference/verbs.md", "reference/api.md"]
MANUAL = {
    "Tutorial": ["docs/tutorial.md", "docs/running.md"],
    "How to": [f"docs/{name}.md" for name in DOCS],
    "Explanation": [f"docs/{name}.md" for name in ("how_it_works", "plans", "predictions", "code", "features")],
    "Reference": [*REFERENCE, "docs/glossary.md", "CHANGELOG.md", "CONTRIBUTING.md"],
}


def write_manual(folder: Path) -> list[Any]:
    """Write the documents into a folder, at their paths in the repository; return the site's sections of them.

    An installed package has none but those made of the code.
    """
    if not (CODE / "docs" / "tutorial.md").exists():
        sections: list[Any] = [{"Home": "index.md"}, {"Reference": REFERENCE}]
    else:
        sections = [{"Home": "README.md"}, *({name: pages} for name, pages in MANUAL.items())]
        read = [path for pattern in COPIED for path in CODE.glob(pattern)]
        shown = [CODE / name for name in IMAGE.findall((CODE / "README.md").read_text())]
        for path in (*read, *shown):
            to = folder / path.relative_to(CODE)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
        notebooks = {f"notebooks/{path.stem}.md": path for path in sorted(CODE.glob("notebooks/*.ipynb"))}
        for name, path in notebooks.items():
            _write_notebook(path, folder / name)
        sections.insert(3, {"Notebooks": ["notebooks/README.md", *notebooks]})
    (folder / "reference").mkdir()
    for name, text in zip(REFERENCE, (_verbs(), _api()), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return sections


def _write_notebook(notebook: Path, to: Path) -> None:
    """Write cells and what they show as Markdown, with the images in the same folder."""
    parts, title = list[str](), ""
    for i, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            title = [title, *HEADING.findall(source)][-1]
            continue
        parts.append(f"```python\n{source}\n```")
        for j, output in enumerate(cell["outputs"]):
            shown = {kind: "".join(text) for kind, text in output.get("data", {"text": output.get("text", "")}).items()}
            if "image/png" in shown:
                image = to.with_name(f"{notebook.stem}-{i}-{j}.png")
                image.write_bytes(base64.b64decode(shown["image/png"]))
                parts.append(f"![{title}: what the code above draws]({image.name})")
            elif "text/markdown" in shown:
                parts.append(shown["text/markdown"])
            else:
                parts.append(f"```text\n{shown.get('text') or shown.get('text/plain', '')}\n```")
    to.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _verbs() -> str:
    """Return every verb with its options, as --help prints them."""
    parts = ["# Verbs\n\n`lmscale VERB --help` prints the same.\n"]
    os.environ["COLUMNS"] = "90"
    for name, verb in VERBS.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            parse([name, "--help"], Run(), frozenset())
        shown = re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE).strip()
        parts.append(f"## {name}\n\n{verb.summary}.\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def _api() -> str:
    """Return the docstrings of what code of one's own uses."""
    text = ["# API", "What notebooks, experiments, schedules and placements of one's own import."]
    for module, names in PUBLIC.items():
        found = import_module(module if module != "lmscale" else "harness.cli.api")
        text.append(f"## `{module}`")
        for name in names:
            it = getattr(found, name)
            text += [f"### {name}", f"```python\n{name}{_signature(it)}\n```"]
            text.append(f"```text\n{inspect.getdoc(it) or ''}\n```")
    return "\n\n".join(text) + "\n"


def _signature(it: Any) -> str:
    try:
        found = str(inspect.signature(it))
    except (TypeError, ValueError):
        return ""
    return found if len(found) < 400 else "(...)"
