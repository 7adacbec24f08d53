"""Configuration of the training text."""

from pydantic.dataclasses import dataclass

from impl.fields import CHECKED

SYNTHETIC, PROTEINS = EMBEDDED = ("synthetic", "synthetic-proteins")
"""Data sets that need no file: a language of words (`impl.data.synthetic`), and sequences (`impl.data.proteins`)."""
OPTIONS = 4
"""To choose from in each of RACE's questions: a sequence each."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DataConfig:
    """Text to train and validate on: a token folder, as `prepare` writes it, or an embedded synthetic language."""

    dataset: str = SYNTHETIC
    """Path of a token folder, or `synthetic`, or `synthetic-proteins`: families of sequences of amino acids."""
    race: str | None = None
    """RACE, to train on its questions instead of the text, in the token folder's tokenizer: a folder in RACE's own
    layout, hf:NAME[:CONFIG] from the hub, or `synthetic`, generated in the synthetic language."""
