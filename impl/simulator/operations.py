"""What one rank computes, moves and sends for one microbatch, block by block: the one list that seconds are counted on.

Letters are those of Korthikanti et al. 2022: b sequences of s tokens, n = b s, hidden size h, a heads, t ranks that
share a layer; e is an element's size. Matrix products and attention are those of `impl.cost.gemms`, so that FLOPs agree
with `impl.cost.flops`; collectives are those of `impl.cost.traffic`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from impl.cost.gemms import Core, Product, core, products
from impl.cost.parameters import ELEMENT_BYTES, named_parameters
from impl.cost.place import HEAD, Place, Sizes, parameter_bytes
from impl.cost.traffic import LAYERS, BlockName, Collective, collectives
from impl.model.config import ModelConfig
from impl.pipeline.stage import Stage
from impl.run import Run


def stage_of(model: ModelConfig, name: BlockName) -> Stage:
    """Return a stage that has only the named block, of which the model has one."""
    first = {"layer": 0, "experts": model.experts_every - 1}.get(name, -1)
    layers = range(first, first + 1) if name in LAYERS else range(0)
    return Stage(layers, is_first=name == "embedding", is_last=name == "head")


def names_of(model: ModelConfig) -> list[BlockName]:
    """Return the names of the blocks that the model has."""
    experts = model.expert_layers
    lacking = {"layer": experts == model.num_layers, "experts": experts == 0}
    return [name for name in get_args(BlockName) if not lacking.get(name)]


class Moved(NamedTuple):
    """Elementwise work: bytes read and written; an operation each time."""

    name: str
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """Bytes that belong to the weight gradients."""
    where: Literal["own", "sent", "arrived"] = "own"
    """Tokens that it counts: the rank's own; those as rows on their way to experts and back; or rows that its experts
    get."""


class Block(NamedTuple):
    """A part of the model on one rank, for one microbatch; nothing is counted twice for recomputation."""

    products: tuple[Product, ...]
    core: Core | None
    moved: tuple[Moved, ...]
    scores: tuple[Moved, ...]
    """Further elementwise work of attention's core where it is not fused."""
    collectives: tuple[Collective, ...]


def block(run: Run, vocab_size: int, name: BlockName, head_positions: int) -> Block:
    """Return what one embedding, layer or head computes and sends on one rank, for one microbatch.

    Of experts each gets as many rows.
    """
    stage = stage_of(run.model, name)
    plain = run if run.plan.recompute == "none" else replace(run, plan=replace(run.plan, recompute="none"))
    once = [p for p in products(plain, vocab_size, [stage], head_positions) if name == "head" or p.name != HEAD]
    is_layer = name in LAYERS
    make = {"embedding": _embedding, "layer": _layer, "experts": _expert_layer, "head": _head}[name]
    moved = make(run, vocab_size, head_positions)
    return Block(
        tuple(once),
        core(plain, [stage]) if is_layer else None,
        tuple(moved),
        tuple(_scores(run)) if is_layer else (),
        tuple(collectives(Place(run, vocab_size), name, head_positions, once)),
    )


def parameters(run: Run, vocab_size: int, name: BlockName) -> int:
    """Return the number of parameters that a rank has in a block."""
    named = named_parameters(run.model, vocab_size, run.plan.x, [stage_of(run.model, name)], run.plan.ep, run.plan.y)
    return sum(p.size for p in named)


def _gradient(run: Run, elements: float) -> float:
    """Return the bytes to add a microbatch's gradient to the sum: read, and the sum read and written."""
    each = parameter_bytes(run)
    return elements * (each.weight + 2 * each.gradient)


def _expert_layer(run: Run, vocab_size: int, _head_positions: int) -> Iterator[Moved]:
    yield from _layer(run, vocab_size, 0, name="experts")
    sizes, model = Sizes(run, of_experts=True), run.model
    whole, rows = sizes.activations, sizes.activations * model.choices
    logits = sizes.tokens * model.experts * max(sizes.e, 4)
    yield Moved("softmax", 2 * logits, 3 * logits, where="sent")
    yield Moved("heads", whole + rows, rows + whole, where="sent")  # each token's row for its experts, and back
    yield Moved("residual", rows + whole, 3 * rows + whole, where="sent")  # their weighted sum
    for _ in range(2 * (run.plan.ep > 1 and model.experts > run.plan.ep)):
        yield Moved("heads", 2 * rows, 2 * rows, where="arrived")  # sorted by expert where they arrive, and back
    if run.precision == "fp8":
        # Megatron-Core's experts.py: rows, what their function writes and all their gradients come in 16 bits
        inner, widened = sizes.inner, sizes.widened
        yield Moved("casts", 2 * (rows + inner), 2 * (rows - sizes.own + widened), where="arrived")
        for _ in range(2):  # each expert's rows are copied into whole blocks of 16, and back
            yield Moved("heads", 2 * rows, 2 * rows, where="arrived")


def _layer(run: Run, vocab_size: int, _head_positions: int, name: BlockName = "layer") -> Iterator[Moved]:
    sizes = Sizes(run, of_experts=name == "experts")
    e, own, features = sizes.e, sizes.own, sizes.features
    norms = run.model.norms
    qkv, projected, inner, widened = sizes.qkv, sizes.projected, sizes.inner, sizes.widened
    of_heads = {"q": features, "k": (qkv - features) / 2, "v": (qkv - features) / 2}
    of_parts = [of_heads[name] for name in norms.attention.heads]
    of_parts += [features] * norms.attention.inner + [inner] * norms.mlp.inner
    for size in [own] * norms.of_tokens + of_parts:
        yield Moved("norm", 2 * size, 3 * size)
    for _ in range(bool(norms.attention.heads) + (qkv != projected)):
        yield Moved("heads", 2 * qkv, 2 * qkv)  # put together again, as are shared heads
    if run.model.positions == "rotary":
        turned = (qkv + features) * run.model.turned / run.model.head_size
        yield Moved("heads", turned, turned)  # of queries and keys
    yield Moved("heads", qkv + features, 2 * (qkv + features))  # laid out for the core and back
    if run.plan.is_ring:  # each meeting's results are added up, in fp32 at least
        added = 1 + 2 * max(e, 4) / e
        yield Moved("merge", (run.plan.cp - 1) * added * features, run.plan.cp * added * qkv)
    yield Moved("gelu", widened + inner, 2 * widened + inner, where="arrived" if name == "experts" else "own")
    if run.precision == "fp8":  # norms and the MLP's function write 8 bits, twice for the transpose; others are cast
        yield Moved("casts", 2 * features, 2 * (2 * own + projected))
    mask = own / e if run.model.dropout > 0 else 0.0
    for _ in range(2):
        yield Moved("residual", 3 * own + mask, 3 * own + (2 * own + mask if mask else 0.0))
    yield Moved("biases", 0.0, 0.0, projected + widened + 2 * own if run.model.biases else 0.0)
    yield Moved("gradients", 0.0, 0.0, _gradient(run, parameters(run, vocab_size, name)))


def _scores(run: Run) -> Iterator[Moved]:
    """Mask and softmax, and dropout with its mask, of [b, a / t, s, s]: of context-parallel ranks each has a part."""
    model, e = run.model, ELEMENT_BYTES[run.precision]
    elements = run.train.microbatch * model.num_heads / run.plan.x * model.seq_len**2 / run.plan.cp
    yield Moved("softmax", 2 * e * elements, 3 * e * elements)
    if model.scores_dropout > 0:
        yield Moved("dropout", (2 * e + 1) * elements, (2 * e + 1) * elements)


def _embedding(run: Run, vocab_size: int, _head_positions: int) -> Iterator[Moved]:
    place = Place(run, vocab_size)
    e, tokens, own = place.e, place.activations, place.own
    yield Moved("look-up", 2 * tokens, 2 * tokens)
    yield Moved("positions", 3 * own, own) if run.model.positions == "learned" else Moved("positions")
    yield Moved("norm", 2 * own, 3 * own) if run.model.norms.embedding else Moved("norm")
    yield Moved("dropout", 2 * own + own / e, 2 * own + own / e) if run.model.dropout > 0 else Moved("dropout")
    yield Moved("gradients", 0.0, 0.0, _gradient(run, place.rows * run.model.hidden_size / run.plan.y))


def _head(run: Run, vocab_size: int, head_positions: int) -> Iterator[Moved]:
    """Yield the elementwise operations of the head's norm and loss, which works on logits in fp32."""
    place = Place(run, vocab_size)
    logits = place.scored(head_positions) * place.rows
    yield Moved("norm", 2 * place.own, 3 * place.own)
    yield Moved("loss", logits * (place.e + 5 * 4), logits * (2 * 4 + place.e))
    yield Moved("gradients", 0.0, 0.0, _gradient(run, place.rows * run.model.hidden_size / run.plan.y))
