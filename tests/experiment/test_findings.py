"""Findings: prose whose numbers come from the tables of the results."""

import re
from pathlib import Path

import pytest

from harness.experiment import folders
from harness.experiment.findings import FILE, PLACEHOLDER, findings
from harness.experiment.folders import ARCHIVE, findings_of
from impl.errors import InputError

TABLE = """### Rates

| model     | plan   | batch | rate, simulated (samples/s) | time (ms) | time (%) | note |
| --------- | ------ | ----- | --------------------------- | --------- | -------- | ---- |
| GPT 1.7M  | tp     | 4     | 108.4 ± 3.2                 | 12        | 80       | –    |
| GPT 1.7M  | tp, sp | 4     | 99.1                        | 14        | 90       | a\\|b |
| GPT 1.7M  | tp, sp | 1,024 | 97.5                        | 15        | 95       |      |
"""
HISTORY = "## History"
MEASURED = re.compile(
    r"(?<![A-Za-z\d.])(?:\d+\.\d+(?![\dMBTK])|\d[\d,]*\s?(?:%|±|(?:times|points|[MG]i?B|ms|s|tokens|TFLOP/s)\b))"
)
"""Number that reads as measured: a decimal that is no count of parameters, or a number with a unit of results."""
PAPER = re.compile(r"\bpublished\b|\b(?:figure|table|section) [\dIVX]", re.IGNORECASE)


def typed(text: str) -> list[str]:
    """Return the sentences of a FOUND.md, its placeholders not filled, in which a measured number is typed."""
    sentences = re.split(r"(?<=[.:;])\s+", PLACEHOLDER.sub("CELL", text.partition(HISTORY)[0]))
    return [sentence for sentence in sentences if MEASURED.search(sentence) and not PAPER.search(sentence)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an experiment's folder of results with one table."""
    (tmp_path / "small/tables").mkdir(parents=True)
    (tmp_path / "small/tables/rates.md").write_text(TABLE)
    (tmp_path / "small/tables/none.md").write_text("Nothing was found.\n")
    return tmp_path


def filled(folder: Path, placeholder: str) -> str:
    """Return the cell that a placeholder in a FOUND.md stands for."""
    (folder / FILE).write_text(f"It is {{{{{placeholder}}}}}.\n")
    return findings(folder).removeprefix("It is ").removesuffix(".")


@pytest.mark.parametrize(
    ("placeholder", "cell"),
    [
        ("small/rates | plan=tp | rate, simulated", "108.4 ± 3.2"),
        ("small/rates | plan=tp | rate...", "108.4 ± 3.2"),
        ("small/rates|model=GPT 1.7M, batch=1,024|rate, simulated (samples/s)", "97.5"),
        ("small/rates | plan=tp, sp; batch=4 | rate, simulated", "99.1"),
        ("small/rates |\n  plan=tp,..., batch=4 | note", "a|b"),
        ("small/rates | plan=tp | time (%)", "80"),
    ],
)
def test_a_placeholder_is_filled_from_its_cell(folder: Path, placeholder: str, cell: str) -> None:
    assert filled(folder, placeholder) == cell


@pytest.mark.parametrize(
    ("placeholder", "reason"),
    [
        ("small/rates | plan=tp", "valid is {{TIER/TABLE"),
        ("small/none | plan=tp | rate", "no headings are 'rate'"),
        ("rates | plan=tp | rate", "valid is {{TIER/TABLE"),
        ("paper/rates | plan=tp | rate", "there is no table"),
        ("small/rates | plan=tp | speed", "no headings are 'speed'; valid: model, plan"),
        ("small/rates | schedule=tp | rate...", "no headings are 'schedule'; valid: model, plan"),
        ("small/rates | plan=tp | time", "2 headings are 'time'"),
        ("small/rates | plan=pp | rate...", "0 rows have these cells"),
        ("small/rates | model=GPT 1.7M | rate...", "3 rows have these cells"),
        ("small/rates | plan=tp | note", "the cell is empty"),
        ("small/rates | batch=1,024 | note", "the cell is empty"),
    ],
)
def test_a_wrong_placeholder_is_refused_in_one_line(folder: Path, placeholder: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        filled(folder, placeholder)
    assert reason in str(refused.value)
    assert f"{{{{{placeholder}}}}}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_findings_has_none(tmp_path: Path) -> None:
    assert not findings(tmp_path)


def test_findings_are_ones_own_else_the_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "ARCHIVE", tmp_path / "archive")
    assert not findings_of(None, "ours/one")
    for name in ("archive", "runs", "given"):
        (tmp_path / name / "ours/one").mkdir(parents=True)
        (tmp_path / name / "ours/one" / FILE).write_text(f"From {name}.\n")
    assert findings_of(None, "ours/one") == "From runs."
    assert findings_of(tmp_path / "given", "ours/one") == "From given."
    assert findings_of(tmp_path / "other", "ours/one") == "From archive."


@pytest.mark.parametrize(
    "sentence",
    [
        "It gains 8%.", "A step takes 12.5 longer.", "It is 3 ± 1.", "It is 2 times as fast.", "It is 5 points off.",
        "A rank holds 1,024 MiB.", "They take 61 GB.", "A step takes 30 ms.", "It trains 1,500 tokens/s.",
        "It reaches 3 TFLOP/s.",
    ],
)  # fmt: skip
def test_a_typed_measurement_is_found(sentence: str) -> None:
    assert typed(f"It is fast. {sentence}") == [sentence]


@pytest.mark.parametrize(
    "text",
    [
        "Models of 7.6M parameters in 4 chunks on 16 V100s with ZeRO-3, 1F1B and bf16.",
        "It gains less than the published 8%.",
        "Figure 12 has 45%.",
        "It is {{small/rates | rate=3.5% | rate}}%.",
        f"It is fast.\n\n{HISTORY}\n\nIt was 3.5% slower.",
    ],
)
def test_settings_published_numbers_placeholders_and_history_are_no_typed_measurements(text: str) -> None:
    assert not typed(text)


@pytest.mark.parametrize("path", sorted(ARCHIVE.glob(f"*/*/{FILE}")), ids=lambda path: "/".join(path.parts[-3:-1]))
def test_findings_of_the_archive_are_filled_and_no_number_is_typed(path: Path) -> None:
    text = findings(path.parent)
    assert text
    assert "{{" not in text
    assert typed(path.read_text()) == []
