"""Frontier's weak and strong scaling, predicted: the share of its rate that a model keeps on more devices."""

from typing import NamedTuple

from harness.published import published
from harness.systems import load_system
from impl.model.sizes import SIZES
from impl.plan import Plan
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
of the published strong scaling; with 1 it is a quarter of that."""


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
    batch = {dp: study.weak_batch * dp if kind == "weak" else study.strong_batch for dp in (study.few, study.many)}
    runs = {dp: _run(study, dp, batch[dp], MICROBATCH[kind]) for dp in batch}
    rates = {dp: batch[dp] / dp / step_seconds(run, VOCABULARY, system, stages="even") for dp, run in runs.items()}
    rows = published("frontier2023", f"{kind}_scaling_efficiency")
    (value,) = rows.loc[rows["model"] == study.model, "value"]
    devices = [study.tp * study.pp * dp for dp in (study.few, study.many)]
    what = f"{study.model} {kind} scaling, {devices[0]} to {devices[1]} devices, microbatch {MICROBATCH[kind]}"
    return Scaling(what, float(value), 100 * rates[study.many] / rates[study.few])


def _run(study: Study, dp: int, batch: int, microbatch: int) -> Run:
    return Run(
        model=SIZES[study.model].config,
        plan=Plan(
            tp=study.tp,
            pp=study.pp,
            dp=dp,
            zero_stage=1,
            recompute="full",
            bucket_bytes=ONE_BUCKET,
            overlap_grad_reduce=False,
            overlap_input_grad_reduce=False,
        ),
        train=Recipe(global_batch=batch, microbatch=microbatch),
        precision="fp16",
        fp32_gradients=False,
    )
