"""Tokenizers of published weights, as files of the library `tokenizers` describe them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from impl.data.tokenizer import EngineTokenizer
from impl.errors import InputError

BEFORE_SPACES = re.compile(r"(?<=\S)(?= \s*\S)")
"""Where no word ends of a splitting that leaves newlines with the punctuation before them, as Llama 3's does."""
PROBE = "It's 12 345,678 ab.\n\n  cd;\t(ef) \u00e9t\u00e9 \u65e5\u672c \U0001f600\n gh -- ij  kl 'mn'. \n\nop"
"""Text by whose pieces is found whether a tokenizer allows that, and whether a text comes back as it was."""


class LibraryTokenizer(EngineTokenizer):
    """Tokenizer that a `tokenizer.json` of the library `tokenizers` describes: Llama's, GPT-NeoX's, BERT's.

    What such a file puts around a text, as a token where it begins, is left out. A text comes back as far as the
    file lets it: BERT's has lost case and spaces.

    Raises:
        InputError: the file describes no tokenizer, or the vocabulary lacks the token that ends a document.
    """

    def __init__(self, described: Mapping[str, Any], end: str) -> None:
        from tokenizers import Tokenizer as Engine

        self._described, self._end = {**described, "truncation": None, "padding": None}, end
        try:
            self._engine = Engine.from_str(json.dumps(self._described))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"tokenizer.json describes no tokenizer: {error}") from None
        ids = self._engine.get_vocab(with_added_tokens=True)
        if end not in ids:
            raise InputError(f"{end!r}, which is to end documents, is not in the vocabulary of tokenizer.json")
        self._engine.encode_special_tokens = True  # as the text that they are
        self.name, self.vocab_size, self.eot = type(self._engine.model).__name__, max(ids.values()) + 1, ids[end]
        whole, *parts = self.encode_batch([PROBE, *BEFORE_SPACES.split(PROBE)])
        self.cuts = BEFORE_SPACES if np.array_equal(np.concatenate(parts), whole) else None
        self.is_exact = self.decode(whole) == PROBE

    def _content(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "end": self._end, "file": self._described}
