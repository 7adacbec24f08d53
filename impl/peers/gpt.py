"""GPT from PyTorch's own layers, for engines that split it by themselves; whole, or one pipeline stage.

All tokens of a microbatch are one dim, as in `impl.model`. Layers are compiled and recomputed as PyTorch's
documentation does it: one by one, recomputation inside compilation, and both inside what an engine wraps around a
layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from impl.model.config import ModelConfig
from impl.model.initialise import build_model
from impl.model.layers import Norms
from impl.pipeline.stage import Stage, split
from impl.plan import AXES
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from impl.train import WEIGHTS


def norm(config: ModelConfig, size: int, *, exists: bool) -> nn.Module:
    """Return PyTorch's own norm over `size` features, or the identity where none exists."""
    if not exists:
        return nn.Identity()
    return (nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm)(size, eps=config.norm_epsilon)


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values of one head are adjacent, so that a split is by heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.head_size = h // config.num_heads
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        qkv = self.qkv(x)
        q, k, v = qkv.view(-1, seq_len, qkv.shape[1] // (3 * self.head_size), 3, self.head_size).permute(3, 0, 2, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(context.transpose(1, 2).reshape(len(qkv), -1))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """Transformer layer with norms of whole tokens where the placement has them."""

    def __init__(self, run: Run, index: int) -> None:
        super().__init__()
        config = run.model
        self.attention_norms = Norms(config, config.norms.attention, index, norm)
        self.mlp_norms = Norms(config, config.norms.mlp, index, norm)
        self.attention, self.mlp = Attention(config), MLP(config)
        self.pass_through = self.recomputed if run.plan.recompute == "full" else self.compute
        if run.compile:
            self.pass_through = torch.compile(self.pass_through)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        return self.pass_through(x, seq_len)

    def recomputed(self, x: Tensor, seq_len: int) -> Tensor:
        out = checkpoint(self.compute, x, seq_len, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out

    def compute(self, x: Tensor, seq_len: int) -> Tensor:
        norms = self.attention_norms
        x = norms.add(x, self.attention(norms.into(x), seq_len))
        return self.mlp_norms.add(x, self.mlp(self.mlp_norms.into(x)))


class Trunk(nn.Module):
    """Embeddings, layers and final norm of one pipeline stage."""

    def __init__(self, run: Run, vocab_size: int, stage: Stage, places: Tensor) -> None:
        super().__init__()
        config = run.model
        self.seq_len = config.seq_len
        self.tokens = nn.Embedding(vocab_size, config.hidden_size) if stage.is_first else None
        self.positions = nn.Embedding(config.seq_len, config.hidden_size) if stage.is_first else None
        norm_if = lambda exists: norm(config, config.hidden_size, exists=exists)
        self.embedding_norm = norm_if(stage.is_first and config.norms.embedding)
        self.layers = nn.ModuleDict({str(i): Layer(run, i) for i in stage.layers})
        self.final_norm = norm_if(stage.is_last and config.norms.final)
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x.flatten())
        if self.positions is not None:
            x = x + self.positions(self.places)
        x = self.embedding_norm(x)
        for layer in self.layers.values():
            x = layer(x, self.seq_len)
        return self.final_norm(x)


class GPT(nn.Module):
    """GPT with the parameter names and whole shapes of `impl.model.gpt.GPT`; rows of a qkv matrix are in another order.

    The output head's matrix is `head.weight`, the token embedding itself where one stage has both.

    Shapes: tokens [b, s], or the previous stage's output [b s, h] -> [b s, h], of the last stage logits [b s, V].
    `places` has the position of each token in its sequence: [b s] (sequence parallel: [b s / t]).
    """

    def __init__(self, run: Run, vocab_size: int, stage: Stage, places: Tensor) -> None:
        super().__init__()
        self.trunk = Trunk(run, vocab_size, stage, places)
        self.head = nn.Linear(run.model.hidden_size, vocab_size, bias=False) if stage.is_last else nn.Identity()
        self.tie()

    def tie(self) -> None:
        if self.trunk.tokens is not None and isinstance(self.head, nn.Linear):
            self.head.weight = self.trunk.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def places(run: Run) -> Tensor:
    """Return the position in its sequence of every token of a microbatch."""
    return torch.arange(run.train.microbatch * run.model.seq_len) % run.model.seq_len


def whole_model(run: Run, vocab_size: int, mesh: DeviceMesh, here: Tensor | None = None) -> GPT:
    """Return the whole model with its initial weights, on every rank.

    Args:
        here: places of the tokens whose norms are computed here; None: of all.
    """
    (all_layers,) = split(run.model, vocab_size, 1)
    model = GPT(run, vocab_size, all_layers, places(run) if here is None else here).to(WEIGHTS[run.precision])
    model.load_state_dict(initial_weights(run, vocab_size, mesh))
    return model


def initial_weights(run: Run, vocab_size: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the initial weights of the serial `impl.model` GPT, under this model's names."""
    axis = next(axis for axis in AXES if mesh[axis].size() == 1)
    alone = TensorParallel(mesh.get_group(axis), sequence_parallel=False, overlap=False)
    whole = split(run.model, vocab_size, 1)
    ours = build_model(run.model, vocab_size, run.seed, WEIGHTS[run.precision], alone, whole)
    return rearranged(ours.state_dict(), run.model, vocab_size)


def rearranged(ours: dict[str, Tensor], config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of the serial `impl.model` GPT in this model's order, without padded vocabulary."""
    embedding = ours["trunk.tokens.weight"][:vocab_size]
    theirs = {**ours, "trunk.tokens.weight": embedding, "head.weight": embedding}
    for name, whole in ours.items():
        if ".qkv." in name:
            theirs[name] = whole.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return theirs
