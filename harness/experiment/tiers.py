"""The tiers of an experiment: how much of it is run."""

from typing import Literal, get_args

Tier = Literal["smoke", "small", "paper"]
TIERS: tuple[Tier, ...] = get_args(Tier)
