"""Frontier's weak and strong scaling, predicted: the share of its rate that a model keeps on more devices."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from harness.experiment.published import published
from harness.predict.simulation import given_by, predicted_seconds, simulated
from harness.predict.systems import load_system
from impl.evaluation_config import EvaluationConfig
from impl.model.sizes import named
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Run

ONE_BUCKET = 2**34


class Study(NamedTuple):
    """A model on replicas of one pipeline: from few to many."""

    model: str
    tp: int
    pp: int
    few: int
    many: int
    weak_batch: int
    """Sequences of a replica in a step."""
    strong_batch: int
    """Sequences of all replicas in a step."""


STUDIES = (Study("frontier-175b", 4, 16, 2, 16, 320, 8000), Study("frontier-1t", 8, 64, 1, 6, 1600, 8016))
"""Studies with the plans of the authors' launch scripts; batches are from memory or assumed, and starting
points are assumed."""
Kind = Literal["weak", "strong", "strong, fitted"]
MICROBATCH: dict[Kind, int] = {"weak": 1, "strong": 1, "strong, fitted": 4}
"""Sequences of a microbatch: 1 in the launch scripts. The DeepSpeed configuration stored with them has 4, and 4 was
picked because its pipeline bubble gives the published strong scaling: results with it are fitted, not predicted. With 4
the inputs of recomputed layers are divided among the tensor-parallel ranks; otherwise a trillion parameters are
predicted not to fit 64 GiB."""
FITTED: tuple[Kind, ...] = ("strong, fitted",)
"""Kinds in which a free parameter was picked to match the published efficiency."""


class Scaling(NamedTuple):
    """An efficiency in percent, predicted and published."""

    published: float
    predicted: float


def frontier(kinds: Iterable[Kind] = ("weak", "strong")) -> list[Scaling]:
    """Return the rate per device on many devices over that on few, at constant sequences of a replica and of all.

    Source: Frontier, Dash et al. 2023 (2312.12705), abstract.
    """
    return [_scaling(study, kind) for kind in kinds for study in STUDIES]


def published_efficiency(model: str, kind: Kind) -> float:
    """Return the efficiency that the abstract prints, in percent."""
    rows = published("frontier2023", f"{kind.partition(',')[0]}_scaling_efficiency")
    (value,) = rows.loc[rows["model"] == model, "value"]
    return float(value)


@cache
def _scaling(study: Study, kind: Kind) -> Scaling:
    system = load_system("frontier")
    runs = [run_of(study, kind, dp) for dp in (study.few, study.many)]
    done = [simulated(run, given_by(run, (), system), system).done for run in runs]
    few, many = (run.train.global_batch / run.plan.dp / predicted_seconds(run, system) for run in done)
    return Scaling(published_efficiency(study.model, kind), 100 * many / few)


def run_of(study: Study, kind: Kind, dp: int) -> Run:
    """Return the run of the study's model on `dp` of its pipelines."""
    batch = study.weak_batch * dp if kind == "weak" else study.strong_batch
    run = on_frontier(study.model, study.tp, study.pp, dp, batch, MICROBATCH[kind])
    return replace(run, plan=replace(run.plan, partition_activations=MICROBATCH[kind] > 1))


def on_frontier(
    model: str, tp: int, pp: int, dp: int, batch: int, microbatch: int = 1, zero_stage: ZeroStage = 1
) -> Run:
    """Return a run as in the authors' launch scripts: fp16 in both directions, every layer recomputed."""
    plan = Plan(
        tp=tp, pp=pp, dp=dp, zero_stage=zero_stage, recompute="full", bucket_bytes=ONE_BUCKET,
        overlap_grad_reduce=False, overlap_input_grad_reduce=False,
    )  # fmt: skip
    return Run(
        model=named(model),
        plan=plan,
        train=Recipe(steps=10, lr=1e-4, min_lr=1e-5, warmup_steps=2, global_batch=batch, microbatch=microbatch),
        evaluation=EvaluationConfig(sequences=None),
        precision="fp16",
        fp32_gradients=False,
    )
