"""The site by MkDocs: whole, offline, found by one search, sorted, and with the values of figures' points.

Where MkDocs is installed, as `make site` does; what a browser shows needs Chromium, too.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli.verb_table import VERBS
from harness.experiment.loading import experiment_ids
from tests.documents import ROOT
from tests.report.test_site import PHONE, browser

__all__ = ["browser"]
SHOWN = (
    "index.html", "docs/tutorial.html", "results/ptdp2021/interleaving/index.html", "papers/ptdp2021-figure-12.html",
    "papers/ptdp2021.html", "reference/verbs.html", "reference/api.html", "EXPERIMENTS.html",
)  # fmt: skip
WITHOUT_NAME = """[...document.querySelectorAll("button, input:not(.md-toggle), a[href], [role=group], img")]
    .filter(each => !(each.textContent.trim() || each.ariaLabel || each.alt || each.title || each.placeholder))
    .map(each => each.outerHTML)"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra `pages` is not installed")
    folder = tmp_path_factory.mktemp("book") / "site"
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "-f", ROOT / "docs/site/mkdocs.yml", "--site-dir", folder]
    done = subprocess.run([sys.executable, *build], cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # links that lead nowhere are warnings, which are errors
    return folder


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page without a network, which has to load nothing from elsewhere, and to report no error."""
    context = browser.new_context(offline=True)
    page, asked, failed = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
    yield page
    assert failed == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []
    context.close()


def test_every_document_experiment_and_verb_is_there(book: Path) -> None:
    documents = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    documents = [path.with_suffix(".html") for path in documents if path.stem != "README"]
    pages = [Path("results", name) for name in experiment_ids() if (ROOT / "results" / name / "README.md").exists()]
    assert [name for name in (*documents, *(page / "index.html" for page in pages)) if not (book / name).exists()] == []
    verbs = re.findall(r'<h2 id="([^"]+)"', (book / "reference/verbs.html").read_text())
    assert set(VERBS) <= set(verbs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_everything_has_a_name(page: Any, book: Path, scheme: str, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({**PHONE, "width": width})
    for name in SHOWN:
        page.goto((book / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, name
        assert (page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)") == (
            scheme == "dark"
        )
        page.wait_for_function("!document.querySelector('.scroll table') || document.querySelector('th button')")
        assert page.evaluate(WITHOUT_NAME) == [], name


def test_a_figure_of_a_paper_takes_one_search(page: Any, book: Path) -> None:
    page.goto((book / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("ptd-p figure 12")
    found = page.locator(".md-search-result__link[href*='papers/ptdp2021-figure-12.html']")
    found.wait_for(timeout=30_000)
    assert "figure-12" in page.locator(".md-search-result__link").first.get_attribute("href")
    found.click()
    page.wait_for_url("**/papers/ptdp2021-figure-12.html?*")
    page.click(".md-content >> text=ptdp2021/interleaving")
    page.wait_for_url("**/results/ptdp2021/interleaving/index.html")


def test_tables_are_sorted_and_figures_have_values(page: Any, book: Path) -> None:
    page.goto((book / "results/ptdp2021/interleaving/index.html").as_uri())
    page.wait_for_selector("th button")
    column = "[...document.querySelectorAll('.scroll table')[0].tBodies[0].rows].map(row => row.cells[1].innerText)"
    page.locator("th button", has_text="points").first.click()
    assert page.evaluate(column) == ["4", "10", "27"]
    figure = page.locator(".figure[data-values]").first
    figure.scroll_into_view_if_needed()
    figure.focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"\d", figure.locator("output").inner_text())
    page.keyboard.press("Tab")
    assert figure.locator("output").count() == 0
