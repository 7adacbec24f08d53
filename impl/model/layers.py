"""The parts of a transformer layer, shared by GPT and BERT, for any tensor-parallel degree; degree 1 is serial.

n is the number of tokens b s of a microbatch, one sequence after another; of c context-parallel
ranks each has its part of every sequence, so that n is b s / c. With sequence parallelism a rank has n / t of them
between the split blocks, its part of that order: of one sequence it is Korthikanti et al.'s part of the sequence.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.dropout import Dropout, DropoutKey
from impl.model.fused_attention import attend, by_heads
from impl.model.mlp_functions import FUNCTIONS
from impl.model.norm_placement import BlockNorms
from impl.model.norms import SplitNorm, norm
from impl.model.rotary import Rotary, rotate
from impl.pipeline.stage import Stage
from impl.recompute import recompute
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, with_shared_heads
from impl.tensor_parallel.vocabulary import VocabParallelEmbedding
from impl.untraced import untraced


class Attention(nn.Module):
    """Multi-head self-attention, a part of the heads on each rank; `causal` hides later tokens.

    Keys and values may have fewer heads, each for as many query heads (Ainslie et al. 2023, 2305.13245); of fewer heads
    than ranks, `neighbours` share one. Queries and keys may be turned by their places. Norms of queries, keys and
    values are over the features of a head, with the same weights for all heads; a bias would change nothing in keys.

    With `recompute_core` only q, k and v are kept of the core, softmax(q k^T) v with its dropout, which the backward
    pass computes again: Korthikanti et al. 2022, section 5, selective recomputation.

    Shapes: [n, h] -> [n, h] (sequence parallel: [n / t, h]).
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, place: str, *, causal: bool, recompute_core: bool = False
    ) -> None:
        super().__init__()
        h = config.hidden_size
        self.heads, self.groups = config.num_heads // tp.degree, config.groups_of(tp.degree)
        self.causal, self.neighbours, self.context = causal, tp.neighbours, tp.context
        self.head_size, self.rotary = config.head_size, Rotary.of(config, tp.places)
        self.qkv = ColumnParallelLinear(h, config.qkv_sizes, tp, bias=config.biases)
        self.projection = RowParallelLinear(h, h, tp, bias=config.biases)
        norms = config.norms.attention
        self.inner = SplitNorm(config, h, tp) if norms.inner else nn.Identity()
        self.norms = nn.ModuleDict({name: norm(config, config.head_size, bias=False) for name in norms.heads})
        self.dropout = Dropout(config.scores_dropout, f"{place}.probabilities", tp.heads)
        self.recompute_core = recompute_core

    def forward(self, x: Tensor, seq_len: int, key: DropoutKey | None) -> Tensor:
        core = self._core_again if self.recompute_core else self._core
        qkv = self.qkv(x)
        if self.neighbours is not None:
            qkv = with_shared_heads(qkv, self.heads * self.head_size, self.neighbours)
        qkv = self._normalised(qkv)
        if self.rotary is not None:
            qkv = rotate(qkv, seq_len, self.heads + self.groups, self.head_size, self.rotary)
        return self.projection(self.inner(core(qkv, seq_len, key)))

    def _normalised(self, qkv: Tensor) -> Tensor:
        """Shapes: [n, (a + 2 g) d / t] -> the same."""
        if not self.norms:
            return qkv
        by_head = qkv.view(len(qkv), -1, self.head_size)
        parts = zip("qkv", by_head.split((self.heads, self.groups, self.groups), 1), strict=True)
        return torch.cat([self.norms[name](x) if name in self.norms else x for name, x in parts], 1).flatten(1)

    def _core(self, qkv: Tensor, seq_len: int, key: DropoutKey | None) -> Tensor:
        """Shapes: [n, (a + 2 g) d / t] -> [n, h / t]."""
        core = partial(self._whole_core, key=key)
        if self.context is None:
            return core(qkv, seq_len, self.heads, self.groups)
        return self.context.attend(qkv, seq_len, self.heads, self.groups, core, causal=self.causal)

    def _whole_core(self, qkv: Tensor, seq_len: int, heads: int, groups: int, key: DropoutKey | None) -> Tensor:
        """Return the core of these heads, of whole sequences. Shapes: as `attend`."""
        if self.dropout.rate == 0.0 or not self.training:
            return attend(qkv, seq_len, heads, groups, causal=self.causal)
        q, k, v = by_heads(qkv, seq_len, heads, groups)
        if heads != groups:
            k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        # the fused kernel draws its own mask, which no key would reproduce
        batch, _, length, size = q.shape
        # a mask that is added, not filled in, is not kept for the backward pass
        later = q.new_full((length, length), -math.inf).triu(1) if self.causal else q.new_zeros(1, 1)
        q, k = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
        shares = torch.baddbmm(later, q, k, alpha=size**-0.5).unflatten(0, (batch, heads)).softmax(-1)
        context = self.dropout(shares.transpose(0, 1), key).transpose(0, 1) @ v
        return context.transpose(1, 2).reshape(len(qkv), -1)

    @untraced  # a backward pass within a backward pass is not traced
    def _core_again(self, qkv: Tensor, seq_len: int, key: DropoutKey | None) -> Tensor:
        return recompute(partial(self._core, seq_len=seq_len, key=key), qkv)


class MLP(nn.Module):
    """h -> f -> h with a function between: of a GPT f is 4h, and GELU in its tanh form (Megatron-LM 2019, section 3).

    Shapes: [n, h] -> [n, h] (sequence parallel: [n / t, h]).

    Args:
        size: f of an expert, which has no biases; None: the model's.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, size: int | None = None) -> None:
        super().__init__()
        h, f, bias = config.hidden_size, size or config.mlp_inner, config.biases and size is None
        self.up = ColumnParallelLinear(h, config.outputs_of(f), tp, bias=bias)
        self.down = RowParallelLinear(f, h, tp, bias=bias)
        self.inner = SplitNorm(config, f, tp) if config.norms.mlp.inner else nn.Identity()
        self.function = FUNCTIONS[config.mlp]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.function(self.up(x))))


class Norms(nn.Module):
    """The norms and factors around one residual block: y = sum(r x + output(f(c input(x))))."""

    def __init__(
        self, config: ModelConfig, norms: BlockNorms, index: int, make: Callable[..., nn.Module] = norm
    ) -> None:
        super().__init__()
        one = lambda exists: make(config, config.hidden_size, exists=exists)
        self.input, self.output, self.sum = one(norms.input), one(norms.output), one(norms.sum)
        self.residual, self.factor = config.norms.residual(config.num_layers), config.norms.input_factor(index + 1)

    def into(self, x: Tensor) -> Tensor:
        """Return the input of the residual block's attention or MLP: c input(x)."""
        return self.input(x) if self.factor == 1.0 else self.input(x) * self.factor

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """Return the residual block's output: sum(r x + output(change))."""
        return self.sum(torch.add(self.output(change), x, alpha=self.residual))


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each a residual block, one after the other or of the same input.

    Shapes: [n, h] -> [n, h] (sequence parallel: [n / t, h]).
    Communication: f and g twice forward and twice backward.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, index: int, *, causal: bool, recompute_core: bool = False
    ) -> None:
        super().__init__()
        place, self.is_parallel = f"layers.{index}", config.parallel_residual
        self.attention_norms = Norms(config, config.norms.attention, index)
        self.mlp_norms = Norms(config, config.norms.mlp, index)
        self.attention = Attention(config, tp, f"{place}.attention", causal=causal, recompute_core=recompute_core)
        self.has_experts = config.has_experts(index)
        self.mlp = experts(config, tp) if self.has_experts else MLP(config, tp)
        self.attention_dropout = Dropout(config.dropout, f"{place}.attention", tp.rows)
        self.mlp_dropout = Dropout(config.dropout, f"{place}.mlp", tp.rows)

    def forward(self, x: Tensor, seq_len: int, key: DropoutKey | None) -> Tensor:
        norms = self.attention_norms
        y = norms.add(x, self.attention_dropout(self.attention(norms.into(x), seq_len, key), key))
        norms, x = self.mlp_norms, x if self.is_parallel else y
        mlp = partial(self.mlp, seq_len=seq_len) if self.has_experts else self.mlp
        return norms.add(y, self.mlp_dropout(mlp(norms.into(x)), key))


def experts(config: ModelConfig, tp: TensorParallel) -> Any:
    """Return the experts of a layer."""
    from impl.model.experts import Experts  # for few runs

    return Experts(config, tp)


class Block(NamedTuple):
    """A part of a stage: what is recomputed as one, and whose parameters are gathered together."""

    name: str
    """Name of the block whose parameters it has: the first layer's for layers that share weights."""
    run: Callable[[Any], Tensor]
    """Function from activations, None for a model's first block, to activations, or the head's loss or scores."""


class Trunk(nn.Module):
    """Token, position and (BERT) token-type embeddings, the layers, and the norms at both ends; what the stages need.

    Parameters have the same names whatever the stages. A first and a last stage that live apart both have the token
    embedding if it is tied. All parameters here that are whole on every tensor-parallel rank meet only the rank's own
    tokens if sequence parallel.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        tp: TensorParallel,
        stages: Sequence[Stage],
        *,
        causal: bool,
        token_types: int,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        h = config.hidden_size
        # unlike nn.Embedding(), draws no weights: on the meta device that imports the compiler, 2 s on every rank
        embedding = lambda rows: nn.Embedding.from_pretrained(torch.empty(rows, h), freeze=False)
        first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        self.tp = tp
        self.tokens = VocabParallelEmbedding(vocab_size, h, tp) if first or (last and config.tied) else None
        self.positions = embedding(config.seq_len) if first and config.positions == "learned" else None
        self.token_types = embedding(token_types) if first and token_types else None
        self.embedding_norm = norm(config, h, exists=first and config.norms.embedding)
        self.embedding_dropout = Dropout(config.dropout, "embedding", tp.rows)
        layer = partial(Layer, config, tp, causal=causal, recompute_core=recompute_core)
        self.layers = nn.ModuleDict({str(i): layer(i) for stage in stages for i in stage.layers})
        self.are_shared = config.shared_layers
        if self.are_shared:
            from impl.model.shared_layers import share  # for few runs

            share(*self.layers.values())
        self.final_norm = norm(config, h, exists=last and config.norms.final)
        self.output = VocabParallelEmbedding(vocab_size, h, tp) if last and not config.tied else None

    @property
    def head(self) -> VocabParallelEmbedding:
        """The output head: the token embedding, or where it is not tied a matrix of its own."""
        head = self.tokens if self.output is None else self.output
        assert head is not None, "only the last stage predicts tokens"
        return head

    def whole(self, x: Tensor, sequences: int) -> Tensor:
        """Return the last norm's output on every rank. Shapes: x as `blocks` gives it -> [b, s, h]."""
        x = self.tp.gather(self.final_norm(x), self.tp.group).unflatten(0, (sequences, -1))
        return x if self.tp.context is None else self.tp.context.whole(x)

    def blocks(
        self, stage: Stage, tokens: tuple[Tensor, Tensor | None] | None, seq_len: int, key: DropoutKey | None
    ) -> Iterator[Block]:
        """Yield a stage's blocks without the model's head, in order; the first stage takes tokens and (BERT) types.

        Shapes: tokens and types [b, s]; inputs and outputs [n, h] (sequence parallel: [n / t, h]).
        """
        if stage.is_first:
            assert tokens is not None
            yield Block("embedding", lambda _: self._embed(*tokens))
            yield Block("embedding_norm", lambda x: self.embedding_dropout(self.embedding_norm(x), key))
        for i in stage.layers:
            name = f"layers.{0 if self.are_shared else i}"
            yield Block(name, partial(self.layers[str(i)], seq_len=seq_len, key=key))

    def _embed(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        assert self.tokens is not None
        index, of = self.tp.tokens
        own = torch.arange(tokens.numel(), device=tokens.device).chunk(of)[index]
        x = self.tokens(tokens.flatten())
        if self.positions is not None:
            places = self.tp.places(tokens.shape[1], device=own.device)
            x = x + self.positions(places[own % len(places)])
        if self.token_types is not None and types is not None:
            x = x + self.token_types(types.flatten()[own])
        return x
