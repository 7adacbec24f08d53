"""WikiText's word-tokenised text made to look like the text that models are trained on."""

import re
from itertools import zip_longest

MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""WikiText's marks for a hyphen, comma or full stop inside a word or number."""

_CLOSING = frozenset(",.;:!?)]}%”°’")
_OPENING = frozenset("([{“$£€¥#")
_JOINING = frozenset([*MARKS, "/", "⁄", "—"])
_BETWEEN_DIGITS = frozenset(":–")
_CONTRACTED = frozenset({"s", "t", "m", "d", "ll", "re", "ve"})
_HEADING = re.compile(r"(= (?:= )*)(\S.*?)((?: =)* =)")
_WORD_TOKENISED = re.compile(r"(?:^| )(?:@[-,.]@|<unk>)(?: |$)", re.MULTILINE)


def is_word_tokenised(text: str) -> bool:
    """Return True if the text carries WikiText's marks, `@-@` and its like or `<unk>`."""
    return _WORD_TOKENISED.search(text) is not None


def detokenize(text: str) -> str:
    """Remove the spaces that word tokenisation put around punctuation, and restore headings as in a wiki.

    Nothing vanishes but spaces and the @ of WikiText's marks; lines, words and `<unk>` stay, so that splitting at
    punctuation gives the original back. Double quotes open and close by turns within a line.

    Source: Megatron-LM 2019, appendix E.1 requires such rules without printing them; these are this project's own.
    """
    return "\n".join(_line(line.strip(" ")) for line in text.split("\n"))


def _line(line: str) -> str:
    if (heading := _HEADING.fullmatch(line)) and heading[1].count("=") == heading[3].count("="):
        marks = heading[1].replace(" ", "")
        return f"{marks} {_line(heading[2])} {marks}"
    words = line.split(" ")
    is_open = {'"': False, "'": False}
    out: list[str] = []
    clings_on = True
    for before, word, after in zip_longest(["", *words[:-1]], words, words[1:], fillvalue=""):
        clings_left, clings_right = _clings(before, word, after, is_open)
        out += [MARKS.get(word, word)] if clings_on or clings_left else [" ", MARKS.get(word, word)]
        clings_on = clings_right
    return "".join(out)


def _clings(before: str, word: str, after: str, is_open: dict[str, bool]) -> tuple[bool, bool]:
    """Whether the word clings to the one before and to the one after; notes which quotes are open."""
    if word in _JOINING or (word in _BETWEEN_DIGITS and before[-1:].isdigit() and after[:1].isdigit()):
        return True, True
    if word == "'" and not is_open[word] and before.endswith("s") and before != "'s":  # dogs ' owner
        return True, False
    if word in is_open:
        is_open[word] = not is_open[word]
        return not is_open[word], is_open[word]
    if word == "’":
        return True, after in _CONTRACTED
    if word == "°":
        return True, len(after) == 1 and after.isalpha()
    return word in _CLOSING or (word.startswith("'") and len(word) > 1), word in _OPENING
