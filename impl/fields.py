"""How configuration fields are checked: one strictness for all, and the ranges that more than one of them needs."""

from typing import Annotated

from pydantic import ConfigDict, Field

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
AtLeastTwo = Annotated[int, Field(ge=2)]
