"""BERT: recovers masked tokens and tells whether the second segment follows the first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.gpt import token_nats
from impl.model.layers import DropoutKey, Trunk


class BERT(nn.Module):
    """Bidirectional transformer with masked-token and next-sentence heads (Devlin et al. 2019, section 3)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.trunk = Trunk(config, vocab_size, causal=False, token_types=2)
        self.token_dense = nn.Linear(h, h)
        self.token_norm = nn.LayerNorm(h)
        self.token_bias = nn.Parameter(torch.zeros(vocab_size))
        self.pooler = nn.Linear(h, h)
        self.next_sentence = nn.Linear(h, 2)

    def forward(
        self, inputs: Tensor, types: Tensor, positions: Tensor, key: DropoutKey | None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the tokens at the masked positions, and of (not next, next).

        Shapes: inputs, types [b, s], positions [b, k] -> [b, k, V], [b, 2].
        """
        x = self.trunk(inputs, types, key)
        masked = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        masked = self.token_norm(F.gelu(self.token_dense(masked), approximate="tanh"))
        tokens = F.linear(masked, self.trunk.tokens.weight, self.token_bias)
        return tokens, self.next_sentence(torch.tanh(self.pooler(x[:, 0])))

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        key: DropoutKey | None,
        *,
        types: Tensor,
        positions: Tensor,
        is_next: Tensor,
    ) -> Tensor:
        """Mean masked-token loss plus mean next-sentence loss, in nats. Shapes: targets [b, k], is_next [b]."""
        tokens, sentence = self(inputs, types, positions, key)
        return token_nats(tokens, targets).mean() + token_nats(sentence, is_next).mean()
