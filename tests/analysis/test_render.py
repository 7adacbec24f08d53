import io
import json
import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.analysis import render
from harness.analysis.latex import latex
from harness.analysis.render import Column, Table, as_json, number, number_with_interval

COLUMNS = (
    Column(key="name", header="name", text=True),
    Column(key="time", header="time", unit="ms", si="s", scale=1e-3, interval="time_half_width"),
)
FRAME = pd.DataFrame({
    "name": ["50% a_b & c|d", "x"], "time": [1.5, math.nan], "time_half_width": [0.056, math.nan],
})  # fmt: skip
TABLE = Table("demo", "Time & space", COLUMNS, FRAME, ("n_1 < 2",))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.051234, "0.05123"), (12.3456, "12.35"), (9.99996, "10.00"), (123456.7, "123,457"), (3.0, "3"),
        (2.5e-7, "2.500e-07"),
    ],
)  # fmt: skip
def test_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (1234.4, 56.2, "1,234 ± 56"),
        (12.3456, 0.0561, "12.346 ± 0.056"),
        (12.5, 0.0, "12.50 ± 0"),
        (7.25, 1e-12, "7.250 ± 0"),
    ],
)
def test_the_interval_decides_the_decimals(value: float, half_width: float, text: str) -> None:
    assert number_with_interval(value, half_width) == text


@given(st.floats(1e-4, 1e8), st.integers(2, 6))
def test_rounding_keeps_the_asked_digits(value: float, digits: int) -> None:
    assert float(number(value, digits).replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


def test_markdown_is_aligned_and_escaped() -> None:
    lines = render.markdown(TABLE).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    assert r"c\|d" in table[2]
    assert "1,500 ± 56" in table[2]
    assert "–" in table[3]
    assert lines[0] == "### Time & space"
    assert lines[-1] == "- n_1 < 2"


def test_csv_is_raw_with_units_in_the_header() -> None:
    assert render.csv(TABLE).splitlines()[:2] == ['name,time (s),"time, 95% half-width (s)"', "50% a_b & c|d,1.5,0.056"]
    assert render.csv(TABLE).splitlines()[2] == "x,,"


def test_what_a_spreadsheet_would_calculate_is_text_in_csv() -> None:
    formulas = ["=1+1", "@SUM(A1)", "+HYPERLINK(A1)", "-cmd|'/C calc'!A1"]
    assert [render.raw(text) for text in formulas] == [f"'{text}" for text in formulas]
    harmless = ["-5, -19 and +4%", "+7% of a layer (+4%)", "a=b", "", -1.5, 3]
    assert [render.raw(value) for value in harmless] == harmless


def test_latex_escapes_and_uses_booktabs() -> None:
    text = latex(TABLE)
    assert r"50\% a\_b \& c$|$d & 1,500 $\pm$ 56 \\" in text
    assert all(rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{Time \& space}"))


def test_latex_has_minus_signs_and_powers_of_ten() -> None:
    frame = pd.DataFrame(
        {"name": ["lr=2e-05 GPT-2 ‡", "`-5, -4`"], "time": [-1.5, 2.3e-10], "time_half_width": math.nan}
    )
    text = latex(Table("demo", "t", COLUMNS, frame))
    assert r"lr=2$\times10^{-5}$ GPT-2 \ddag{} & $-$1,500 \\" in text
    assert r"\textasciigrave{}$-$5, $-$4\textasciigrave{} & 2.300$\times10^{-7}$ \\" in text
    assert text.isascii()


def test_json_is_valid_where_a_number_is_missing_or_infinite() -> None:
    frame = pd.DataFrame({"name": ["a"], "time": [math.inf], "time_half_width": [math.nan]})
    document = json.loads(json.dumps(as_json(Table("demo", "t", COLUMNS, frame)), allow_nan=False))
    assert document["rows"] == [{"name": "a", "time": "inf", "time_half_width": None}]
    assert document["columns"][1]["unit"] == "s"


def test_console_shows_title_cells_and_notes_as_they_are() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(render.console(TABLE))
    assert all(text in out.getvalue() for text in ("Time & space", "1,500 ± 56", "50% a_b & c|d", "n_1 < 2"))
