"""Texts that the committed records were trained and evaluated on; none is part of the repository."""

from typing import NamedTuple

from impl.run import Run


class Text(NamedTuple):
    """Text that experiments name by its path."""

    what: str
    source: str
    licence: str
    sha256: str
    """Hash of the file; for a token folder, the hash in its records' `resolved.data.sha256`."""


BOOKS = "223 books in English to train on, 6 by other authors to validate on (books.csv lists them), tokenised by"
CLASSICS = "github.com/mlschmitt/classic-books-markdown"
KNOWN = {
    "data/books-byte": Text(
        f"{BOOKS} byte", CLASSICS, "public domain", "9b12d5649058ecdd3c0df08a4f359dac4f39b1b66429e5d814049cb3edbc558f"
    ),
    "data/books-bpe2k": Text(
        f"{BOOKS} bpe:2048",
        CLASSICS,
        "public domain",
        "ad410640931d7a31b6bbc06cd4f17a7df4d8747ada06a231dbb903f758cc0099",
    ),
    "data/books.test.txt": Text(
        "the last four of the six books to validate on, with an empty line between them",
        CLASSICS,
        "public domain",
        "491b54e0e57530d987ca68ea724f4e7befaecf7d3864f1e36cecb89d1a190bb7",
    ),
    "data/wikitext2.test.txt": Text(
        "test split of WikiText-2, word-tokenised as published",
        "github.com/pytorch/examples, word_language_model/data/wikitext-2/test.txt",
        "CC BY-SA",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    ),
    "data/lambada_test.jsonl": Text(
        "LAMBADA's 5,153 test passages, one a line in the field `text`",
        "github.com/cybertronai/bflm, lambada_test.jsonl",
        "CC BY 4.0",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    ),
}
"""Texts by their path in experiments; docs/texts.md shows them and how to get them."""


def read_by(run: Run) -> list[str]:
    """Return the paths of the known texts that a run reads."""
    paths = (run.data.dataset, *run.evaluation.texts, *filter(None, [run.evaluation.lambada]))
    return [path for path in paths if path in KNOWN]


def substitute(run: Run) -> str:
    """Return, as a sentence, what to do if the text that a run trains on is missing."""
    if run.evaluation.texts or run.evaluation.lambada:
        return "--tier smoke needs no text"
    return "--data synthetic trains on the embedded language instead"


def where_from(path: str) -> str:
    """Return, as a sentence, the name and origin of a missing text; empty for an unknown one."""
    if (text := KNOWN.get(path)) is None:
        return ""
    return f"; it is {text.what}, from {text.source} ({text.licence}): see docs/texts.md in the repository"
