"""Where norms stand in a transformer, as data: everything that depends on them follows from one entry of PLACEMENTS.

A residual block computes y = N_sum(r x + N_output(f(c N_input(x)))), where the last product of f takes N_inner of what
comes before it; attention may normalise queries, keys and values of every head. r and c are numbers that depend on the
depth. Which function N is, `ModelConfig.norm` says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BlockNorms:
    """Norms of one residual block, attention or MLP."""

    input: bool = False
    output: bool = False
    sum: bool = False
    inner: bool = False
    """Norm before the block's last product, over features that tensor-parallel ranks divide."""
    heads: str = ""
    """Attention only: which of `qkv` have a norm over the features of each head, with one weight for all heads."""

    @property
    def of_tokens(self) -> int:
        """Number of norms over all h features of a token."""
        return self.input + self.output + self.sum


@dataclass(frozen=True, kw_only=True)
class NormPlacement:
    """Norms of a layer's two residual blocks and of the model's two ends, with the factors that belong to them."""

    attention: BlockNorms = BlockNorms()
    mlp: BlockNorms = BlockNorms()
    embedding: bool = False
    final: bool = False
    residual: Callable[[int], float] = lambda _: 1.0
    """Function of the number of layers that returns r, the factor of the residual."""
    input_factor: Callable[[int], float] = lambda _: 1.0
    """Function of a layer's number, from 1, that returns c, the factor of its blocks' inputs after their norms."""
    initial: Callable[[int], float] | None = None
    """Function of the number of layers that returns the factor of the initial weights of values, projections and MLPs;
    None: Megatron-LM's 1 / sqrt(2 L) of the residual projections."""

    @property
    def of_tokens(self) -> int:
        """Number of a layer's norms over all h features of a token."""
        return self.attention.of_tokens + self.mlp.of_tokens

    @property
    def has_depth_law(self) -> bool:
        """Whether a factor here depends on the depth."""
        return self.initial is not None or self.residual(2) != 1.0 or self.input_factor(2) != 1.0


def _both(*, embedding: bool = False, final: bool = False, heads: str = "", **norms: Any) -> dict[str, Any]:
    """Return the fields of a placement with the same norms in both blocks."""
    mlp = BlockNorms(**norms)
    attention = replace(mlp, heads=heads)
    return {"attention": attention, "mlp": mlp, "embedding": embedding, "final": final}


PLACEMENTS = {
    # Radford et al. 2019; Megatron-LM 2019, figure 7 (b)
    "pre": NormPlacement(**_both(input=True, final=True)),
    # Vaswani et al. 2017, Devlin et al. 2019; Megatron-LM 2019, figure 7 (a)
    "post": NormPlacement(**_both(sum=True, embedding=True)),
    # CogView, Ding et al. 2021 (2105.13290), section 2.4
    "sandwich": NormPlacement(**_both(input=True, output=True, final=True)),
    # Peri-LN, Kim et al. 2025 (2502.02732): as sandwich, with the embedding's norm
    "peri": NormPlacement(**_both(input=True, output=True, embedding=True, final=True)),
    # OLMo 2, 2024 (2501.00656), section 3: outputs, queries and keys; theirs takes all heads of a token together
    "olmo2": NormPlacement(**_both(output=True, heads="qk", final=True)),
    # Dehghani et al. 2023 (2302.05442), section 2.1: pre, with norms of queries and keys
    "qk": NormPlacement(**_both(input=True, heads="qk", final=True)),
    # DeepNorm, Wang et al. 2022 (2203.00555), figure 2, decoder only
    "deepnorm": NormPlacement(
        **_both(sum=True, embedding=True),
        residual=lambda layers: (2 * layers) ** 0.25,
        initial=lambda layers: (8 * layers) ** -0.25,
    ),
    # sub-LN, Magneto, Wang et al. 2022 (2210.06423), figure 2, decoder only
    "sub": NormPlacement(
        **_both(input=True, inner=True, final=True), initial=lambda layers: math.sqrt(math.log(2 * layers))
    ),
    # LayerNorm scaling, Sun et al. 2025 (2502.05795), equation 5
    "scaled": NormPlacement(**_both(input=True, final=True), input_factor=lambda layer: layer**-0.5),
    # HybridNorm, Zhuo et al. 2025 (2503.04598), section 3: queries, keys and values; the MLP's input, on the sum
    "hybrid": NormPlacement(attention=BlockNorms(sum=True, heads="qkv"), final=True),
    "without": NormPlacement(),
}


def placement(name: str) -> NormPlacement:
    """Return the placement of a name: one of PLACEMENTS, or of a user's own.

    Raises:
        InputError: it is of a user's own, and not trusted, or cannot be loaded.
    """
    if name in PLACEMENTS:
        return PLACEMENTS[name]
    from impl.own_code import load  # for few runs

    return load("model.norm_placement", name, PLACEMENTS, _require)


def order_of(name: str) -> int:
    """Return the place of a placement among all others: one of a user's own is after those of PLACEMENTS."""
    return (*PLACEMENTS, name).index(name)


def _require(found: object) -> None:
    if not isinstance(found, NormPlacement):
        raise TypeError(f"it is of type {type(found).__name__}; valid: a NormPlacement")
    sum(law(2) for law in (found.residual, found.input_factor, found.initial or float))  # a law that fails does so here
