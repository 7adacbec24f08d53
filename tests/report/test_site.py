"""The report: whole pages that need nothing from elsewhere, from whatever records there are."""

import functools
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest

from harness.analysis.render import Column, Table
from harness.cli import report
from harness.cli.verb_table import VERBS
from harness.experiment.loading import experiment_ids, load
from harness.records.record import Record
from harness.records.store import Store
from harness.report import html
from harness.report import pages as report_pages
from tests.documents import ROOT
from tests.harness.calls import call, document, refused, report_little
from tests.harness.made_up_records import changed, record, with_pipeline
from tests.harness.made_up_records import document as document_of

PHONE: Any = {"width": 390, "height": 844}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RATES = ("10", "–", "1,200", "-3", "9", "2e4", "none", "0.5 ± 0.1")
SHOWN = (
    "index.html", "EXPERIMENTS.html", "claims.html", "environments.html", "planner.html", "docs/tutorial.html",
    "papers/megatron2019.html", "papers/megatron2019-figure-5.html", "reference/verbs.html", "reference/api.html",
    "results/ours/data_parallel_scaling/index.html", "results/quickstart/index.html", "notebooks/zero_memory.html",
)  # fmt: skip
WITHOUT_NAME = """[...document.querySelectorAll("button, input:not(.md-toggle), a[href], [role=group], img")]
    .filter(each => !(each.textContent.trim() || each.ariaLabel || each.alt || each.title || each.placeholder
                      || each.labels?.length))
    .concat([...document.querySelectorAll("[role=dialog], nav")]
            .filter(each => !each.ariaLabel && !each.getAttribute("aria-labelledby")))
    .map(each => each.outerHTML)"""
NAMES = ("megatron2019/tensor_parallel_scaling", "ours/data_parallel_scaling", "quickstart")


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str]] = []
        self.headings: list[int] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.ids += [value for name, value in found.items() if name == "id"]
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loads += [value for name, value in found.items() if name in ("src", "srcset")]
        self.loads += [found["href"]] if tag == "link" else []
        self.images += [found] if tag == "img" else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        assert tag not in ("iframe", "object"), tag

    def handle_data(self, data: str) -> None:
        self.text += data


def keep(results: Path, of: Record, name: str, tier: str = "smoke", system: str | None = None) -> None:
    place = {"experiment": name, "tier": tier}
    if system:
        environment = {"system": system, "stack": "a stack", "device": "cuda", "device_name": "A100", "backend": "nccl"}
        place |= {"source": "simulated", "environment": environment}
    Store(results, name, tier, system).write(document_of(of) | place)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of a sweep, of a pipeline, of a simulation, and of a run whose reason reads like HTML."""
    out = tmp_path_factory.mktemp("records") / "results"
    scaling, data, quickstart = NAMES
    for dp in (1, 2):
        keep(out, record(train__microbatch=1, plan__dp=dp, seconds=0.1 / dp), data)
        keep(out, record(train__microbatch=1, plan__dp=dp, seconds=0.05 / dp, tier="paper"), data, "paper", "selene")
    never = record(train__microbatch=1, plan__dp=2, engine="deepspeed", status="invalid", reason="no such plan")
    keep(out, changed(never, environment={"processor": "AMD EPYC"}), data)
    keep(out, record(status="failed", reason="<b>rank 0</b> & others"), quickstart)
    base: dict[str, Any] = {"model__num_layers": 2, "model__hidden_size": 128, "model__num_heads": 4}
    keep(out, record(**base), scaling)
    keep(out, with_pipeline(record(**base, plan__pp=2, plan__schedule="gpipe", train__steps=20)), scaling)
    (out / data / "FOUND.md").write_text("Two ranks are <i>faster</i>.\n\n## History\n\nThey were slower.\n")
    return out


@pytest.fixture(scope="module")
def few() -> Any:
    """The report of a few experiments, which takes a few seconds less than that of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "experiment_ids", lambda: list(NAMES))
        patch.setattr("harness.experiment.folders.ARCHIVE", Path("/nowhere/results"))
        report_little(patch, manual=True)
        yield


@pytest.fixture(scope="module")
def site(results: Path, few: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "site"
    answer = call("report", "--results", results, "--out", out, "--json")
    assert answer.status == 0, answer.errors
    found = document(answer.output)
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert sorted(found["files"]) == written
    assert found["records"] == {"measured": 6, "simulated": 2}
    assert found["claims"]["claims"] == sum(len(load(name).claims) for name in NAMES)
    return out


@functools.cache
def pages(site: Path) -> dict[str, Page]:
    """What each page of a report that no test changes is."""
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}


def test_all_links_resolve_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = pages(site)
    assert {"index.html", "claims.html", "environments.html", "planner.html", "docs/tutorial.html"} <= set(found)
    for name, page in found.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in [*page.links, *page.loads]:
            url = urlsplit(link)
            if link == "data:," or (url.scheme and link in page.links):
                continue
            assert (url.scheme, url.netloc) == ("", ""), f"{name}: {link}"
            target = (site / name).parent / unquote(url.path) if url.path else site / name
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{name}: {link}"
            to = target.resolve().relative_to(site.resolve()).as_posix()
            assert not url.fragment or to not in found or url.fragment in found[to].ids, f"{name}: {link}"
    for css in ("style.css", "site.css"):
        assert "url(" not in (site / css).read_text()
        assert "@import" not in (site / css).read_text()


def test_headings_go_down_by_one_level_at_a_time(site: Path) -> None:
    found = {name: page.headings for name, page in pages(site).items()}
    assert {"results/accuracy.html", "results/bench/engines.html"} <= set(found)
    assert [name for name, levels in found.items() if any(b > a + 1 for a, b in pairwise([0, *levels]))] == []


def test_documents_verbs_and_api_are_there(site: Path) -> None:
    documents = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    documents = [path.with_suffix(".html") for path in documents if path.stem != "README"]
    assert [path for path in documents if not (site / path).exists()] == []
    assert set(VERBS) <= set(pages(site)["reference/verbs.html"].ids)
    assert {"lmscale", "run", "experiment"} <= set(pages(site)["reference/api.html"].ids)


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb")))
def test_a_notebook_is_a_page_with_its_code_and_what_it_shows(site: Path, name: str) -> None:
    page = Page(site / f"notebooks/{name}.html")
    assert "import " in page.text
    assert page.images
    for image in page.images:
        assert (site / "notebooks" / image["src"]).stat().st_size > 1000
        assert not image["alt"].startswith(":")
    assert f"{name}.html" in Page(site / "notebooks/index.html").links


def test_an_installed_package_has_pages_of_its_results_first(
    results: Path, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.cli.manual.CODE", tmp_path / "nowhere")
    assert call("report", "--results", results, "--out", tmp_path / "site").status == 0
    assert "The papers, rerun" in Page(tmp_path / "site" / "index.html").text
    assert (tmp_path / "site" / "reference" / "verbs.html").exists()
    assert not (tmp_path / "site" / "docs").exists()


def test_every_figure_says_what_it_shows(site: Path) -> None:
    images = pages(site)["results/ours/data_parallel_scaling/index.html"].images
    assert images
    for image in images:
        assert len(image["alt"]) > 20
        assert int(image["width"]) > 0
        assert int(image["height"]) > 0
    alts = " ".join(image["alt"] for image in images)
    assert "throughput (tokens/s) against ranks" in alts
    timeline = [image["alt"] for image in pages(site)["results/megatron2019/tensor_parallel_scaling/index.html"].images]
    assert any("bubble" in alt and "measured" in alt for alt in timeline)


def test_measured_and_simulated_stand_apart(site: Path) -> None:
    text = (site / "results/ours/data_parallel_scaling/index.html").read_text()
    shown = " ".join(Page(site / "results/ours/data_parallel_scaling/index.html").text.split())
    assert "Tier paper¶ Simulated for selene (a stack)" in shown
    assert "Tier paper, simulated for selene (a stack)" in shown, "as the repository's page"
    assert "Tier smoke¶ Measured on AMD EPYC. " in shown  # on nothing else: what is invalid was not run
    assert text.index('id="tier-paper"') < text.index('id="tier-smoke"')


def test_what_a_record_says_is_text(site: Path) -> None:
    text = (site / "results/quickstart/index.html").read_text()
    assert "&lt;b&gt;rank 0&lt;/b&gt; &amp; others" in text
    assert "<b>rank 0" not in text


def test_a_table_or_figure_is_found_by_its_number(site: Path) -> None:
    found = pages(site)
    own, published = (found[f"papers/{place}.html"] for place in ("megatron2019-figure-5", "zero2019-figure-6"))
    assert "../results/megatron2019/tensor_parallel_scaling/index.html" in own.links
    assert "Verified, digitised: read off a figure" in published.text, "without an experiment here"
    assert "Published numbers" in own.text
    listed = found["EXPERIMENTS.html"].links
    assert {"papers/megatron2019-figure-5.html", "papers/zero2019-figure-6.html"} <= set(listed)


def test_a_verdict_has_its_colour_with_a_remark_too() -> None:
    column = Column(key="verdict", header="verdict", text=True)
    rows = pd.DataFrame({"verdict": ["cannot tell here (9 repeats would)", "partly", "partly done"]})
    text = html.part("grid", html.ShownTable(Table("t", "t", (column,), rows)))
    assert '<span class="badge cannot-tell-here">cannot tell here</span> (9 repeats would)</td>' in text
    assert text.count('class="badge') == 2


def test_the_same_records_give_the_same_bytes_and_take_the_place_of_an_older_report(
    site: Path, results: Path, few: None, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    (again / "report.json").write_text(json.dumps({"lmscale_report": 1}))
    (again / "left_over.html").write_text("")
    assert "open" in call("report", "--results", results, "--out", again).output
    contents = lambda folder: {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert contents(again) == contents(site)
    assert list(tmp_path.iterdir()) == [again]


def test_a_page_has_the_findings_of_the_folder_of_records(site: Path) -> None:
    text = (site / "results/ours/data_parallel_scaling/index.html").read_text()
    assert "<p><strong>Found.</strong> Two ranks are &lt;i&gt;faster&lt;/i&gt;.</p>" in text
    assert re.search(r"<h2[^>]*>History<.*</h2>\s*<p>They were slower.</p>", text)


def test_a_folder_with_something_else_is_left_alone(results: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path)
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path / "thesis.tex")
    (tmp_path / "report.json").write_text("[]")
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path)
    assert "no such folder" in refused("report", "--results", tmp_path / "nowhere", "--out", tmp_path / "new")
    (tmp_path / "empty").mkdir()
    assert "no records" in refused("report", "--results", tmp_path / "empty", "--out", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "report.json", "thesis.tex"]


def test_a_report_that_is_not_finished_leaves_the_one_before(
    results: Path, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "site"
    old.mkdir()
    (old / "report.json").write_text(json.dumps({"lmscale_report": 1}))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_pages.Pages, "add", stop)
    assert call("report", "--results", results, "--out", old).status == 130
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert [path.name for path in old.iterdir()] == ["report.json"]


def test_every_experiment_has_a_page_with_or_without_records(tmp_path: Path) -> None:
    made = report_pages.Pages(tmp_path, tmp_path / "missing")
    for name in experiment_ids():
        made.add(load(name), [])
    assert made.finish()["experiments"] == len(experiment_ids())
    assert "No records yet." in (tmp_path / "results/quickstart/README.md").read_text()
    index = (tmp_path / "EXPERIMENTS.md").read_text()
    assert [name for name in experiment_ids() if f"](results/{name}/README.md)" not in index] == []


# As a browser shows it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page without a network, which has to load nothing from elsewhere, and to report no error."""
    context = browser.new_context(offline=True)
    page, asked, failed = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    is_left = lambda request: "ERR_ABORTED" in (request.failure or "")  # by a page that was left while it loaded
    page.on("requestfailed", lambda request: None if is_left(request) else failed.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
    yield page
    assert failed == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []
    context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_fit_and_everything_has_a_name(page: Any, site: Path, scheme: str, width: int) -> None:
    """Names depend on neither, and the width that a page needs not on its colours."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({**PHONE, "width": width})
    for name in SHOWN:
        page.goto((site / name).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, name
        is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert is_dark == (scheme == "dark"), name
        if name != "planner.html":
            page.wait_for_function("!document.querySelector('.scroll table') || document.querySelector('th button')")
        assert page.evaluate(WITHOUT_NAME) == [], name


def test_a_figure_of_a_paper_takes_one_search(page: Any, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("megatron-lm figure 5")
    found = page.locator(".md-search-result__link[href*='papers/megatron2019-figure-5.html']")
    found.wait_for(timeout=30_000)
    assert "megatron2019-figure-5" in page.locator(".md-search-result__link").first.get_attribute("href")
    found.click()
    page.wait_for_url("**/papers/megatron2019-figure-5.html?*")
    page.click(".md-content >> text=megatron2019/tensor_parallel_scaling")
    page.wait_for_url("**/results/megatron2019/tensor_parallel_scaling/index.html")


def test_figures_have_values(page: Any, site: Path) -> None:
    page.goto((site / "results/ours/data_parallel_scaling/index.html").as_uri())
    figure = page.locator(".figure[data-values]").first
    figure.scroll_into_view_if_needed()
    figure.focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"\d", figure.locator("output").inner_text())
    page.keyboard.press("Tab")
    assert figure.locator("output").count() == 0


def test_tables_are_sorted_by_numbers_and_filtered(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "planner.html").as_uri())
    page.set_content(
        """<div class="scroll"><table><thead><tr><th>name</th><th>rate</th></tr></thead><tbody>"""
        + "".join(f"<tr><td>{name}</td><td>{rate}</td></tr>" for name, rate in zip("abcdefgh", RATES, strict=True))
        + "</tbody></table></div>"
    )
    page.add_script_tag(path=site / "tables.js")
    column = lambda n: page.eval_on_selector_all(f"td:nth-child({n})", "cells => cells.map(cell => cell.textContent)")
    page.click("th:nth-child(2) button")
    assert column(2) == ["-3", "0.5 ± 0.1", "9", "10", "1,200", "2e4", "none", "–"]
    assert page.get_attribute("th:nth-child(2)", "aria-sort") == "ascending"
    page.click("th:nth-child(2) button")
    assert column(2) == ["none", "2e4", "1,200", "10", "9", "0.5 ± 0.1", "-3", "–"]
    page.click("th:nth-child(1) button")
    assert column(1) == list("abcdefgh")
    page.fill(".filter", "1,2")
    assert [row.inner_text() for row in page.query_selector_all("tbody tr") if row.is_visible()] == ["c\t1,200"]


def test_verdicts_are_filtered_together(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "claims.html").as_uri())
    sections = "[data-together] > section"
    assert page.locator(sections).count() > 1
    rows = lambda: [row.inner_text() for row in page.query_selector_all("tbody tr") if row.is_visible()]
    every = rows()
    page.fill(".filter", "FIGURE 5")
    assert rows() == [row for row in every if "figure 5" in row]
    assert 0 < len(rows()) < len(every)
    page.fill(".filter", "no such verdict")
    assert not [each for each in page.query_selector_all(sections) if each.is_visible()]


def test_figures_are_not_smaller_than_can_be_read(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "results/ours/data_parallel_scaling/index.html").as_uri())
    images = page.query_selector_all(".figure img")
    assert images
    for image in images:
        image.scroll_into_view_if_needed()
        image.evaluate("image => image.decode()")
        shown, own = image.evaluate("image => [image.getBoundingClientRect().width, image.naturalWidth]")
        assert shown > 0.75 * own, "letters of 10 points have 10 pixels"
