"""GPT-2: predicts every next token from the ones before it."""

from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.layers import DropoutKey, Trunk
from impl.tensor_parallel.group import TensorParallel


class GPT(nn.Module):
    """Left-to-right transformer, learned positions, token embedding as output matrix (Radford et al. 2019)."""

    def __init__(self, config: ModelConfig, vocab_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.trunk = Trunk(config, vocab_size, tp, causal=True)

    def logits(self, tokens: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Scores of this rank's part of the vocabulary as every next token. Shapes: [b, s] -> [n, V / t]."""
        return self.trunk.tokens.logits(self.trunk(tokens, None, key), self.trunk.tp.f)

    def loss(self, inputs: Tensor, targets: Tensor, key: DropoutKey | None) -> Tensor:
        """Mean over all positions of -log p(target), in nats. Shapes: [b, s], [b, s] -> scalar."""
        return self.trunk.tokens.nats(self.logits(inputs, key), targets.flatten()).mean()

    def score(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of every target in nats, and whether it is the likeliest token. Shapes: [b, s] -> [b, s], [b, s]."""
        logits, tokens = self.logits(inputs), self.trunk.tokens
        scores = tokens.nats(logits, targets.flatten()), tokens.is_likeliest(logits, targets.flatten())
        return scores[0].view(targets.shape), scores[1].view(targets.shape)
