"""Windows over a text that is longer than a model's context, and the text that they score."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from impl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Windows:
    """Windows of `seq_len` targets over a text, in order; each but the first repeats `overlap` of them as context only.

    Every target is scored once; the first is predicted from the end of text that precedes any text. The last window is
    padded on the right. Only the first `limit` windows count; 0: all.

    Source: Megatron-LM 2019, appendix E.1; its o = 32 is what a window advances by, hence `overlap` = 1024 - 32 here.
    """

    tokens: np.ndarray
    eot: int
    seq_len: int
    overlap: int = 0
    limit: int = 0

    @property
    def stride(self) -> int:
        return self.seq_len - self.overlap

    @property
    def count(self) -> int:
        every = 1 + max(0, -(-(len(self.tokens) - self.seq_len) // self.stride))
        return min(every, self.limit) if self.limit else every

    @property
    def covered(self) -> int:
        """Tokens that are scored, from the first."""
        return min(len(self.tokens), self.seq_len + (self.count - 1) * self.stride)

    def cut(self, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets and which targets are scored, of the picked windows. Shapes: [b] -> [b, s] each."""
        column = np.arange(self.seq_len)
        at = picks[:, None] * self.stride + column
        is_scored = (at < len(self.tokens)) & ((picks[:, None] == 0) | (column >= self.overlap))
        at = np.minimum(at, len(self.tokens) - 1)
        inputs = np.where(at > 0, self.tokens[at - 1], self.eot)
        return inputs.astype(np.int64), np.asarray(self.tokens[at], np.int64), is_scored


def text_counts(tokenizer: Tokenizer, windows: Windows) -> tuple[int, int]:
    """Words and UTF-8 bytes of the text that the windows score, which begins where the whole text does.

    A word that the last window cuts counts as a word; a character that it cuts counts neither as a word nor in bytes.
    """
    ids, end = np.asarray(windows.tokens), windows.covered
    edges = [0, *(np.flatnonzero(ids[:end] == windows.eot) + 1), end]
    texts = [tokenizer.decode(ids[a:b][ids[a:b] != windows.eot]) for a, b in pairwise(edges)]
    if texts[-1].endswith("\ufffd"):  # the text's own, or a cut character, which the next three tokens complete
        rest = ids[end : end + 3]
        both = ids[edges[-2] : end + 3]
        if len(tokenizer.decode(both)) < len(texts[-1]) + len(tokenizer.decode(rest)):
            texts[-1] = texts[-1][:-1]
    return sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
