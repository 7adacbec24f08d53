"""The parts of a transformer layer, shared by GPT and BERT."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.seeding import derive


class DropoutKey(NamedTuple):
    """Names the random numbers of one forward pass: the same key gives the same masks, on any rank and twice."""

    seed: int
    step: int
    microbatch: int
    """Index in the global batch, so that masks do not depend on the data-parallel degree."""


class Dropout(nn.Module):
    """Zeroes activations with probability `rate`, as a pure function of a key and the place in the model."""

    def __init__(self, rate: float, place: str) -> None:
        super().__init__()
        self.rate, self.place = rate, place

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        if key is None:
            raise TypeError(f"dropout at {self.place} needs a key while training")
        random = torch.Generator(x.device).manual_seed(
            derive(key.seed, "dropout", key.step, key.microbatch, self.place)
        )
        kept = torch.empty_like(x).bernoulli_(1.0 - self.rate, generator=random)
        return x * kept / (1.0 - self.rate)


class Attention(nn.Module):
    """Multi-head self-attention; `causal` hides later tokens.

    Shapes: [b, s, h] -> [b, s, h].
    """

    def __init__(self, config: ModelConfig, place: str, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = config.num_heads, causal
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.dropout, f"{place}.probabilities")

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        if self.dropout.rate == 0.0 or not self.training:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:  # the fused kernel draws its own mask, which no key would reproduce
            scores = q @ k.transpose(-2, -1) / math.sqrt(h // self.heads)
            if self.causal:
                scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool, device=x.device).tril(), -math.inf)
            context = self.dropout(scores.softmax(-1), key) @ v
        return self.projection(context.transpose(1, 2).reshape(b, s, h))


class MLP(nn.Module):
    """h -> 4h -> h with GELU in its tanh form (Megatron-LM 2019, section 3).

    Shapes: [b, s, h] -> [b, s, h].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Norms(nn.Module):
    """The norms of one residual block, those that the placement asks for: y = sum(x + output(f(input(x))))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = lambda exists: nn.LayerNorm(config.hidden_size) if exists else nn.Identity()
        self.input = norm(config.norms.input)
        self.output = norm(config.norms.output)
        self.sum = norm(config.norms.sum)


class Layer(nn.Module):
    """One transformer layer: attention and MLP, each a residual block.

    Shapes: [b, s, h] -> [b, s, h].
    """

    def __init__(self, config: ModelConfig, index: int, *, causal: bool) -> None:
        super().__init__()
        place = f"layers.{index}"
        self.attention_norms, self.mlp_norms = Norms(config), Norms(config)
        self.attention = Attention(config, f"{place}.attention", causal=causal)
        self.mlp = MLP(config)
        self.attention_dropout = Dropout(config.dropout, f"{place}.attention")
        self.mlp_dropout = Dropout(config.dropout, f"{place}.mlp")

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        norms = self.attention_norms
        change = self.attention_dropout(self.attention(norms.input(x), key), key)
        x = norms.sum(x + norms.output(change))
        norms = self.mlp_norms
        change = self.mlp_dropout(self.mlp(norms.input(x)), key)
        return norms.sum(x + norms.output(change))


class Trunk(nn.Module):
    """Token, position and (BERT) token-type embeddings, the layers, and the norms at both ends.

    Shapes: tokens [b, s] -> [b, s, h].
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, causal: bool, token_types: int = 0) -> None:
        super().__init__()
        h = config.hidden_size
        self.tokens = nn.Embedding(vocab_size, h)
        self.positions = nn.Embedding(config.seq_len, h)
        self.token_types = nn.Embedding(token_types, h) if token_types else None
        self.embedding_norm = nn.LayerNorm(h) if config.norms.embedding else nn.Identity()
        self.embedding_dropout = Dropout(config.dropout, "embedding")
        self.layers = nn.ModuleList(Layer(config, i, causal=causal) for i in range(config.num_layers))
        self.final_norm = nn.LayerNorm(h) if config.norms.final else nn.Identity()

    def forward(self, tokens: Tensor, types: Tensor | None, key: DropoutKey | None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.token_types is not None and types is not None:
            x = x + self.token_types(types)
        x = self.embedding_dropout(self.embedding_norm(x), key)
        for layer in self.layers:
            x = layer(x, key)
        return self.final_norm(x)
