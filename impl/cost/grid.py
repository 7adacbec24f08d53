"""Which runs can have `plan.tp3`, AxoNN's x, y and z, and what their ranks have and send; for runs that do."""

from typing import TYPE_CHECKING

from impl.fields import divisors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from impl.cost.gemms import Product
    from impl.cost.place import Place
    from impl.cost.traffic import BlockName, Collective
    from impl.run import Run

    Products = Mapping[tuple[str, str], Product]


def problems(run: "Run") -> "Iterator[str]":
    """Yield what is wrong with the run's `plan.tp3`, in lines of `Run.problems`."""
    plan, model = run.plan, run.model
    assert plan.tp3 is not None
    x, y, z = plan.tp3
    this = f"plan.tp3 {plan.tp3}"
    if plan.tp != x * y:
        yield f"{this} has {x} x {y} ranks for a layer's products, plan.tp is {plan.tp}; valid: plan.tp {x * y}"
    if z > 1 and (plan.zero_stage, plan.zero) != (3, z):
        what = f"{z} data-parallel ranks divide weights, plan.zero_stage is {plan.zero_stage} over {plan.zero}"
        yield f"{this}: {what}; valid: plan.zero_stage 3 with plan.zero_group {z}"
    if y == 1:
        return
    if model.hidden_size % y:
        valid = ", ".join(map(str, divisors(model.hidden_size)))
        yield f"{this}: y does not divide model.hidden_size {model.hidden_size}; valid: {valid}"
    refused = {
        f"model.family {model.family}": (model.family != "gpt", "gpt"),
        f"model.norm {model.norm}": (model.norm == "dyt", "layernorm, rmsnorm"),
        f"model.experts {model.experts}": (model.experts > 0, "0"),
        "plan.sequence_parallel": (plan.sequence_parallel, "False"),
        "evaluation.dimensions": (run.evaluation.dimensions, "False"),
        "compile": (run.compile, "False"),
        f"engine {run.engine}": (run.engine != "native", "native"),
    }
    for field, (is_given, valid) in refused.items():
        if is_given:
            yield f"{this}: {field} is not built with y above 1; valid: {valid}"


def other_collectives(
    at: "Place", name: "BlockName", head_positions: int, product: "Products"
) -> "Iterator[Collective]":
    """Yield the collectives of ranks that share sequences or divide hidden features; arguments as `of_features` has."""
    if at.run.plan.cp > 1:
        from impl.cost.context import context_collectives

        yield from context_collectives(at.run, name)
    if at.run.plan.y > 1:
        yield from of_features(at, name, head_positions, product)


def of_features(at: "Place", name: "BlockName", head_positions: int, product: "Products") -> "Iterator[Collective]":
    """Yield the collectives of one block and microbatch over the y ranks that divide hidden features.

    Results of products that take hidden features, input gradients of those that give them, and norms' statistics: of
    n tokens n (3 h / x), n (f / x) and n (V / x) elements; n (h / x) and n (f / x); n y and n for each number.

    Source: `impl.grid`.

    Args:
        product: the block's products, by name and pass, that are computed meanwhile.
    """
    from impl.cost.traffic import Collective  # which needs runs, of which this module finds problems

    model, wide = at.run.model, max(at.e, 4)
    norms = {"embedding": model.norms.embedding, "layer": model.norms.of_tokens, "head": model.norms.final}[name]
    of_tokens = at.tokens * {"layernorm": 2, "rmsnorm": 1}[model.norm] * wide
    for _ in range(norms):
        yield Collective("all_gather", at.run.plan.y * of_tokens, "forward", over="features")
        yield Collective("all_reduce", of_tokens, "backward", over="features")
    logits = at.scored(head_positions) * at.rows * at.e
    for size in {"embedding": (), "layer": (at.projected, at.widened), "head": (logits,)}[name]:
        yield Collective("all_reduce", size, "forward", over="features")
    for row, size in (("attention.projection", at.features), ("mlp.down", at.inner)) if name == "layer" else ():
        yield Collective("all_reduce", size, "backward", product.get((row, "weight gradient")), over="features")
