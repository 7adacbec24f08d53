"""A stage's blocks, one after another."""

from torch import Tensor

from impl.model.dropout import DropoutKey
from impl.model.layers import Trunk
from impl.pipeline.stage import Stage


def through(
    trunk: Trunk,
    stage: Stage,
    x: Tensor | None,
    tokens: tuple[Tensor, Tensor | None] | None,
    seq_len: int,
    key: DropoutKey | None,
) -> Tensor:
    """What a stage makes of x, or of tokens if it is the first, up to the model's head."""
    for block in trunk.blocks(stage, tokens, seq_len, key):
        x = block.run(x)
    assert x is not None
    return x
