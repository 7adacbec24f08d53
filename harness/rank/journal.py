"""What one rank has measured, written down beside each checkpoint for a later try to go on from."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measured:
    """What one rank has measured so far, over all tries at the run."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    traffic: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """Steps that were behind a try when it began, of each that went on from a checkpoint."""

    @classmethod
    def read(cls, found: Any) -> "Measured | None":
        """What a file holds; None: nothing that training could go on with."""
        names = [one.name for one in dataclasses.fields(cls)]
        if not isinstance(found, dict) or set(found) != set(names):
            return None
        if not all(isinstance(found[name], dict if name in ("traffic", "seconds") else list) for name in names):
            return None
        lines = [*found["steps"], *found["evaluations"]]
        if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
            return None
        return cls(**found) if [line["step"] for line in found["steps"]] == list(range(len(found["steps"]))) else None

    def until(self, step: int) -> "Measured":
        """What of it came before a step."""
        steps = [line for line in self.steps if line["step"] < step]
        evaluations = [line for line in self.evaluations if line["step"] <= step]
        return dataclasses.replace(self, steps=steps, evaluations=evaluations)


class DamagedError(RuntimeError):
    """What was to be gone on from is damaged, and out of the way now: another try begins anew."""
