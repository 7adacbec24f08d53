"""The tiers of an experiment: amounts of work for different machines."""

from typing import Literal, get_args

Tier = Literal["smoke", "small", "paper"]
TIERS: tuple[Tier, ...] = get_args(Tier)
