"""What one rank computes, moves and sends for one microbatch, block by block: the one list that seconds are counted on.

Letters are those of Korthikanti et al. 2022: b sequences of s tokens, n = b s, hidden size h, a heads, t ranks that
share a layer; e is an element's size. Matrix products and attention are those of `impl.cost.gemms`, so that FLOPs agree
with `impl.cost.flops`; collectives add up to `impl.cost.traffic`.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from impl.cost.gemms import HEAD, Core, Product, core, products
from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES, named_parameters
from impl.cost.traffic import Op
from impl.model.config import padded_vocabulary
from impl.pipeline.stage import Stage
from impl.run import Run

When = Literal["forward", "backward"]
BlockName = Literal["embedding", "layer", "head"]
STAGE: dict[BlockName, Stage] = {
    "embedding": Stage(range(0), is_first=True, is_last=False),
    "layer": Stage(range(1), is_first=False, is_last=False),
    "head": Stage(range(0), is_first=False, is_last=True),
}
"""That has this block only."""


class Moved(NamedTuple):
    """Elementwise work: bytes read and written; an operation each time."""

    name: str
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """With the weights' gradients."""


class Collective(NamedTuple):
    """Over the tensor-parallel group; bytes of the whole tensor."""

    op: Op
    bytes: float
    when: When
    behind: Product | None = None
    """What is computed meanwhile; None: nothing is."""


class Block(NamedTuple):
    """A part of the model on one rank, for one microbatch; nothing is counted twice for recomputation."""

    products: tuple[Product, ...]
    core: Core | None
    moved: tuple[Moved, ...]
    scores: tuple[Moved, ...]
    """What the core moves besides where it is not fused."""
    collectives: tuple[Collective, ...]


def block(run: Run, vocab_size: int, name: BlockName, head_positions: int) -> Block:
    """One block of this kind."""
    stage = STAGE[name]
    once = [
        p._replace(count=p.count // 2 if _is_twice(run, p) else p.count)
        for p in products(run, vocab_size, [stage], head_positions)
    ]
    if name != "head":
        once = [p for p in once if p.name != HEAD]
    is_layer = name == "layer"
    one_core = core(run, [stage])._replace(forwards=1, backwards=1) if is_layer else None
    moved = {"embedding": _embedding, "layer": _layer, "head": _head}[name](run, vocab_size, head_positions)
    return Block(
        tuple(once),
        one_core,
        tuple(moved),
        tuple(_scores(run)) if is_layer else (),
        tuple(_collectives(run, name, head_positions, once)) if run.plan.tp > 1 else (),
    )


def parameters(run: Run, vocab_size: int, name: BlockName) -> int:
    """That a rank has in a block."""
    named = named_parameters(run.model, vocab_size, run.plan.tp, [STAGE[name]])
    return sum(p.size for p in named)


def _is_twice(run: Run, product: Product) -> bool:
    """Whether `products` counts the recomputed pass as well."""
    outside = (HEAD, "token_dense", "pooler", "next_sentence")
    return run.plan.recompute == "full" and product.pass_ == "forward" and product.name not in outside


class _Sizes(NamedTuple):
    e: int
    tokens: float
    """n h elements' bytes: a microbatch's activations."""
    own: float
    """Those of the rank between split blocks: n h / t with sequence parallelism."""
    features: float
    """n h / t elements' bytes."""


def _sizes(run: Run) -> _Sizes:
    e, t = ELEMENT_BYTES[run.precision], run.plan.tp
    tokens = float(run.train.microbatch * run.model.seq_len * run.model.hidden_size * e)
    return _Sizes(e, tokens, tokens / t if run.plan.sequence_parallel else tokens, tokens / t)


def _gradient(run: Run, elements: float) -> float:
    """Bytes of adding a microbatch's gradient to the sum: read, and the sum read and written."""
    e = ELEMENT_BYTES[run.precision]
    return elements * (e + 2 * (MASTER_BYTES[run.precision] if run.fp32_gradients else e))


def _layer(run: Run, vocab_size: int, _head_positions: int) -> Iterator[Moved]:
    e, _tokens, own, features = _sizes(run)
    for _ in range(2 * run.model.norms.norms_per_block):
        yield Moved("norm", 2 * own, 3 * own)
    yield Moved("heads", 4 * features, 8 * features)  # laid out for the core and back
    yield Moved("gelu", 8 * features, 12 * features)
    mask = own / e if run.model.dropout > 0 else 0.0
    for _ in range(2):
        yield Moved("residual", 3 * own + mask, 3 * own + (2 * own + mask if mask else 0.0))
    yield Moved("biases", 0.0, 0.0, 7 * features + 2 * own)
    yield Moved("gradients", 0.0, 0.0, _gradient(run, parameters(run, vocab_size, "layer")))


def _scores(run: Run) -> Iterator[Moved]:
    """Mask and softmax, and dropout with its mask, of [b, a / t, s, s]."""
    model, e = run.model, ELEMENT_BYTES[run.precision]
    elements = run.train.microbatch * model.num_heads / run.plan.tp * model.seq_len**2
    yield Moved("softmax", 2 * e * elements, 3 * e * elements)
    if model.dropout > 0:
        yield Moved("dropout", (2 * e + 1) * elements, (2 * e + 1) * elements)


def _embedding(run: Run, vocab_size: int, _head_positions: int) -> Iterator[Moved]:
    e, tokens, own, _features = _sizes(run)
    yield Moved("look-up", 2 * tokens, 2 * tokens)
    yield Moved("positions", 3 * own, own)
    yield Moved("norm", 2 * own, 3 * own) if run.model.norms.embedding else Moved("norm")
    yield Moved("dropout", 2 * own + own / e, 2 * own + own / e) if run.model.dropout > 0 else Moved("dropout")
    rows = padded_vocabulary(vocab_size, run.plan.tp) // run.plan.tp
    yield Moved("gradients", 0.0, 0.0, _gradient(run, rows * run.model.hidden_size))


def _head(run: Run, vocab_size: int, head_positions: int) -> Iterator[Moved]:
    """The loss takes logits in fp32: converted, their largest found, exponentials summed; divided for the gradient."""
    e, _tokens, own, _features = _sizes(run)
    rows = padded_vocabulary(vocab_size, run.plan.tp) // run.plan.tp
    logits = run.train.microbatch * head_positions * rows
    yield Moved("norm", 2 * own, 3 * own)
    yield Moved("loss", logits * (e + 5 * 4), logits * (2 * 4 + e))
    yield Moved("gradients", 0.0, 0.0, _gradient(run, rows * run.model.hidden_size))


def _collectives(run: Run, name: BlockName, head_positions: int, once: list[Product]) -> Iterator[Collective]:
    """Where in a pass each collective of `impl.cost.traffic` comes, and what hides it."""
    plan, size = run.plan, _sizes(run).tokens
    product = {(p.name, p.pass_): p for p in once} if plan.overlap_input_grad_reduce else {}
    columns = {"embedding": (), "layer": ("attention.qkv", "mlp.up"), "head": (HEAD,)}[name]
    rows = {"embedding": 1, "layer": 2, "head": 0}[name]  # products, or look-ups, whose results are summed
    if name == "head" and run.model.family == "bert":
        columns = ()
        scored = run.train.microbatch * head_positions * run.model.hidden_size * ELEMENT_BYTES[run.precision]
        yield Collective("all_reduce", scored, "backward")
        if plan.sequence_parallel:
            yield Collective("all_gather", size, "forward")
    for column in columns:
        behind_input, behind_weight = product.get((column, "input gradient")), product.get((column, "weight gradient"))
        if plan.sequence_parallel:
            yield Collective("all_gather", size, "forward")
            yield Collective("all_gather", size, "backward", behind_input)
            yield Collective("reduce_scatter", size, "backward", behind_weight)
        else:
            yield Collective("all_reduce", size, "backward", behind_weight)
    for _ in range(rows):
        if plan.sequence_parallel:
            yield Collective("reduce_scatter", size, "forward")
            yield Collective("all_gather", size, "backward")
        else:
            yield Collective("all_reduce", size, "forward")
    if name == "head":
        statistics = plan.tp * 2 * run.train.microbatch * head_positions * max(ELEMENT_BYTES[run.precision], 4)
        yield Collective("all_gather", statistics, "forward")
    if name == "layer" and plan.partition_activations:
        yield Collective("all_gather", size, "backward")
