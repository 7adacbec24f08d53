"""AxoNN's grid of tensor-parallel ranks, of which x divide heads and y the hidden features that Megatron's all have.

Each rank has the block of every matrix where its parts of rows and columns meet. A product's results are summed over
the ranks that divide its inputs, and its input's gradient over those that divide its results. The next product has both
exchanged, so that nothing else is sent: between blocks a rank has [n, h / y], within them [n, 3 h / x] and [n, f / x].
Norms exchange statistics over y, logits are summed over y, and with y of 1 all is Megatron's.

AxoNN's third axis z has other tokens, and divides each block of a matrix, which it gathers before the forward pass and
again before the backward pass, and scatters the sum of its gradients: that is ZeRO's stage 3 with groups of z ranks,
which divides all other parameters too.

Source: Singh et al. 2023 (2305.13525), abstract, and its code, `Linear` in `axonn/intra_layer/fully_connected.py` of
axonn-ai/axonn at 0b6328c: there a layer's inputs are over X and its outputs over Y, or the other way round if it is
`transpose`; here they are over y and x in the first product of a block.
Imported by runs with `plan.tp3` and y above 1, and by checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.dropout import Dropout, DropoutKey
from impl.model.layers import Trunk
from impl.model.norms import SplitNorm
from impl.model.shared_layers import share
from impl.tensor_parallel.conjugates import F, Pair
from impl.tensor_parallel.group import Part, TensorParallel
from impl.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from impl.tensor_parallel.shards import Shard
from impl.tensor_parallel.vocabulary import VocabParallelEmbedding


@dataclass(frozen=True)
class GridShard:
    """Split of a parameter over a grid, as `Shard`, of which a rank knows its own parts; None: all of an axis have it.

    Shapes: whole [r, c], on a rank [r / x, c / y] or [r / y, c / x].
    """

    over_x: Shard | None
    over_y: Shard | None
    parts: tuple[Part, Part]
    """This rank's part along x, and along y."""

    @property
    def over_heads(self) -> bool:
        return self.over_x is not None

    @property
    def splits(self) -> list[tuple[Shard, Part]]:
        """Splits along one dim each, with the rank's part of it."""
        both = zip((self.over_x, self.over_y), self.parts, strict=True)
        return [(shard, part) for shard, part in both if shard is not None]

    def take(self, whole: Tensor, part: Part) -> Tensor:
        """Return this rank's part of the whole parameter."""
        for shard, own in self.splits:
            whole = shard.take(whole, own)
        return whole

    def take_rows(self, rows: Tensor, first: int, part: Part) -> Tensor:
        """Return this rank's part of consecutive rows, as `Shard.take_rows`."""
        for shard, own in self.splits:
            rows = shard.take_rows(rows, first, own)
        return rows

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from the parts of all x y ranks, in order."""
        x, y = (part.of for part in self.parts)
        rows = [parts[first : first + x] for first in range(0, x * y, x)]
        over_x = [self.over_x.join(row) if self.over_x else row[0] for row in rows]
        return self.over_y.join(over_x) if self.over_y else over_x[0]

    def whole_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of the whole parameter, from that of a rank's part."""
        for shard, _ in self.splits:
            shape = shard.whole_shape(shape)
        return shape


def divide_features(trunk: Trunk, config: ModelConfig, tp: TensorParallel) -> None:
    """Divide a model that was made for x ranks, without memory yet, over the hidden features too.

    Modules become those of the grid in place, as `fully_shard` of PyTorch does with its own.
    """
    y, some = across(tp), next(trunk.parameters())
    parts = tp.part, y.part
    for name, module in list(trunk.named_modules()):
        if not name.endswith(NORMS):
            _divide(module, parts, is_of_features=name.endswith("_dropout"))
        elif not isinstance(module, nn.Identity):
            with some.device:
                own: Any = SplitNorm(config, config.hidden_size, y).to(some.dtype)
            own.shards = {name: GridShard(None, shard, parts) for name, shard in own.shards.items()}
            trunk.set_submodule(name, own)
    if trunk.are_shared:  # the first layer's norms are others now
        share(*trunk.layers.values())


def _divide(module: Any, parts: tuple[Part, Part], *, is_of_features: bool) -> None:
    """Divide a module's parameters along hidden features, and give each its shard."""
    module.__class__, dims = ON_GRID.get(type(module), (type(module), {}))
    if is_of_features:
        module.__class__, module.part_of_features = OfFeatures, parts[1]
    over_x, over_y = getattr(module, "shards", {}), dict[str, Shard]()
    for name, dim in dims.items():
        if (whole := getattr(module, name)) is not None:
            over_y[name] = Shard(dim, whole.shape[dim])
            setattr(module, name, nn.Parameter(over_y[name].take(whole.detach(), parts[1])))
    module.shards = {name: GridShard(over_x.get(name), over_y.get(name), parts) for name in over_x | over_y}


def across(tp: TensorParallel) -> TensorParallel:
    """Return the ranks that divide hidden features as those of a layer that sums its results over them."""
    assert tp.features is not None
    return replace(tp, group=tp.features)


def over(pair: Pair, group: dist.ProcessGroup) -> Pair:
    """Return the pair over this group, whatever group a layer gives it."""
    return Pair(lambda x, _: pair.forward(x, group), lambda x, _: pair.backward(x, group))


class Columns(ColumnParallelLinear):
    """y = x A^T + b, of inputs that are divided over y, and outputs over x.

    Shapes: [n, in / y] -> [n, out / x], A [out / x, in / y].
    Communication: an all-reduce of the outputs over y, backward one of the inputs' gradient over x.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = across(self.tp)
        return parallel_linear(x, self.weight, self.bias, y, before=over(F, self.tp.group), after=y.g)


class Rows(RowParallelLinear):
    """y = x A^T + b, of inputs that are divided over x, and outputs over y.

    Shapes: [n, in / x] -> [n, out / y], A [out / y, in / x].
    Communication: an all-reduce of the outputs over x, backward one of the inputs' gradient over y.
    """

    def forward(self, x: Tensor) -> Tensor:
        before = over(F, across(self.tp).group)
        return parallel_linear(x, self.weight, self.bias, self.tp, before=before, after=self.tp.g)


class Vocabulary(VocabParallelEmbedding):
    """Token embedding and output head, with rows divided over x and hidden features over y.

    Shapes: weight [V / x, h / y]; tokens [n] -> [n, h / y] -> logits [n, V / x].
    Communication: an all-reduce of embeddings over x, of logits over y, and of their input's gradient over x.
    """

    def logits(self, x: Tensor, before: Pair, bias: Tensor | None = None) -> Tensor:
        y, before = across(self.tp), over(before, self.tp.group)
        return parallel_linear(x, self.weight, bias, y, before=before, after=y.g, can_wait=False)


class OfFeatures(Dropout):
    """Dropout of a rank's hidden features, with their part of serial training's mask."""

    part_of_features: Part

    def _drawn(self, rows: range, size: int, x: Tensor, key: DropoutKey) -> Tensor:
        index, of = self.part_of_features
        whole = super()._drawn(rows, size, x.new_empty(0, x.shape[1] * of), key)
        return whole.tensor_split(of, 1)[index].contiguous()  # a view would keep all of it


ON_GRID: dict[type[nn.Module], tuple[type[nn.Module], dict[str, int]]] = {
    ColumnParallelLinear: (Columns, {"weight": 1}),
    RowParallelLinear: (Rows, {"weight": 0, "bias": 0}),
    VocabParallelEmbedding: (Vocabulary, {"weight": 1}),
    nn.Embedding: (nn.Embedding, {"weight": 1}),
}
"""What modules become, and the dims of their parameters that are hidden features."""
NORMS = ("_norms.input", "_norms.output", "_norms.sum", "embedding_norm", "final_norm")
"""Ends of the names of norms over them."""
