"""BERT: recovers masked tokens and tells whether the second segment follows the first."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.layers import DropoutKey, Trunk
from impl.tensor_parallel.conjugates import F
from impl.tensor_parallel.group import TensorParallel


class BERT(nn.Module):
    """Bidirectional transformer with masked-token and next-sentence heads (Devlin et al. 2019, section 3).

    The heads' own layers are small, and whole on every rank.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, tp: TensorParallel) -> None:
        super().__init__()
        h = config.hidden_size
        self.trunk = Trunk(config, vocab_size, tp, causal=False, token_types=2)
        self.token_dense = nn.Linear(h, h)
        self.token_norm = nn.LayerNorm(h)
        self.token_bias = nn.Parameter(torch.zeros(len(self.trunk.tokens.weight)))
        self.pooler = nn.Linear(h, h)
        self.next_sentence = nn.Linear(h, 2)
        self.shards = {"token_bias": self.trunk.tokens.shard}

    def forward(
        self, inputs: Tensor, types: Tensor, positions: Tensor, key: DropoutKey | None
    ) -> tuple[Tensor, Tensor]:
        """Scores of this rank's part of the vocabulary at the masked positions, and of (not next, next).

        Shapes: inputs, types [b, s], positions [b, k] -> [b k, V / t], [b, 2].
        """
        trunk = self.trunk
        x = trunk.tp.gather(trunk(inputs, types, key), trunk.tp.group).view(*inputs.shape, -1)
        masked = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1])).flatten(0, 1)
        masked = self.token_norm(functional.gelu(self.token_dense(masked), approximate="tanh"))
        tokens = trunk.tokens.logits(masked, F, self.token_bias)
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
        sentence = sentence if sentence.element_size() >= 4 else sentence.float()
        return self.trunk.tokens.nats(tokens, targets.flatten()).mean() + functional.cross_entropy(sentence, is_next)

    def score(self, inputs: Tensor, types: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """-log p of every masked token, in nats. Shapes: inputs, types [b, s], positions, targets [b, k] -> [b, k]."""
        tokens, _ = self(inputs, types, positions, None)
        return self.trunk.tokens.nats(tokens, targets.flatten()).view(targets.shape)
