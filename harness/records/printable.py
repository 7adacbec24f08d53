"""Text for a terminal: counts in words, and what is safe to print of records and other programs."""

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal: escape sequences and changes of text direction."""


def printable(text: str) -> str:
    """Return a text in one line, with ? for each character that would control a terminal."""
    return CONTROL.sub(lambda found: " " if found[0].isspace() else "?", text)


def several(count: int, what: str) -> str:
    """Return a count of things: `1 rank`, `2,048 ranks`."""
    return f"{count:,} {what}{'s' * (count != 1)}"
