"""The matrix products of one rank for one microbatch, and its attention: what there is to compute, shape by shape."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from impl.cost.parameters import Parameter, named_parameters
from impl.cost.place import HEAD, Sizes
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.zero.partition import EXPERT, OUTPUT, TIED

Pass = Literal["forward", "input gradient", "weight gradient"]


class Product(NamedTuple):
    """A matrix product of one rank, [m, k] times [k, n]."""

    name: str
    pass_: Pass
    m: int
    n: int
    k: int
    count: int
    """Executions for one microbatch."""
    is_split: bool
    """True if each tensor-parallel rank does another part of it; else all do the same."""

    @property
    def flops(self) -> int:
        """FLOPs of all executions."""
        return 2 * self.m * self.n * self.k * self.count


class Core(NamedTuple):
    """The core of attention, softmax(q k^T) v, of one rank; q, k and v are [b, a / t, s, h / a] each.

    Of c ranks in a ring each has s / c of the tokens, and meets c times as many keys, one after another.
    """

    batch: int
    heads: int
    seq_len: int
    head_size: int
    is_causal: bool
    forwards: int
    """Forward executions for one microbatch; with recomputation twice for each backward pass."""
    backwards: int

    @property
    def flops(self) -> int:
        """FLOPs of all executions, with every token attending to the whole sequence; a causal kernel may skip half."""
        one = 2 * self.batch * self.heads * self.seq_len**2 * self.head_size
        return one * (2 * self.forwards + 4 * self.backwards)


def products(run: Run, vocab_size: int, stages: Sequence[Stage], head_positions: int) -> list[Product]:
    """Return the matrix products of a rank with these stages: each matrix's forward pass and both its gradients.

    Together all ranks do what `impl.cost.flops` counts, with a padded vocabulary. With full recomputation layers do
    their forward pass twice.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.
    Shapes: a matrix [out, in] of this rank meets n tokens: [n, in] [in, out], [n, out] [out, in], [out, n] [n, in].
    """
    model, batch = run.model, run.train.microbatch
    tokens = {HEAD: Sizes(run).scored(head_positions), "token_dense": batch * head_positions, "pooler": batch}
    tokens["next_sentence"] = batch
    uses = sum(len(stage.layers) for stage in stages) if model.shared_layers else 1
    is_last = any(stage.is_last for stage in stages)
    named = named_parameters(model, vocab_size, run.plan.x, stages, run.plan.ep, run.plan.y)
    head = (TIED if model.tied else OUTPUT) if is_last else None
    matrices = Counter((_matrix(p), p.shape, p.is_split) for p in named if _is_multiplied(p, head))
    found = []
    if model.experts:  # each rank's tokens go to all experts alike
        routed = max(1, Sizes(run).tokens * model.choices * run.plan.ep // model.experts)
    for (name, (out, into), is_split), count in matrices.items():
        is_layer = name not in tokens
        n, count = routed if EXPERT in name else tokens.get(name, Sizes(run).tokens), count * (uses if is_layer else 1)
        forwards = count * (2 if run.plan.recompute == "full" and is_layer else 1)
        found += [
            Product(name, "forward", n, out, into, forwards, is_split),
            Product(name, "input gradient", n, into, out, count, is_split),
            Product(name, "weight gradient", out, into, n, count, is_split),
        ]
    return found


def core(run: Run, stages: Sequence[Stage]) -> Core:
    """Return the size and count of attention's core, softmax(q k^T) v, in these stages' layers, for one microbatch."""
    model, meetings = run.model, run.plan.cp if run.plan.is_ring else 1
    layers = sum(len(stage.layers) for stage in stages) * meetings
    return Core(
        batch=run.train.microbatch,
        heads=Sizes(run).core_heads,
        seq_len=model.seq_len // meetings,
        head_size=model.head_size,
        is_causal=model.family == "gpt",
        forwards=layers * (1 if run.plan.recompute == "none" else 2),
        backwards=layers,
    )


def _is_multiplied(parameter: Parameter, head: str | None) -> bool:
    """Embeddings are looked up: all of them but the one that is the output head as well."""
    name = parameter.name
    is_looked_up = name.startswith("trunk.") and not name.startswith("trunk.layers.")
    return len(parameter.shape) == 2 and (not is_looked_up or name == head)


def _matrix(parameter: Parameter) -> str:
    """Return the name shared by all layers and experts: `mlp.up` for `trunk.layers.3.mlp.up.weight`."""
    name = parameter.name.removesuffix(".weight")
    if parameter.name in (TIED, OUTPUT):
        return HEAD
    name = name.split(".", 3)[3] if name.startswith("trunk.layers.") else name
    return ".".join(part for part in name.split(".") if not part.isdecimal())
