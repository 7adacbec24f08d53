"""Tables as LaTeX."""

import re

from harness.analysis.render import Table

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$", "|": r"$|$",
    "±": r"$\pm$", "–": "--", "†": r"\dag{}", "‡": r"\ddag{}", "×": r"$\times$", "≥": r"$\geq$",
    "`": r"\textasciigrave{}", "−": "$-$",
}  # fmt: skip
MINUS, POWER = re.compile(r"(?<![\w.)-])-(?=\d)"), re.compile(r"(?<=\d)e([+-]\d+)\b")
"""Hyphen that is a minus, and the power of ten of a number."""


def escape_latex(text: str) -> str:
    escaped = "".join(LATEX.get(character, character) for character in MINUS.sub("−", text))
    return POWER.sub(lambda power: rf"$\times10^{{{int(power[1])}}}$", escaped)


def latex(table: Table) -> str:
    """Return a `table` environment with a `tabular`; it needs only the package booktabs."""

    def line(cells: list[str]) -> str:
        return "  " + " & ".join(map(escape_latex, cells)) + r" \\"

    body = [line(row) for row in table.cells]
    notes = [rf"\par\smallskip{{\footnotesize {escape_latex(note)}\par}}" for note in table.notes]
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(table.title)}}}", rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{''.join('l' if c.text else 'r' for c in table.columns)}}}", r"\toprule",
        line([c.heading for c in table.columns]), r"\midrule", *body, r"\bottomrule", r"\end{tabular}",
        *notes, r"\end{table}", "",
    ])  # fmt: skip
