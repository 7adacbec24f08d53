"""Which text is trained on."""

from pydantic.dataclasses import dataclass

from impl.fields import CHECKED

SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DataConfig:
    """A token folder, as written by `prepare`, or the embedded synthetic language."""

    dataset: str = SYNTHETIC
    """Path of a token folder, or `synthetic`."""
