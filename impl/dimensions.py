"""Outstanding dimensions in the outputs of a model's layers, and the loss of the model without one of them.

Source: Kovaleva et al. 2021 (2105.06990) find such dimensions in the weights of BERT's output LayerNorms, the same in
most layers. Here layers' outputs are searched as well, which every norm placement has.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from impl.evaluate import Work, validation
from impl.evaluation_config import EvaluationConfig
from impl.model.norms import DyT, RMSNorm
from impl.train import Trainer

SEQUENCES = 32
"""Sequences from the validation text's beginning, the same for every run."""
DIGITS = 4
"""Significant digits that are kept of a number."""


def dimensions(trainer: Trainer, *, final: bool) -> dict[str, Any]:
    """Return statistics of the dimensions of layers' outputs and norms on a few validation sequences.

    `layers`: the root mean square of each dimension of each layer's output, over tokens. `norms`: for weight and bias
    of every norm over whole features, the furthest dimension's distance from the mean in standard deviations, and its
    index. `nats` per token there. If `final`, `zeroed`: nats without the most outstanding dimension of all layers'
    outputs together, and without an average one. Every rank evaluates the same sequences, so that all find the same.

    Communication: that of the forward passes.
    """
    layers = dict(trainer.model.trunk.layers.items())
    squares: dict[str, Tensor] = {}
    norms: dict[str, dict[str, list[float]]] = {}
    counts = dict.fromkeys(layers, 0)

    def note(name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        squares[name] = squares.get(name, 0) + output.double().square().sum(0)
        counts[name] += len(output)

    def note_norm(name: str, module: nn.Module, *_: Any) -> None:  # within the layer, where ZeRO-3 has gathered them
        norms[name] = {part: _furthest(p.double()) for part, p in module.named_parameters() if part != "alpha"}

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(note, name)))
            for within, norm in layer.named_modules():
                if isinstance(norm, nn.LayerNorm | RMSNorm | DyT):
                    hooks.enter_context(norm.register_forward_hook(partial(note_norm, f"{name}.{within}")))
        nats = _nats(trainer)
    sizes = {name: (squares[name] / counts[name]).sqrt().cpu().numpy() for name in layers}
    rounded = {name: [_rounded(size) for size in of] for name, of in sizes.items()}
    found: dict[str, Any] = {"layers": rounded, "norms": norms, "nats": nats}
    if final:
        found["zeroed"] = [[i, _without(trainer, layers.values(), i)] for i in _strongest_and_average(sizes)]
    return found


def _strongest_and_average(sizes: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return the largest and the median dimension, on average over layers, each in units of its median."""
    order = np.argsort(np.mean([of / np.median(of) for of in sizes.values()], axis=0), kind="stable")
    return int(order[-1]), int(order[len(order) // 2])


def _furthest(values: Tensor) -> list[float]:
    """Return the largest distance from the mean in standard deviations, and its index; 0 where all are equal."""
    off = (values - values.mean()).abs() / values.std().clamp(min=1e-12)
    return [_rounded(off.max().item()), int(off.argmax())]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _without(trainer: Trainer, layers: Iterable[nn.Module], dimension: int) -> float:
    """Return nats per token with one dimension of all layers' outputs set to zero."""

    def zero(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output.index_fill(1, torch.tensor([dimension], device=output.device), 0.0)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(zero))
        return _nats(trainer)


@torch.no_grad()
def _nats(trainer: Trainer) -> float:
    """Return nats per token of the validation text's first SEQUENCES; of masked tokens for BERT."""
    trainer.model.eval()
    run = replace(trainer.run, evaluation=EvaluationConfig(sequences=SEQUENCES))
    found = validation(run, trainer.data, Work(trainer, run.train.microbatch, rank=0, ranks=1))
    return found.nats / found.tokens
