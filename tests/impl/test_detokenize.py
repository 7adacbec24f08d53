"""The rules that make WikiText's word-tokenised text look natural."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.detokenize import detokenize, is_word_tokenised

TOKENS = ["@-@", "@,@", "@.@", '"', "'", "'s", "=", "(", ")", ",", ".", ":", "–", "—", "/", "$", "%", "’", "°"]


@pytest.mark.parametrize(
    ("tokenised", "natural"),
    [
        (" A well @-@ known , once @-@ in @-@ a @-@ while case . \n", "A well-known, once-in-a-while case.\n"),
        (" It cost $ 1 @,@ 234 @.@ 5 ( or 7 % more ) ; why ? \n", "It cost $1,234.5 (or 7% more); why?\n"),
        (' She said : " I don \'t , " and " go ! " then left . ', 'She said: "I don\'t," and "go!" then left.'),
        (" The dogs ' owner 's ' big ' house [ sic ] . ", "The dogs' owner's 'big' house [sic]."),
        (" don ’ t and players ’ shirts ", "don’t and players’ shirts"),
        (" from 1914 – 18 , at 10 : 30 ; east – west \n", "from 1914–18, at 10:30; east – west\n"),
        (" 90 km / h at 20 ° C , 30 ° slope — steep ", "90 km/h at 20°C, 30° slope—steep"),
        (" \n = Red @-@ ink = \n \n = = Early years = = \n", "\n= Red-ink =\n\n== Early years ==\n"),
        (" a = b and <unk> . ", "a = b and <unk>."),
        ('Natural text, don\'t touch (it) "at all".\n', 'Natural text, don\'t touch (it) "at all".\n'),
        ("", ""),
    ],
)
def test_samples(tokenised: str, natural: str) -> None:
    assert detokenize(tokenised) == natural


@given(st.lists(st.sampled_from([*TOKENS, "word", "Ships", "12", "\n", "@"]), max_size=30))
def test_only_spaces_and_marks_vanish_and_lines_stay(words: list[str]) -> None:
    text = " ".join(words)
    natural = detokenize(text)
    kept = lambda t: re.sub("[ @]", "", t)
    assert kept(natural) == kept(text)
    assert natural.count("\n") == text.count("\n")


def test_word_tokenised_is_told_by_the_marks() -> None:
    assert is_word_tokenised(" a guest @-@ star \n")
    assert is_word_tokenised("the <unk>\n")
    assert not is_word_tokenised("mail me@-@ or , say , <unknown>\n")
