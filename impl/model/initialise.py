"""Initial weights that depend on the seed and the parameter's name only, never on the layout."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from impl.model.bert import BERT, MultipleChoice
from impl.model.config import ModelConfig
from impl.model.gpt import GPT
from impl.model.layers import Trunk
from impl.model.norms import ALPHA
from impl.model.parametrization import depth_of_initial, scale
from impl.pipeline.stage import Stage
from impl.recipe import Recipe
from impl.seeding import derive
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import shards_of

SLICE = 2**15
"""Elements drawn at a time, which fit in a core's cache."""
BLOCK = 16
"""Elements that PyTorch's CPU generator turns into normal numbers together: a slice is a multiple of them, so that
drawing slice by slice gives the numbers of drawing all at once."""
STANDARD = Recipe()


def build_structure(
    config: ModelConfig,
    vocab_size: int,
    dtype: torch.dtype,
    tp: TensorParallel,
    stages: Sequence[Stage],
    *,
    recompute_core: bool = False,
    answers_choices: bool = False,
) -> GPT | BERT | MultipleChoice:
    """Return this rank's part of the model without memory for its parameters, which are on the meta device.

    Args:
        stages: those that this rank owns.
        recompute_core: compute attention's scores and their product with v again in the backward pass.
        answers_choices: BERT with a multiple-choice head in place of its usual heads.
    """
    is_bert = config.family == "bert"
    kind = {"causal": not is_bert, "token_types": 2 if is_bert else 0, "recompute_core": recompute_core}
    with torch.device("meta"):
        trunk = Trunk(config, vocab_size, tp, stages, **kind)
        if answers_choices:
            return MultipleChoice(trunk, config).to(dtype)
        if is_bert:
            return BERT(trunk, config, has_heads=any(stage.is_last for stage in stages)).to(dtype)
        return GPT(trunk).to(dtype)


class InitialWeights:
    """Megatron's initial weights of this rank's part of a model.

    Weights are normal(0, 0.02), residual projections scaled by 1/sqrt(2L), biases 0, norms' weights 1. What several
    heads share has the same weights in each. A norm placement may have another law of its own (`initial`), and the
    recipe's parametrization multiplies them.

    Source: Megatron-LM 2019, section 4.2.

    Memory: on the host, a few slices of `SLICE` elements, or of 16 rows where these are larger. Values are drawn in
    fp32 whatever the weights' type: bf16 training starts at the rounded fp32 weights.
    """

    def __init__(
        self, model: nn.Module, config: ModelConfig, seed: int, tp: TensorParallel, recipe: Recipe = STANDARD
    ) -> None:
        self.config, self.recipe, self.seed, self.part = config, recipe, seed, tp.part
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.shards = shards_of(model)

    def __call__(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Yield elements `start` to `stop` of this rank's part of a parameter, flattened, in consecutive slices."""
        if len(self.shapes[name]) == 1:
            value = ALPHA if name.endswith(".alpha") else 0.0 if name.endswith("bias") else self._scale(name)
            yield torch.full((stop - start,), value)
            return
        end = 0
        for rows in self._rows(name):
            first, end = end, end + rows.numel()
            values = rows.flatten()[max(start - first, 0) : max(stop - first, 0)]
            if len(values):
                yield values
            if end >= stop:
                return
        yield torch.zeros(stop - max(start, end))  # the vocabulary's padding

    def _rows(self, name: str) -> Iterator[Tensor]:
        """Draw the whole matrix some rows at a time; yield what this rank has of them, without padding at the end."""
        shape, shard = self.shapes[name], self.shards.get(name)
        rows, columns = shard.whole_shape(shape) if shard else shape
        factor, values = self._factor(name)
        std = self.config.init_std * (1.0 if values else factor) * self._scale(name)
        generator = torch.Generator().manual_seed(derive(self.seed, "init", name))
        step = BLOCK * max(1, SLICE // (BLOCK * columns))
        for first in range(0, max(rows - step + 1, 1), step):
            count = step if first + 2 * step <= rows else rows - first  # fewer than a block would be drawn differently
            drawn = torch.empty(count, columns).normal_(0.0, std, generator=generator)
            if values:
                drawn[max(values - first, 0) :] *= factor
            yield shard.take_rows(drawn, first, self.part) if shard else drawn

    def _scale(self, name: str) -> float:
        return scale(self.config, self.recipe, name).initial

    def _factor(self, name: str) -> tuple[float, int]:
        """Return the factor of a matrix's standard deviation by the depth, and its first row with it."""
        initial, layers = self.config.norms.initial, depth_of_initial(self.config, self.recipe)
        if name.endswith(("attention.projection.weight", ".down.weight")):
            return (1 / math.sqrt(2 * layers) if initial is None else initial(layers)), 0
        if initial is not None and name.endswith(("attention.qkv.weight", ".up.weight")):
            return initial(layers), sum(self.config.qkv_sizes[:2]) if "qkv" in name else 0  # values stand last
        return 1.0, 0
