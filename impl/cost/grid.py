"""Which runs can have `plan.tp3`, AxoNN's x, y and z, and what their ranks have and send; for runs that do."""

from collections.abc import Iterator

from impl.fields import divisors
from impl.run import Run


def problems(run: Run) -> Iterator[str]:
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
        "plan.sequence_parallel": (plan.sequence_parallel, "False"),
        "evaluation.dimensions": (run.evaluation.dimensions, "False"),
        "compile": (run.compile, "False"),
        f"engine {run.engine}": (run.engine != "native", "native"),
    }
    for field, (is_given, valid) in refused.items():
        if is_given:
            yield f"{this}: {field} is not built with y above 1; valid: {valid}"
