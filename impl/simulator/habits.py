"""Settings that a software applies in every run, whatever the run asks for."""

import dataclasses
from typing import Literal

from pydantic.dataclasses import dataclass

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES
from impl.fields import CHECKED, Fraction
from impl.run import Run


@dataclass(frozen=True, config=CHECKED)
class Habits:
    """Fields of a run as a software has them; None: as the run has them."""

    source: str = ""
    stages: Literal["even"] | None = None
    """even: as many layers in every pipeline stage; None: the head's weight is counted, as our own engine does."""
    dropout: Fraction | None = None
    fp32_gradients: bool | None = None
    overlap_input_grad_reduce: bool | None = None
    overlap_grad_reduce: bool | None = None

    def of(self, run: Run) -> Run:
        """Return the run as this software executes it."""
        overlaps = ("overlap_input_grad_reduce", "overlap_grad_reduce")
        plan = {name: getattr(self, name) for name in overlaps if getattr(self, name) is not None}
        model = {} if self.dropout is None else {"dropout": self.dropout}
        is_small = ELEMENT_BYTES[run.precision] < MASTER_BYTES[run.precision]
        own = {"fp32_gradients": self.fp32_gradients} if self.fp32_gradients is not None and is_small else {}
        changed = {"plan": dataclasses.replace(run.plan, **plan), "model": dataclasses.replace(run.model, **model)}
        return dataclasses.replace(run, **changed, **own)

    def stages_of(self, run: Run) -> Literal["even"] | None:
        """Return how layers are shared; what does not come out even is shared as our own engine does."""
        return self.stages if run.model.num_layers % (run.plan.pp * run.plan.chunks) == 0 else None

    def changes(self, run: Run) -> list[str]:
        """Return in words which settings differ from the run's."""
        done, plan = self.of(run), run.plan
        dropout = [f"dropout {done.model.dropout:g}"] if done.model.dropout != run.model.dropout else []
        flags = [("fp32 gradients", done.fp32_gradients, run.fp32_gradients)]
        if plan.tp > 1:
            asked = plan.overlap_input_grad_reduce
            flags.append(("overlapped input gradients", done.plan.overlap_input_grad_reduce, asked))
        if plan.dp > 1:
            flags.append(("overlapped gradients", done.plan.overlap_grad_reduce, plan.overlap_grad_reduce))
        return dropout + [f"{'' if own else 'no '}{name}" for name, own, asked in flags if own != asked]
