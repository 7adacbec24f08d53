"""Documents for the report's site: those of a checkout, and the pages on verbs and API that are made of the code."""

import contextlib
import inspect
import io
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
    "How to": [*(f"docs/{name}.md" for name in DOCS), "notebooks/README.md"],
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
    (folder / "reference").mkdir()
    for name, text in zip(REFERENCE, (_verbs(), _api()), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return sections


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
