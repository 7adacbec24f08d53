"""Text of records and of other programs, made safe for a terminal."""

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that change how a terminal shows what follows: escape sequences, and the direction of text."""


def printable(text: str) -> str:
    """A text of a record, a rank or another program in one line, with ? for what would control a terminal."""
    return CONTROL.sub(lambda found: " " if found[0].isspace() else "?", text)
