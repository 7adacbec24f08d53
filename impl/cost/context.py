"""What context-parallel ranks send each other, by formula; for runs with `plan.cp` above 1."""

from collections.abc import Iterator

from impl.cost.place import Sizes
from impl.cost.traffic import LAYERS, BlockName, Collective
from impl.run import Run


def core_computed(sizes: Sizes) -> int:
    """Return the bytes that the backward pass of attention computes around the core.

    A ring: gradients of queries, and of keys and values that come by and go on, in fp32 at least; those keys and values
    and the gradients of a meeting. Ulysses: gradients of queries, keys and values before and after they are exchanged.
    """
    wide, queries = max(sizes.e, 4) // sizes.e, sizes.features
    if sizes.run.plan.is_ring:
        return (wide + 1) * queries + (2 * wide + 2) * (sizes.qkv - queries)
    return 2 * sizes.qkv


def context_collectives(run: Run, name: BlockName) -> Iterator[Collective]:
    """Yield the collectives of one block and microbatch over the ranks that share sequences, without recomputation.

    `impl.context_parallel` has them: those of attention, and of BERT's heads, which need whole sequences.
    """
    sizes, c = Sizes(run), run.plan.cp
    if name in LAYERS and run.plan.is_ring:
        keys_and_values = sizes.qkv - sizes.features
        for _ in range(c - 1):
            yield Collective("send", keys_and_values, "forward", over="cp")
            yield Collective("send", keys_and_values, "backward", over="cp")
        for _ in range(c):
            yield Collective("send", keys_and_values // sizes.e * max(sizes.e, 4), "backward", over="cp")
    elif name in LAYERS:
        for when in ("forward", "backward"):
            yield Collective("all_to_all", sizes.qkv, when, over="cp")
            yield Collective("all_to_all", sizes.features, when, over="cp")
    elif name == "head" and run.model.family == "bert":
        yield Collective("all_gather", c * sizes.activations, "forward", over="cp")
        yield Collective("reduce_scatter", c * sizes.activations, "backward", over="cp")
