"""The documents of the checkout as pages of the report."""

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from markupsafe import Markup

from harness.records.environment import CODE
from harness.report.html import markdown, slug

DOCUMENTS = CODE / "docs"
"""Folder of documents; an installed package has none."""
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PAGES = {
    r"\.\./EXPERIMENTS\.md": "index",
    r"([\w-]+)\.md": r"docs-\1",
    r"\.\./results/(.+)/README\.md": r"\1",
    r"\.\./results/(?:bench/)?(\w+)\.md": r"document-\1",
}
"""Names of pages, by patterns of the files that they are made of, as a document names them."""


class Document(NamedTuple):
    """A document's page: its file, title and text, and its headings."""

    file: str
    title: str
    body: Markup
    headings: list[str]


class Options(NamedTuple):
    """Options of a verb."""

    verb: str
    summary: str
    help: str


def documents(pages: Collection[str]) -> Iterator[Document]:
    """Yield the documents in alphabetical order; links to what is none of the pages of the report are plain text."""
    files = {path: f"docs-{slug(path.stem)}.html" for path in sorted(DOCUMENTS.glob("*.md"))}
    link = partial(_link, pages={*pages, *files.values()})
    for path, file in files.items():
        text = path.read_text(encoding="utf-8")
        title, *headings = HEADING.findall(FENCED.sub("", text))
        yield Document(file, title, markdown(text, link=link), headings)


def _link(target: str, pages: Collection[str]) -> str:
    """Return where a link of a document leads in the report; empty if nowhere."""
    path, sign, anchor = target.partition("#")
    file = next((re.sub(pattern, to, path) for pattern, to in PAGES.items() if re.fullmatch(pattern, path)), "")
    if file:
        file = f"{slug(file)}.html"
    return f"{file}{sign}{slug(anchor)}" if not path or file in pages else ""
