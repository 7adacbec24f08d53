"""Hooks of MkDocs: the repository's Markdown at its own paths, and pages that are made of the code."""

import contextlib
import html
import inspect
import io
import json
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.analysis import render  # noqa: E402
from harness.cli.main import parse  # noqa: E402
from harness.cli.verb_table import VERBS  # noqa: E402
from harness.experiment import references  # noqa: E402
from harness.experiment.loading import experiment_ids, load  # noqa: E402
from harness.experiment.published import papers  # noqa: E402
from harness.experiment.verdicts import VERDICTS  # noqa: E402
from harness.figures import hover  # noqa: E402
from harness.report.pages import printed_table  # noqa: E402
from impl.run import Run  # noqa: E402

COPIED = (
    *("*.md", "docs/*.md", "docs/*.csv", "docs/*.json", "docs/*.txt", "notebooks/*.md"),
    *("results/*.md", "results/bench/*.md", "results/**/README.md", "results/**/*.svg", "results/**/*.png"),
    *("harness/experiment/published/*.csv", "harness/report/templates/tables.js"),
)
"""Files of the repository that the site has, at the same paths."""
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
MANUAL = {
    "Tutorial": ["docs/tutorial.md", "docs/running.md"],
    "How to": [*(f"docs/{name}.md" for name in DOCS), "notebooks/README.md"],
    "Explanation": [f"docs/{name}.md" for name in ("how_it_works", "plans", "predictions", "code", "features")],
    "Reference": ["reference/verbs.md", "reference/api.md", "docs/glossary.md", "CHANGELOG.md", "CONTRIBUTING.md"],
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)" ?/?>')
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
BEFORE_LIST = re.compile(r"^(?![-*] |\d+\. |\s|\||$)(.+)\n(?=[-*] |\d+\. )", re.MULTILINE)
"""Line of a paragraph before a list."""
CELL = re.compile(rf"<td([^>]*)>({'|'.join(VERDICTS)})( \([^<]*\))?</td>")
LONG = re.compile(r"<td>(?=[^<]{60})")


def on_config(config: Any) -> Any:
    """Order the pages."""
    pages = [page for name in experiment_ids() if (ROOT / (page := f"results/{name}/README.md")).exists()]
    manual = [{name: pages} for name, pages in MANUAL.items()]
    papers = {"Papers": [f"papers/{paper}.md" for paper in _answered()]}
    config.nav = [{"Home": "README.md"}, *manual, papers, {"Experiments": ["EXPERIMENTS.md", *pages]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's files, and pages that are made."""
    for path in sorted({path for pattern in COPIED for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, "tables.js" if path.suffix == ".js" else name, abs_src_path=str(path)))
    for name, text in (("reference/verbs.md", _verbs()), ("reference/api.md", _api()), *_papers()):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to what the site lacks be plain text, and write lists as MkDocs asks for: after a blank line."""

    def kept(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = target.partition("#")[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
        return found[0] if not path or ":" in path or files.get_file_from_path(there) else text

    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):
        text = BEFORE_LIST.sub(r"\1\n\n", LINK.sub(kept, parts[i]))
        parts[i] = re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)
    return "".join(parts)


def on_page_content(text: str, page: Any, config: Any, files: Files) -> str:
    """Give tables a frame that scrolls, verdicts their colours, and figures the values of their points."""
    text = re.sub("<table>", '<div class="scroll" tabindex="0" role="group" aria-label="table"><table>', text)
    text = text.replace("</table>", "</table></div>")
    badge = lambda it: f'<td{it[1]}><span class="badge {it[2].replace(" ", "-")}">{it[2]}</span>{it[3] or ""}</td>'
    text = LONG.sub('<td class="long">', CELL.sub(badge, text))
    folder = (ROOT / page.file.src_uri).parent
    return IMAGE.sub(lambda found: _figure(found[1], found[2], (folder / found[2]).resolve()), text)


def _figure(alt: str, file: str, path: Path) -> str:
    width, height, lines = hover.points(path.read_text())
    rows = [
        [round(x, 1), round(y, 1), ": ".join(filter(None, (line.name, said)))]
        for line in lines
        for x, y, said in line.points
    ]
    image = f'<img alt="{alt}" src="{file}" width="{width:.0f}" height="{height:.0f}" loading="lazy">'
    values = html.escape(json.dumps({"size": [width, height], "points": rows}, separators=(",", ":")))
    hint = f' data-values="{values}"' if rows else ""
    return f'<span class="figure" tabindex="0" role="group" aria-label="{alt}"{hint}>{image}</span>'


def _answered() -> dict[str, dict[references.Place, list[str]]]:
    return references.answered(map(load, experiment_ids()))


def _papers() -> Iterator[tuple[str, str]]:
    """Yield a page for each paper, and one for each of its tables and figures: what was printed, and the experiments.

    A page's title counts most in a search, so that `ptd-p figure 12` finds it first.
    """
    first = "---\nsearch:\n  boost: 10\n---"
    for paper, places in _answered().items():
        title, rows = references.title(paper), references.printed(paper)
        listed = []
        for place, ids in places.items():
            page = f"papers/{paper}-{str(place).replace(' ', '-')}.md"
            listed.append(
                f"- [{title}, {place}]({posixpath.basename(page)}): {', '.join(ids) or 'published numbers only'}"
            )
            found = "\n".join(f"- [{name}](../results/{name}/README.md): {load(name).question}" for name in ids)
            made = printed_table("", rows.get(place, []))
            printed = render.markdown(made, padded=False).removeprefix("### \n\n") if len(made.frame) else ""
            yield page, "\n\n".join([first, f"# {title}, {place}", found, printed])
        numbers = f"[Published numbers](../harness/experiment/published/{paper}.csv)" if paper in papers() else ""
        yield f"papers/{paper}.md", "\n\n".join([f"# {title}", numbers, "\n".join(listed)])


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
        found = import_module(module if module != "lmscale" else "harness.cli.installed")
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
