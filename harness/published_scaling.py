"""Frontier's weak and strong scaling, predicted: the share of its rate that a model keeps on more devices."""

from dataclasses import replace
from typing import NamedTuple

from harness.published import published
from harness.systems import load_system
from impl.evaluation_config import EvaluationConfig
from impl.model.sizes import named
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.step import step_seconds

VOCABULARY = 51200
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
    """Of all."""


STUDIES = (Study("frontier-175b", 4, 16, 2, 16, 320, 8000), Study("frontier-1t", 8, 64, 1, 6, 1600, 8016))
"""Plans: the authors' launch scripts. The batches and where scaling begins are assumed: the abstract has neither."""
MICROBATCH = {"weak": 1, "strong": 4}
"""Assumed as well: the launch scripts say 1, the DeepSpeed configuration beside them 4, and with 4 the bubble is that
of the published strong scaling; with 1 it is a quarter of that. With 4 the inputs of recomputed layers are taken to be
divided among the tensor-parallel ranks: whole, a trillion parameters are predicted not to fit 64 GiB."""


class Scaling(NamedTuple):
    """An efficiency, in percent."""

    what: str
    published: float
    predicted: float


def frontier() -> list[Scaling]:
    """Rate per device on many devices over that on few, at constant sequences of a replica and of all.

    Source: Frontier, Dash et al. 2023 (2312.12705), abstract.
    """
    return [_scaling(study, kind) for study in STUDIES for kind in MICROBATCH]


def _scaling(study: Study, kind: str) -> Scaling:
    system = load_system("frontier")
    runs = {dp: run_of(study, kind, dp) for dp in (study.few, study.many)}
    rates = {
        dp: run.train.global_batch / dp / step_seconds(run, VOCABULARY, system, stages="even")
        for dp, run in runs.items()
    }
    rows = published("frontier2023", f"{kind}_scaling_efficiency")
    (value,) = rows.loc[rows["model"] == study.model, "value"]
    devices = [study.tp * study.pp * dp for dp in (study.few, study.many)]
    what = f"{study.model} {kind} scaling, {devices[0]} to {devices[1]} devices, microbatch {MICROBATCH[kind]}"
    return Scaling(what, float(value), 100 * rates[study.many] / rates[study.few])


def run_of(study: Study, kind: str, dp: int) -> Run:
    """The study's model on `dp` of its pipelines."""
    batch = study.weak_batch * dp if kind == "weak" else study.strong_batch
    run = on_frontier(study.model, study.tp, study.pp, dp, batch, MICROBATCH[kind])
    return replace(run, plan=replace(run.plan, partition_activations=MICROBATCH[kind] > 1))


def on_frontier(
    model: str, tp: int, pp: int, dp: int, batch: int, microbatch: int = 1, zero_stage: ZeroStage = 1
) -> Run:
    """A run as the authors' launch scripts have them: fp16 in both directions, every layer recomputed."""
    plan = Plan(
        tp=tp,
        pp=pp,
        dp=dp,
        zero_stage=zero_stage,
        recompute="full",
        bucket_bytes=ONE_BUCKET,
        overlap_grad_reduce=False,
        overlap_input_grad_reduce=False,
    )
    return Run(
        model=named(model),
        plan=plan,
        train=Recipe(steps=10, lr=1e-4, min_lr=1e-5, warmup_steps=2, global_batch=batch, microbatch=microbatch),
        evaluation=EvaluationConfig(sequences=None),
        precision="fp16",
        fp32_gradients=False,
    )
