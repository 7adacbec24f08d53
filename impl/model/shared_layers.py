"""Layers that all have one layer's weights; for models with `shared_layers`.

Source: ALBERT, Lan et al. 2019 (1909.11942), section 3.1; M6-10T, Lin et al. 2021 (2110.03888): the "pseudo" model of
pseudo-to-real training.
"""

from torch import nn

from impl.tensor_parallel.vocabulary import added_weights


def share(first: nn.Module, *others: nn.Module) -> None:
    """Give layers the first one's parts that have parameters, under whose names these then are.

    What depends on a layer's place stays its own: its dropout masks and the factor of its norms.
    """
    for name, part in [*first.named_modules()]:
        for other in others if any(True for _ in part.parameters(recurse=False)) else ():
            other.set_submodule(name, part)


def arrivals(layer: nn.Module, layers: int, *, recomputed: bool, adds: bool) -> dict[nn.Parameter, int]:
    """Return how many gradients a parameter of all layers receives in a backward pass, where it is one of each layer.

    Autograd adds up those of one graph, which recomputed layers are not.

    Args:
        adds: products add their weights' gradients themselves.
    """
    return dict.fromkeys(layer.parameters() if recomputed else added_weights(layer) if adds else (), layers)
