"""The buckets that a rank's parameters lie in, and how much of each the rank keeps."""

from dataclasses import dataclass

from impl.cost.parameters import named_parameters
from impl.cost.traffic import Place
from impl.zero import partition
from impl.zero.partition import divisions, lay_out, owners


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters, as one of the ranks that divide them has them; counts are of elements."""

    layout: partition.Bucket
    unit: str
    """The part of the model that is gathered at once, at stage 3; else all of it, which has no name."""
    zero_stage: int
    """0 where no other rank shares the bucket."""

    @property
    def weights(self) -> int:
        return self.layout.slice_size if self.zero_stage == 3 else self.layout.size

    @property
    def gradients(self) -> int:
        return self.layout.slice_size if self.zero_stage >= 2 else self.layout.size

    @property
    def updated(self) -> int:
        """What the rank has moments of."""
        return self.layout.slice_size if self.zero_stage else self.layout.size

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.layout.slots]


def buckets(place: Place, gradient_size: int) -> list[Bucket]:
    """All of a rank's parameters.

    Args:
        gradient_size: bytes of a gradient's element, of which `plan.bucket_bytes` make up a bucket.
    """
    run, plan = place.run, place.run.plan
    named = named_parameters(run.model, place.vocab_size, plan.tp, place.stages)
    sizes = {parameter.name: parameter.size for parameter in named}
    is_tied = place.is_first != place.is_last
    found: list[Bucket] = []
    for (unit, kind), names in divisions([(p.name, p.is_split) for p in named], plan, is_tied=is_tied).items():
        ranks = owners(kind, plan) if plan.zero_stage else 1
        layouts = lay_out([(name, sizes[name]) for name in names], ranks, plan.bucket_bytes // gradient_size)
        found += [Bucket(layout, unit, plan.zero_stage if ranks > 1 else 0) for layout in layouts]
    return found
