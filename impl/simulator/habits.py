"""What a system's software does in every run, whatever a plan says."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES
from impl.fields import CHECKED, Fraction
from impl.run import Run, with_fields

ShareOfMean = Annotated[float, Field(ge=1.0)]


@dataclass(frozen=True, config=CHECKED)
class Habits:
    """Values that a software gives to fields of a run that are not given; None: the run's own."""

    source: str = ""
    stages: Literal["even"] | None = None
    """Division of layers into pipeline stages; even: equal numbers; None: the head's weight is counted, as our own
    engine does."""
    dropout: Fraction | None = None
    fp32_gradients: bool | None = None
    overlap_input_grad_reduce: bool | None = None
    overlap_grad_reduce: bool | None = None
    gathers_ahead: bool = False
    """Whether ZeRO's stages 1 and 2 can gather parameters during the next step's first forward passes."""
    bucket_per_rank: PositiveInt | None = None
    """Smallest bucket of gradients in bytes for each data-parallel rank, so that a ring's parts stay large."""
    owns_tensors: bool = False
    """Whether ZeRO's stage 1 gives each tensor one owner: gradients are all-reduced, and every owner broadcasts."""
    fetches_at_ends: bool = False
    """Whether only the pipeline's first and last stage fetch microbatches, so that the others need no time for it."""
    fuses_gradients: bool = False
    """Whether the products for weight gradients add to the fp32 sum themselves."""
    routes_parts: bool = False
    """Whether a sequence-parallel rank sends its own part of the tokens to experts (`impl.simulator.routing`)."""
    imbalance: ShareOfMean | None = None
    """Rows of the fullest of the ranks that share a layer's experts, over their mean, as measured; None: as of a router
    all of whose choices are equally likely."""
    live_parameters: PositiveInt | None = None
    """Where ZeRO's stage 3 gathers and frees each matrix by itself, the gathered parameters that may wait for further
    use, and beyond which none is gathered ahead; None: whole blocks are gathered."""
    splits_products: bool = False
    """Whether sequence-parallel products are split to go on beside their collective (doi 10.1145/3567955.3567959)."""

    @property
    def fields(self) -> dict[str, bool | float]:
        """Fields of a run that the software sets, by dotted name, with its values."""
        values = {
            "model.dropout": self.dropout,
            "fp32_gradients": self.fp32_gradients,
            "plan.overlap_input_grad_reduce": self.overlap_input_grad_reduce,
            "plan.overlap_grad_reduce": self.overlap_grad_reduce,
        }
        return {name: value for name, value in values.items() if value is not None}

    def of(self, run: Run, given: Collection[str] = ()) -> Run:
        """Return the run as this software executes it.

        Args:
            given: dotted names of fields that keep the run's values.
        """
        own = {name: value for name, value in self.fields.items() if name not in given}
        if ELEMENT_BYTES[run.precision] == MASTER_BYTES[run.precision]:
            own.pop("fp32_gradients", None)
        return self.with_buckets(with_fields(run, own) if own else run, given)

    def with_buckets(self, run: Run, given: Collection[str] = ()) -> Run:
        """Return the run with buckets as large as the software makes them for its ranks, unless their size is given."""
        least = (self.bucket_per_rank or 0) * run.plan.dp
        is_set = "plan.bucket_bytes" in given or least <= run.plan.bucket_bytes
        return run if is_set else with_fields(run, {"plan.bucket_bytes": least})

    def stages_of(self, run: Run) -> Literal["even"] | None:
        """Return how stages divide layers; numbers that do not divide evenly are split as by our own engine."""
        return self.stages if run.model.num_layers % (run.plan.pp * run.plan.chunks) == 0 else None

    @staticmethod
    def changes(run: Run, done: Run) -> list[str]:
        """Return, in words, the settings of a requested run that differ in the executed one."""
        plan = run.plan
        dropout = [f"dropout {done.model.dropout:g}"] if done.model.dropout != run.model.dropout else []
        flags = [("fp32 gradients", done.fp32_gradients, run.fp32_gradients)]
        if plan.tp > 1:
            asked = plan.overlap_input_grad_reduce
            flags.append(("overlapped input gradients", done.plan.overlap_input_grad_reduce, asked))
        if plan.dp_cp > 1:
            flags.append(("overlapped gradients", done.plan.overlap_grad_reduce, plan.overlap_grad_reduce))
        return dropout + [f"{'' if own else 'no '}{name}" for name, own, asked in flags if own != asked]
