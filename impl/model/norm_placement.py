"""Where LayerNorm stands in a transformer, as data.

A residual block computes y = N_sum(x + N_out(f(N_in(x)))); a placement says which of the three norms exist,
and whether one follows the embedding and one the last block. A new placement is one more line here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NormPlacement:
    """Which norms exist: inside each residual block (`input`, `output`, `sum`) and at the model's two ends."""

    input: bool = False
    output: bool = False
    sum: bool = False
    embedding: bool = False
    final: bool = False

    @property
    def norms_per_block(self) -> int:
        """Norms in one residual block; a transformer layer has two blocks, attention and MLP."""
        return self.input + self.output + self.sum


PLACEMENTS = {
    # Radford et al. 2019; Megatron-LM 2019, figure 7 (b)
    "pre": NormPlacement(input=True, final=True),
    # Vaswani et al. 2017, Devlin et al. 2019; Megatron-LM 2019, figure 7 (a)
    "post": NormPlacement(sum=True, embedding=True),
    # CogView, Ding et al. 2021 (2105.13290), section 2.4
    "sandwich": NormPlacement(input=True, output=True, final=True),
}
