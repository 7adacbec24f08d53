"""BERT: recovers masked tokens, and predicts whether the second segment follows the first; or answers questions."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.data.config import OPTIONS
from impl.model.config import ModelConfig
from impl.model.layers import Trunk
from impl.model.mlp_functions import FUNCTIONS
from impl.tensor_parallel.conjugates import F


class BERT(nn.Module):
    """Bidirectional transformer with masked-token and next-sentence heads (Devlin et al. 2019, section 3).

    The heads' own layers are small, and whole on every rank. x is the last layer's output: [n, h], sequence parallel
    [n / t, h].
    """

    def __init__(self, trunk: Trunk, config: ModelConfig, *, has_heads: bool) -> None:
        super().__init__()
        h, self.trunk = config.hidden_size, trunk
        if has_heads:
            self.token_dense = nn.Linear(h, h)
            self.token_norm, self.function = nn.LayerNorm(h, config.norm_epsilon), FUNCTIONS[config.mlp]
            self.token_bias = nn.Parameter(torch.zeros(len(self.trunk.head.weight)))
            self.pooler = nn.Linear(h, h)
            self.next_sentence = nn.Linear(h, 2)
            self.shards = {"token_bias": self.trunk.head.shard}

    def heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of this rank's part of the vocabulary at the masked positions, and of (not next, next).

        Shapes: x, positions [b, k] -> [b k, V / t], [b, 2].
        """
        x = self.trunk.whole(x, len(positions))
        masked = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1])).flatten(0, 1)
        masked = self.token_norm(self.function(self.token_dense(masked)))
        tokens = self.trunk.head.logits(masked, F, self.token_bias)
        return tokens, self.next_sentence(torch.tanh(self.pooler(x[:, 0])))

    def loss(self, x: Tensor, targets: Tensor, positions: Tensor, is_next: Tensor) -> Tensor:
        """Return the mean masked-token loss plus mean next-sentence loss, in nats.

        Shapes: x, targets [b, k], is_next [b].
        """
        tokens, sentence = self.heads(x, positions)
        sentence = sentence if sentence.element_size() >= 4 else sentence.float()
        return self.trunk.head.nats(tokens, targets.flatten()).mean() + functional.cross_entropy(sentence, is_next)

    def nats(self, x: Tensor, targets: Tensor, positions: Tensor, *_: Tensor) -> Tensor:
        """Return -log p of every masked token. Shapes: x, targets, positions [b, k] -> [b, k]."""
        tokens = self.heads(x, positions)[0]
        return self.trunk.head.nats(tokens, targets.flatten()).view(targets.shape)


class MultipleChoice(nn.Module):
    """BERT whose pooled first token gives each option of a question a score (Devlin et al. 2019, section 4.4).

    Trunk and pooler have the names that they have in BERT. All is in one pipeline stage. x as in BERT.
    """

    def __init__(self, trunk: Trunk, config: ModelConfig) -> None:
        super().__init__()
        h, self.trunk = config.hidden_size, trunk
        self.pooler = nn.Linear(h, h)
        self.choice = nn.Linear(h, 1)

    def scores(self, x: Tensor, questions: int) -> Tensor:
        """Return a score of every option, one sequence each. Shapes: x -> float [b / 4, 4]."""
        x = self.trunk.whole(x, questions * OPTIONS)
        scores = self.choice(torch.tanh(self.pooler(x[:, 0]))).view(-1, OPTIONS)
        return scores if scores.element_size() >= 4 else scores.float()

    def loss(self, x: Tensor, answers: Tensor) -> Tensor:
        """Return the mean over questions of -log p(right option), in nats. Shapes: x, [b / 4] -> scalar."""
        return functional.cross_entropy(self.scores(x, len(answers)), answers)

    def nats(self, x: Tensor, answers: Tensor) -> Tensor:
        """Return -log p of every option. Shapes: x, [b / 4] -> [b / 4, 4]."""
        return -self.scores(x, len(answers)).log_softmax(-1)
