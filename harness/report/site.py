"""The report's site: MkDocs makes it of Markdown, in a folder that is replaced as a whole or not at all."""

import json
import logging
import os
import posixpath
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markupsafe import Markup
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config
from mkdocs.plugins import BasePlugin
from mkdocs.structure.files import Files

from harness.experiment.verdicts import VERDICTS
from harness.records.store import read_json
from harness.report.html import TEMPLATES, part, read_figure, templates
from impl.errors import InputError

KIND, MANIFEST = "lmscale_report", "report.json"
"""Field that identifies a folder as a report, and the file that has it."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<p><img alt="([^"]*)" src="([^":]+\.svg)" ?/?></p>')
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)
SECTION, TABLE = re.compile(r"^## ", re.MULTILINE), re.compile(r"^### ", re.MULTILINE)
"""Headings of the second level, and of the third, which tables have."""
BEFORE_LIST = re.compile(r"^(?![-*] |\d+\. |\s|\||$)(.+)\n(?=[-*] |\d+\. )", re.MULTILINE)
"""Line of a paragraph before a list."""
CELL = re.compile(rf"<td([^>]*)>({'|'.join(VERDICTS)})( \([^<]*\))?</td>")
LONG = re.compile(r"<td>(?=[^<]{60})")
MARK = re.compile(r"<p>(@@\d+@@)</p>")


class _Text(Extension):
    """Markdown without HTML: what a record or a document says is text."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Let HTML, and addresses that would become links, be as they are."""
        md.preprocessors.deregister("html_block")
        md.parser.blockprocessors.deregister("reference")
        for name in ("html", "autolink", "automail"):
            md.inlinePatterns.deregister(name)


class _Pages(BasePlugin):
    """MkDocs plugin with the functions called for each page; `html` is by the mark that stands for it in a page."""

    def __init__(self, html: Mapping[str, str]) -> None:
        self.html = html

    def on_config(self, config: Any) -> Any:
        """Add the extension."""
        config.markdown_extensions.append(_Text())
        return config

    def on_page_markdown(self, markdown: str, page: Any, config: Any, files: Files) -> str:
        """Let links lead to notebooks' pages, or be text where they lead nowhere; mend headings and lists."""

        def kept(found: re.Match[str]) -> str:
            text, target = found.groups()
            target = target if ":" in target else target.replace(".ipynb", ".md")
            path = target.partition("#")[0]
            there = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
            is_there = not path or ":" in path or files.get_file_from_path(there)
            return f"[{text}]({target})" if is_there else text

        if not SECTION.search(markdown):  # tables alone, whose headings would be two levels below the page's
            markdown = TABLE.sub("## ", markdown)
        parts = FENCED.split(markdown)
        for i in range(0, len(parts), 2):
            text = COMMENT.sub("", parts[i]).replace("\\<", "<")
            text = BEFORE_LIST.sub(r"\1\n\n", LINK.sub(kept, text))
            parts[i] = re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)
        return "".join(parts)

    def on_page_content(self, html: str, page: Any, config: Any, files: Files) -> str:
        """Give tables a frame that scrolls, verdicts their colours, and figures the values of their points."""
        text = re.sub("<table>", '<div class="scroll" tabindex="0" role="group" aria-label="table"><table>', html)
        text = text.replace("</table>", "</table></div>")
        badge = lambda it: f'<td{it[1]}><span class="badge {it[2].replace(" ", "-")}">{it[2]}</span>{it[3] or ""}</td>'
        text = LONG.sub('<td class="long">', CELL.sub(badge, text))
        folder = (Path(config.docs_dir) / page.file.src_uri).parent
        figure = lambda it: part("figure", read_figure(it[2], (folder / it[2]).read_text(), Markup(it[1]).unescape()))
        return MARK.sub(lambda it: self.html.get(it[1], it[0]), IMAGE.sub(figure, text))


def build(source: Path, site: Path, nav: Sequence[Any], html: Mapping[str, str]) -> None:
    """Write the site of a folder of Markdown; `html` has what the marks in its pages stand for."""
    shutil.copytree(TEMPLATES / "assets", source, dirs_exist_ok=True)
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    config = load_config(str(TEMPLATES / "mkdocs.yml"), docs_dir=str(source), site_dir=str(site), nav=list(nav))
    config.plugins["pages"] = _Pages(html)
    mkdocs_build(config)
    for name in ("sitemap.xml", "sitemap.xml.gz", "404.html"):  # for servers, and with the time of day
        (site / name).unlink(missing_ok=True)


def add_planner(site: Path, data: Markup) -> None:
    """Write the planner's page, which stands by itself."""
    text = templates().get_template("planner.html").render(heading="Planner", data=data)
    (site / "planner.html").write_text(text, encoding="utf-8")
    for name in ("planner.js", "style.css"):
        shutil.copyfile(TEMPLATES / name, site / name)


def add_manifest(site: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file that makes the folder a report, and return what it says: of the records, and all files."""
    files = sorted(path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file())
    manifest = {KIND: 1, **said, "files": [*files, MANIFEST]}
    (site / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def require_replaceable(out: Path) -> None:
    """Check that the path is free, an empty folder, or an earlier report.

    Raises:
        InputError: it is not.
    """
    if not out.exists() and not out.is_symlink():
        return
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and not ((found := read_json(out / MANIFEST)) and isinstance(found, dict) and KIND in found):
        raise InputError(f"--out {out}: is no report; valid: a folder that is new, empty, or an earlier report")
