"""GPT-2: predicts every next token from the ones before it."""

from collections.abc import Sequence

from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.layers import Trunk
from impl.pipeline.stage import Stage
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.vocabulary import VocabParallelEmbedding


class GPT(nn.Module):
    """Left-to-right transformer, learned positions, token embedding as output matrix (Radford et al. 2019).

    x is the last layer's output: [n, h], sequence parallel [n / t, h].
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        tp: TensorParallel,
        stages: Sequence[Stage],
        *,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        self.trunk = Trunk(config, vocab_size, tp, stages, causal=True, recompute_core=recompute_core)

    @property
    def tokens(self) -> VocabParallelEmbedding:
        assert self.trunk.tokens is not None, "only the last stage predicts tokens"
        return self.trunk.tokens

    def logits(self, x: Tensor) -> Tensor:
        """Scores of this rank's part of the vocabulary as every next token. Shapes: x -> [n, V / t]."""
        return self.tokens.logits(self.trunk.final_norm(x), self.trunk.tp.f)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean over all positions of -log p(target), in nats. Shapes: x, [b, s] -> scalar."""
        return self.tokens.nats(self.logits(x), targets.flatten()).mean()

    def score(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of every target in nats, and whether it is the likeliest. Shapes: x, [b, s] -> [b, s], [b, s]."""
        logits = self.logits(x)
        scores = self.tokens.nats(logits, targets.flatten()), self.tokens.is_likeliest(logits, targets.flatten())
        return scores[0].view(targets.shape), scores[1].view(targets.shape)
