"""The report: whole pages that need nothing from elsewhere, from whatever records there are."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from harness.cli import report
from harness.experiment.experiment import Experiment
from harness.experiment.loading import experiment_ids, load
from harness.records.record import Record
from harness.records.store import Store
from harness.report import pages as report_pages
from harness.report.html import markdown
from tests.harness.calls import call, document, plan_little, refused
from tests.harness.made_up_records import changed, record, with_pipeline
from tests.harness.made_up_records import document as document_of

PHONE: Any = {"width": 390, "height": 844}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RATES = ("10", "–", "1,200", "-3", "9", "2e4", "none", "0.5 ± 0.1")
NAMES = ("megatron2019/tensor_parallel_scaling", "ours/data_parallel_scaling", "quickstart")


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str]] = []
        self.text = ""
        self.name = path.name
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.ids += [value for name, value in found.items() if name == "id"]
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loads += [value for name, value in found.items() if name in ("src", "srcset")]
        self.loads += [found["href"]] if tag == "link" else []
        self.images += [found] if tag == "img" else []
        assert tag not in ("iframe", "object", "form"), tag
        own = {"entries.js", "search.js", "tables.js"}
        assert tag != "script" or self.name == "planner.html" or found["src"] in own, self.name

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
        plan_little(patch)
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


def pages(site: Path) -> dict[str, Page]:
    return {path.name: Page(path) for path in sorted(site.glob("*.html"))}


def test_all_links_resolve_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = pages(site)
    assert {"index.html", "claims.html", "environments.html", "quickstart.html", "paper-ptdp2021.html"} <= set(found)
    reached = set()
    for name, page in found.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in [*page.links, *page.loads]:
            url = urlsplit(link)
            if link == "data:,":  # an icon that is not asked for
                continue
            assert (url.scheme, url.netloc, url.query) == ("", "", ""), f"{name}: {link}"
            target = site / unquote(url.path or name)
            assert target.is_file(), f"{name}: {link}"
            assert not url.fragment or url.fragment in found[target.name].ids, f"{name}: {link}"
            reached.add(target.relative_to(site).as_posix())
    css = (site / "style.css").read_text()
    assert "url(" not in css
    assert "@import" not in css
    missed = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()} - reached
    assert missed == {"report.json"}, "every file is linked to"


def test_every_figure_says_what_it_shows(site: Path) -> None:
    images = pages(site)["ours-data_parallel_scaling.html"].images
    assert images
    for image in images:
        assert len(image["alt"]) > 20
        assert int(image["width"]) > 0
        assert int(image["height"]) > 0
    alts = " ".join(image["alt"] for image in images)
    assert "throughput (tokens/s) against ranks" in alts
    timeline = [image["alt"] for image in pages(site)["megatron2019-tensor_parallel_scaling.html"].images]
    assert any("bubble" in alt and "measured" in alt for alt in timeline)


def test_measured_and_simulated_stand_apart(site: Path) -> None:
    text = (site / "ours-data_parallel_scaling.html").read_text()
    shown = " ".join(Page(site / "ours-data_parallel_scaling.html").text.split())
    assert "Tier paper Simulated for selene (a stack)" in shown
    assert "Tier paper, simulated for selene (a stack)" in shown, "as the repository's page"
    assert "Tier smoke Measured on AMD EPYC. " in shown  # on nothing else: what is invalid was not run
    assert text.index('id="paper"') < text.index('id="smoke"')


def test_what_a_record_says_is_text(site: Path) -> None:
    text = (site / "quickstart.html").read_text()
    assert "&lt;b&gt;rank 0&lt;/b&gt; &amp; others" in text
    assert "<b>rank 0" not in text


def test_a_table_or_figure_is_found_by_its_number(site: Path) -> None:
    page = pages(site)["index.html"]
    assert "paper-megatron2019.html#figure-5" in page.links
    assert {"table-1", "figure-5"} <= set(pages(site)["paper-megatron2019.html"].ids)
    assert "Verified, digitised: read off a figure" in pages(site)["paper-zero2019.html"].text
    assert "paper-zero2019.html#figure-6" in page.links, "published, without an experiment here"


def test_markup_in_a_text_is_text() -> None:
    assert "<script" not in str(markdown("<script>alert(1)</script>"))


def test_the_same_records_give_the_same_bytes_and_take_the_place_of_an_older_report(
    site: Path, results: Path, few: None, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    (again / "report.json").write_text(json.dumps({report_pages.KIND: 1}))
    (again / "left_over.html").write_text("")
    assert "open" in call("report", "--results", results, "--out", again).output
    contents = lambda folder: {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert contents(again) == contents(site)
    assert list(tmp_path.iterdir()) == [again]


def test_a_page_has_the_findings_of_the_folder_of_records(site: Path) -> None:
    text = (site / "ours-data_parallel_scaling.html").read_text()
    assert "<p><strong>Found.</strong> Two ranks are &lt;i&gt;faster&lt;/i&gt;.</p>" in text
    assert re.search(r"<h2[^>]*>History</h2>\s*<p>They were slower.</p>", text)


def test_a_folder_with_something_else_is_left_alone(results: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path)
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path / "thesis.tex")
    (tmp_path / "report.json").write_text("[]")
    assert "is no report" in refused("report", "--results", results, "--out", tmp_path)
    assert "no records" in refused("report", "--results", tmp_path / "nowhere", "--out", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "thesis.tex"]


def test_a_report_that_is_not_finished_leaves_the_one_before(
    results: Path, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "site"
    old.mkdir()
    (old / "report.json").write_text(json.dumps({report_pages.KIND: 1}))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_pages.Report, "add", stop)
    assert call("report", "--results", results, "--out", old).status == 130
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert [path.name for path in old.iterdir()] == ["report.json"]


def test_every_experiment_has_a_page_with_or_without_records(few: None, tmp_path: Path) -> None:
    made = report_pages.Report(tmp_path, tmp_path / "missing")
    for name in experiment_ids():
        found: Experiment = load(name)
        made.add(found, [])
    manifest = made.finish()
    assert len(manifest["pages"]) > len(experiment_ids())
    assert "No records yet." in (tmp_path / "quickstart.html").read_text()
    index = Page(tmp_path / "index.html")
    assert {f"{name.replace('/', '-')}.html" for name in experiment_ids()} <= set(index.links)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_ask_nobody(browser: Any, site: Path, scheme: str) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme, offline=True)
    page = context.new_page()
    asked: list[str] = []
    failed: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path.name} is {wide} pixels wider than a phone"
        is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert is_dark == (scheme == "dark")
    assert failed == []
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:"))] == []
    context.close()


def test_a_figure_of_a_paper_takes_one_search(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "claims.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("ptd-p figure 12")
    links = page.eval_on_selector_all("#found a", "links => links.map(link => link.getAttribute('href'))")
    assert links == ["paper-ptdp2021.html#figure-12"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/paper-ptdp2021.html#figure-12")
    page.fill("#search", "no such words")
    assert page.inner_text("#found") == "nothing has all of these words"
    page.keyboard.press("Escape")
    assert page.is_hidden("#found")


def test_tables_are_sorted_by_numbers_and_filtered(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
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
    page.goto((site / "ours-data_parallel_scaling.html").as_uri())
    images = page.query_selector_all("img")
    assert images
    for image in images:
        image.scroll_into_view_if_needed()
        image.evaluate("image => image.decode()")
        shown, own = image.evaluate("image => [image.getBoundingClientRect().width, image.naturalWidth]")
        assert shown > 0.75 * own, "letters of 10 points have 10 pixels"
