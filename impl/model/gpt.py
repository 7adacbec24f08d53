"""GPT-2: predicts every next token from the ones before it."""

import torch.nn.functional as F
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.layers import DropoutKey, Trunk


class GPT(nn.Module):
    """Left-to-right transformer, learned positions, token embedding as output matrix (Radford et al. 2019)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.trunk = Trunk(config, vocab_size, causal=True)

    def logits(self, tokens: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Scores of every next token. Shapes: [b, s] -> [b, s, V]."""
        return F.linear(self.trunk(tokens, None, key), self.trunk.tokens.weight)

    def loss(self, inputs: Tensor, targets: Tensor, key: DropoutKey | None) -> Tensor:
        """Mean over all positions of -log p(target), in nats. Shapes: [b, s], [b, s] -> scalar."""
        return token_nats(self.logits(inputs, key), targets).mean()


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) at every position, in nats, at least in fp32. Shapes: [..., V], [...] -> [...]."""
    logits = logits if logits.element_size() >= 4 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
