"""GPT and Llama from PyTorch's own layers, for engines that split it by themselves; whole, or one pipeline stage.

All tokens of a microbatch are one dim, as in `impl.model`. Layers are compiled and recomputed as PyTorch's
documentation does it: one by one, recomputation inside compilation, and both inside what an engine wraps around a
layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.model.layers import Norms
from impl.model.rotary import Rotary, angles, turned
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
    """Causal self-attention; queries that share a head of keys and values are beside it, so that a split is by heads.

    Shapes: [n, h] -> [n, h].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, bias = config.hidden_size, config.biases
        self.head_size, self.sharing = config.head_size, config.num_heads // config.groups
        self.rotary = Rotary.of(config)
        self.qkv, self.projection = nn.Linear(h, sum(config.qkv_sizes), bias), nn.Linear(h, h, bias)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        qkv, of_group = self.qkv(x), self.sharing + 2
        groups = qkv.view(-1, seq_len, qkv.shape[1] // (of_group * self.head_size), of_group, self.head_size)
        q, k, v = (part.flatten(2, 3) for part in groups.split((self.sharing, 1, 1), 3))
        if self.rotary is not None:
            q, k = (turned(part, *angles(seq_len, self.rotary, x.dtype, x.device)) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sharing > 1)
        return self.projection(context.transpose(1, 2).reshape(len(qkv), -1))


class MLP(nn.Module):
    """Two linear layers with a function between them, or three with a gate. Shapes: [n, h] -> [n, h]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, f, bias = config.hidden_size, config.mlp_inner, config.biases
        self.gate = nn.Linear(h, f, bias) if config.mlp == "swiglu" else None
        self.up, self.down, self.kind = nn.Linear(h, f, bias), nn.Linear(f, h, bias), config.mlp

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * up)
        if self.kind in ("relu", "squared_relu"):
            return self.down(F.relu(up) if self.kind == "relu" else F.relu(up).square())
        return self.down(F.gelu(up, approximate="tanh" if self.kind == "gelu" else "none"))


class Layer(nn.Module):
    """Transformer layer with norms of whole tokens where the placement has them."""

    def __init__(self, run: Run, index: int) -> None:
        super().__init__()
        config = run.model
        self.attention_norms = Norms(config, config.norms.attention, index, norm)
        self.mlp_norms = Norms(config, config.norms.mlp, index, norm)
        self.attention, self.mlp, self.is_parallel = Attention(config), MLP(config), config.parallel_residual
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
        y = norms.add(x, self.attention(norms.into(x), seq_len))
        return self.mlp_norms.add(y, self.mlp(self.mlp_norms.into(x if self.is_parallel else y)))


class Trunk(nn.Module):
    """Embeddings, layers and final norm of one pipeline stage."""

    def __init__(self, run: Run, vocab_size: int, stage: Stage, places: Tensor) -> None:
        super().__init__()
        config = run.model
        self.seq_len = config.seq_len
        self.tokens = nn.Embedding(vocab_size, config.hidden_size) if stage.is_first else None
        is_learned = stage.is_first and config.positions == "learned"
        self.positions = nn.Embedding(config.seq_len, config.hidden_size) if is_learned else None
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

    A gate is a matrix of its own. The output head's is `head.weight`: if tied the token embedding itself, where one
    stage has both.

    Shapes: tokens [b, s], or the previous stage's output [b s, h] -> [b s, h], of the last stage logits [b s, V].
    `places` has the position of each token in its sequence: [b s] (sequence parallel: [b s / t]).
    """

    def __init__(self, run: Run, vocab_size: int, stage: Stage, places: Tensor) -> None:
        super().__init__()
        self.trunk, self.tied = Trunk(run, vocab_size, stage, places), run.model.tied
        self.head = nn.Linear(run.model.hidden_size, vocab_size, bias=False) if stage.is_last else nn.Identity()
        self.tie()

    def tie(self) -> None:
        if self.tied and self.trunk.tokens is not None and isinstance(self.head, nn.Linear):
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
    theirs = {name: whole for name, whole in ours.items() if name != "trunk.output.weight"}
    theirs["trunk.tokens.weight"] = ours["trunk.tokens.weight"][:vocab_size]
    theirs["head.weight"] = ours["trunk.tokens.weight" if config.tied else "trunk.output.weight"][:vocab_size]
    for name, whole in ours.items():
        if ".qkv." in name:
            parts = whole.split(config.qkv_sizes)
            theirs[name] = torch.cat([part.unflatten(0, (config.groups, -1)) for part in parts], 1).flatten(0, 1)
        elif ".mlp.up." in name and config.mlp == "swiglu":
            theirs[name.replace(".up.", ".gate.")], theirs[name] = whole.chunk(2)
    return theirs
