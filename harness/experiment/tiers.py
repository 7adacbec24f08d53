"""The tiers of an experiment: amounts of work for different machines."""

from typing import Literal, get_args

Tier = Literal["smoke", "small", "paper"]
TIERS: tuple[Tier, ...] = get_args(Tier)

AT_ONCE, NEEDS_TEXT = " with `--jobs 2`", " (needs text, see docs/texts.md)"
"""Notes on the tier `small`."""


def cost(
    small: str, paper: str, *, smoke: str = "1 min", cores: str = "2 CPU cores", note: str = ""
) -> dict[Tier, str]:
    """Return the expected time of each tier, of `smoke` and `small` on these cores; `note` is about `small`."""
    return {"smoke": f"{smoke}, {cores}", "small": f"{small}, {cores}{note}", "paper": paper}
