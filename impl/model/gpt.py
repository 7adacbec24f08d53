"""GPT-2: predicts every next token from the ones before it."""

from torch import Tensor, nn

from impl.model.layers import Trunk


class GPT(nn.Module):
    """Left-to-right transformer, learned positions, token embedding as output matrix (Radford et al. 2019).

    x is the last layer's output: [n, h], sequence parallel [n / t, h].
    """

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk

    def logits(self, x: Tensor) -> Tensor:
        """Return scores of this rank's part of the vocabulary as every next token. Shapes: x -> [n, V / t]."""
        return self.trunk.head.logits(self.trunk.final_norm(x), self.trunk.tp.f)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over all positions of -log p(target), in nats. Shapes: x, [b, s] -> scalar."""
        return self.trunk.head.nats(self.logits(x), targets.flatten()).mean()

    def score(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return -log p of every target in nats, and whether it is the likeliest.

        Shapes: x, [b, s] -> [b, s], [b, s].
        """
        logits, flat, head = self.logits(x), targets.flatten(), self.trunk.head
        scores = head.nats(logits, flat), head.is_likeliest(logits, flat)
        return scores[0].view(targets.shape), scores[1].view(targets.shape)
