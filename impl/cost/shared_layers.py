"""What the gradients of layers that all have one layer's weights do to buffers; for models with `shared_layers`."""

from collections.abc import Iterable, Sequence

from impl.cost.parameters import Parameter
from impl.cost.place import Place
from impl.pipeline.stage import Stage


def with_each_layers(names: Sequence[str], named: Iterable[Parameter], place: Place, stage: Stage) -> list[str]:
    """Return the names in the order of the backward pass, with those of the layers once for each gradient that arrives.

    Autograd adds up those of one graph, which recomputed layers are not; products add their weights' themselves.
    """
    run, adds = place.run, place.schedule.is_split or not place.run.compile
    is_added = lambda p: adds and len(p.shape) == 2 and ".router." not in p.name
    each = {p.name for p in named if run.plan.recompute == "full" or is_added(p)}
    layer = [name for name in names if name.startswith("trunk.layers.")]
    at = names.index(layer[0])
    return [*names[:at], *([name for name in layer if name in each] * (len(stage.layers) - 1)), *names[at:]]
