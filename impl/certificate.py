"""Hashes of a rank's losses, gradients and weights, by which two trainings are compared bit for bit."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from impl.train import Step, Trainer

ELEMENTS = 2**17
"""Elements that are copied to the host and hashed at a time."""
Numbers = tuple[str, float | None, float | None]
"""BLAKE2b of a tensor's bytes, its norm and its sum; None where that is not finite."""


class StepHashes:
    """Hashes of each of a trainer's steps: of its gradient, complete but not clipped yet, and of the new weights.

    Each rank hashes what it updates, whole parameters or its slices of them, in the precision of accumulated gradients
    and of master weights. Nothing is sent, and nothing is written that training reads.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._places = [(bucket, bucket.places()) for bucket in trainer.buckets]
        self._gradient: list[Numbers] = []
        trainer.on_gradient = self._hash_gradient

    @property
    def pieces(self) -> list[tuple[str, int, int]]:
        """Parts of parameters in the order of all hashes: name, first element and end in this rank's parameter."""
        return [(piece.name, piece.start, piece.stop) for _, places in self._places for piece in places]

    def _hash_gradient(self) -> None:
        self._gradient = [numbers(bucket.gradient[at]) for bucket, places in self._places for at in places.values()]

    def of(self, step: Step) -> dict[str, Any]:
        """Return the hashes of the step that the trainer has just done, ready for JSON."""
        masters = self.trainer.optimizer.masters[::-1]
        for bucket, _ in self._places:
            self.trainer.parameters.settle(bucket)  # of what is being gathered a master weight may be a part
        weight = [
            numbers(whole[at]) for whole, (_, of) in zip(masters, self._places, strict=True) for at in of.values()
        ]
        return {"loss": float(step.loss.item()).hex(), "gradient": self._gradient, "weight": weight}


def numbers(tensor: Tensor) -> Numbers:
    """Return hash, norm and sum of a tensor; both numbers in fp64."""
    digest, square, total = hashlib.blake2b(digest_size=8), 0.0, 0.0
    for part in tensor.detach().flatten().split(ELEMENTS):
        host = part.cpu()
        digest.update(host.view(torch.uint8).numpy().tobytes())
        wide = host.double()
        square, total = square + wide.dot(wide).item(), total + wide.sum().item()
    finite = [value if math.isfinite(value) else None for value in (math.sqrt(square), total)]
    return digest.hexdigest(), finite[0], finite[1]
