"""How initial weights and learning rates change with width and depth: standard, or so that one rate serves all sizes.

The maximal update parametrization multiplies logits by 1 / m and what a residual block adds by 1 / d, where m and d are
a model's hidden size and layers over those of a base. AdamW's updates do not change with the scale of gradients, so
such a factor is the same as one of the initial weights and of the learning rate of what stands before it (Yang et al.
2022, lemma J.1). Both stand there: the model computes what any other does, and only its training differs.

Sources: Yang et al. 2022 (2203.03466), table 8, for the width; Dey et al. 2025 (2505.01618), table 1 with alpha 1, for
the depth. Not taken over: scores over the head size instead of its root, as heads are to keep their size, and factors
of AdamW's epsilon, which is far below the gradients' size.
"""

from typing import NamedTuple

from impl.model.config import ModelConfig
from impl.recipe import Recipe

HIDDEN = (
    "attention.qkv.weight", "attention.projection.weight", ".up.weight", ".down.weight", "token_dense.weight",
    "pooler.weight",
)  # fmt: skip
"""Matrices whose inputs and outputs both grow with the width."""
READOUTS = ("trunk.output.weight", "next_sentence.weight", "choice.weight", ".router.weight")
"""Matrices of which only the inputs do; a tied head is none, as it is the embedding too."""
LAST = {"attention": "projection", "mlp": "down"}
"""The last product of each residual block."""


class Scale(NamedTuple):
    """Factors of one parameter; a standard parametrization has 1."""

    initial: float = 1.0
    """Factor of the parameter's initial values."""
    rate: float = 1.0
    """Factor of its learning rate. Weight decay is divided by it, so that a step removes the same share of a weight."""


def scale(config: ModelConfig, recipe: Recipe, name: str) -> Scale:
    """Return the factors of the parameter with this name; 1 at the base's width and depth."""
    width = config.hidden_size / (recipe.base_hidden_size or config.hidden_size)
    depth = config.num_layers / depth_of_initial(config, recipe)
    initial = rate = 1.0
    if name.endswith(HIDDEN):
        initial, rate = width**-0.5, 1 / width
    elif name.endswith(READOUTS) or _is_before_tied_head(config, name):
        initial = rate = 1 / width
    if _ends_block(config, name):
        initial, rate = initial / depth, rate / depth
    return Scale(initial, rate)


def depth_of_initial(config: ModelConfig, recipe: Recipe) -> int:
    """Return the number of layers by which initial weights are scaled: the base's, if the depth transfers.

    Norm placements that have a law of depth of their own keep it.
    """
    return config.num_layers if config.norms.has_depth_law else recipe.base_layers or config.num_layers


def norm_before_head(config: ModelConfig) -> str:
    """Return the name of the norm whose output only the token embedding multiplies; empty if there is none."""
    if config.family == "bert":
        return "token_norm"
    if config.norms.final:
        return "trunk.final_norm"
    is_last = config.norms.mlp.sum and not config.shared_layers
    return f"trunk.layers.{config.num_layers - 1}.mlp_norms.sum" if is_last else ""


def _is_before_tied_head(config: ModelConfig, name: str) -> bool:
    return config.tied and name in {f"{norm_before_head(config)}.{end}" for end in ("weight", "bias")}


def _ends_block(config: ModelConfig, name: str) -> bool:
    """Whether a parameter is of a block's last product, or of the norm after it."""
    ends = (f".{block}_norms.output" if getattr(config.norms, block).output else f".{LAST[block]}" for block in LAST)
    return name.endswith(tuple(f"{end}.{one}" for end in ends for one in ("weight", "bias")))
