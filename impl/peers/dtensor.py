"""GPT made tensor parallel by PyTorch's own DTensor styles, as its documentation does it, at its fastest settings.

Plain `nn.Linear`, `nn.LayerNorm` and `nn.Embedding`; `parallelize_module` splits them. All tokens of a microbatch are
one dim, as in our models: sequence parallelism then gathers and scatters neighbouring rows without a copy.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from impl.collectives import all_reduce_sum
from impl.data.batches import causal_batch
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.model.initialise import build_model
from impl.optim import learning_rate
from impl.run import Run
from impl.tensor_parallel.group import TensorParallel
from impl.train import MASTERS, WEIGHTS, Step


def why_invalid(run: Run) -> str | None:
    """What this engine cannot do of a run, in one line; None: it can train it."""
    model, plan = run.model, run.plan
    missing = {
        f"model.family {model.family!r}": model.family != "gpt",
        f"model.norm_placement {model.norm_placement!r}": model.norm_placement != "pre",
        f"model.dropout {model.dropout}": model.dropout > 0,
        f"plan.dp {plan.dp}": plan.dp > 1,
        "compile": run.compile,
    }
    lacks = [name for name, is_missing in missing.items() if is_missing]
    return f"the dtensor engine has no {', '.join(lacks)}" if lacks else None


class Attention(nn.Module):
    """Causal self-attention. Queries, keys and values of one head are neighbours, so that a split is by heads."""

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
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norms = nn.ModuleDict({"input": nn.LayerNorm(config.hidden_size)})
        self.mlp_norms = nn.ModuleDict({"input": nn.LayerNorm(config.hidden_size)})
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        x = x + self.attention(self.attention_norms["input"](x), seq_len)
        return x + self.mlp(self.mlp_norms["input"](x))


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.seq_len, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tokens.flatten()) + self.positions(places)
        for layer in self.layers:
            x = layer(x, tokens.shape[1])
        return self.final_norm(x)


class GPT(nn.Module):
    """Parameters have the names and whole shapes of `impl.model.gpt.GPT`; rows of a qkv matrix are in another order.

    Shapes: tokens [b, s], places [b s] (sequence parallel: [b s / t]) -> logits [b s, V], split over V.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.trunk = Trunk(config, vocab_size)
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.trunk.tokens.weight

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.head(self.trunk(tokens, places))


def parallelize(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the model over a mesh with one axis; both ends of the tied matrix are split by rows of the vocabulary.

    Between the split blocks activations are plain tensors: DTensor's dispatch would only add to their cost.
    """
    between = Shard(0) if sequence_parallel else Replicate()
    into, out_of = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    styles: dict[str, ParallelStyle] = {
        "trunk.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "trunk.layers.*.attention.qkv": into,
        "trunk.layers.*.attention.projection": out_of,
        "trunk.layers.*.mlp.up": into,
        "trunk.layers.*.mlp.down": out_of,
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence_parallel:
        for norm in ("trunk.layers.*.attention_norms.input", "trunk.layers.*.mlp_norms.input", "trunk.final_norm"):
            styles[norm] = SequenceParallel(sequence_dim=0)
        distribute_module(model.trunk.positions, mesh)  # whole on every rank
        styles["trunk.positions"] = PrepareModuleInputOutput(
            input_layouts=between,
            desired_input_layouts=between,
            output_layouts=between,
            desired_output_layouts=between,
        )
    parallelize_module(model, mesh, styles)
    model.tie()


class DTensorTrainer:
    """Trains one run as `impl.train.Trainer` does: `step(i)` does the i-th optimizer step.

    Clipping and AdamW work on the ranks' own parts: `clip_grad_norm_` refuses plain parameters beside DTensors.

    Raises:
        InputError: the run needs something that this engine lacks.
    """

    def __init__(self, run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> None:
        if reason := why_invalid(run):
            raise InputError(reason)
        self.run, self.device = run, device
        self.group = mesh.get_group("tp")
        self.tokens = data.tokens("train")
        vocab_size = run.model.vocabulary(data.manifest.vocab_size)
        alone = TensorParallel(mesh.get_group("dp"), sequence_parallel=False, overlap=False)
        ours = build_model(run.model, vocab_size, run.seed, WEIGHTS[run.precision], alone).state_dict()
        self.model = GPT(run.model, vocab_size).to(WEIGHTS[run.precision])
        self.model.load_state_dict(rearranged(ours, run.model, vocab_size))
        self.model.to(device)
        parallelize(self.model, mesh["tp"], sequence_parallel=run.plan.sequence_parallel)
        count = run.train.microbatch * run.model.seq_len
        places = torch.arange(count, device=device) % run.model.seq_len
        self.places = places.chunk(self.group.size())[self.group.rank()] if run.plan.sequence_parallel else places
        self.masters = {p: nn.Parameter(own(p).detach().to(MASTERS[run.precision])) for p in self.model.parameters()}
        self.adam = self._adam()

    def _adam(self) -> torch.optim.AdamW:
        recipe, masters = self.run.train, self.masters.values()
        decayed = [m for m in masters if m.dim() > 1]
        kept = [m for m in masters if m.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}],
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            fused=True,
        )

    def step(self, i: int) -> Step:
        """Forward and backward over the i-th global batch, then the update."""
        loss = self.backward(i)
        norm = self._clip(self.run.train.clip_norm)
        lr = learning_rate(self.run.train, i)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        rounded = [(own(p), m) for p, m in self.masters.items() if p.dtype != m.dtype]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])
        return Step(loss, norm, lr)

    def backward(self, i: int) -> Tensor:
        """Leave the gradient of the i-th global batch's mean loss to AdamW; returns that loss."""
        count, size = self.run.microbatches, self.run.train.microbatch
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None  # autograd then hands its own tensor over, with no copy
        for k in range(count):
            first = i * self.run.train.global_batch + k * size
            inputs, targets = self._batch(np.arange(first, first + size))
            with loss_parallel():
                logits = self.model(inputs, self.places).to(MASTERS[self.run.precision])
                part = F.cross_entropy(logits, targets.flatten()) / count
                part.backward()
            loss += own(part.detach())
            if k == count - 1 or self.run.precision == "bf16":
                self._hand_over()
        self._sum_partial()
        return loss

    def _batch(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        batch = causal_batch(self.tokens, samples, seq_len=self.run.model.seq_len, seed=self.run.seed)
        place = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return place(batch.inputs), place(batch.targets)

    def _hand_over(self) -> None:
        """Give the parameters' gradients to the masters, which add those of smaller precision up in their own."""
        self.partial: list[Tensor] = []
        for parameter, master in self.masters.items():
            grad = parameter.grad
            assert grad is not None
            if parameter.dtype == master.dtype:
                master.grad = own(grad)
            elif master.grad is None:
                master.grad, parameter.grad = own(grad).to(master.dtype), None
            else:
                master.grad.add_(own(grad))
                parameter.grad = None
            if isinstance(grad, DTensor) and grad.placements[0].is_partial():
                assert master.grad is not None
                self.partial.append(master.grad)

    def _sum_partial(self) -> None:
        """Sum the gradients of whole parameters that met only this rank's tokens. Communication: one all-reduce."""
        if self.partial:
            flat = all_reduce_sum(torch.cat([grad.flatten() for grad in self.partial]), self.group)
            parts = flat.split([grad.numel() for grad in self.partial])
            torch._foreach_copy_(self.partial, [part.view_as(g) for part, g in zip(parts, self.partial, strict=True)])

    def _clip(self, limit: float) -> Tensor:
        """Scale the gradients down to the global L2 norm `limit`; 0: never. Returns the norm before."""
        is_split = [isinstance(p, DTensor) and p.placements[0].is_shard() for p in self.masters]
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).square()
        split = torch.tensor(is_split, device=self.device)
        norm = (all_reduce_sum(squares[split].sum(), self.group) + squares[~split].sum()).sqrt()
        if limit:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def own(tensor: Tensor) -> Tensor:
    """This rank's part, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rearranged(ours: dict[str, Tensor], config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """The serial weights of our GPT as this one's, which pads no vocabulary."""
    embedding = ours["trunk.tokens.weight"][:vocab_size]
    theirs = {**ours, "trunk.tokens.weight": embedding, "head.weight": embedding}
    for name, whole in ours.items():
        if ".qkv." in name:
            theirs[name] = whole.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return theirs
