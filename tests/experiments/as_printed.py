"""Records of runs of any size, measured or simulated, that say no more than a rate, a bubble and predicted memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from harness.experiment.claims import Claim
from harness.experiment.claims_table import claims_table
from harness.experiment.comparison import Comparison
from harness.experiment.experiment import Experiment
from harness.predict.memory import predicted
from harness.records.parts import Collective, Environment, Prediction, Rank, Status
from harness.records.record import Record
from harness.records.steps import Step
from impl.cost.traffic import Count
from impl.plan import Plan
from impl.run import Run
from tests.harness.made_up_records import record_of
from tests.turned import REFUTED

YES, PARTLY, NO, ABSENT = "reproduced", "partly", "not reproduced", "not run here"
OPEN = "cannot tell here"
A100 = "NVIDIA A100-SXM4-80GB"


@cache
def bare(run: Run, **place: Any) -> Record:
    """Made for one rank: thousands would say the same."""
    alone = replace(run, plan=Plan(), train=replace(run.train, global_batch=1, microbatch=1))
    return replace(record_of(alone, **place), run=run, id=run.id, ranks=[])


def timed(of: Record, seconds: float) -> Record:
    """The record, had every step taken this long."""
    return replace(of, steps=[replace(step, seconds=[seconds]) for step in of.steps])


def at_rate(of: Record, rate: float) -> Record:
    """The record, had its devices reached a rate of model FLOPs/s."""
    return timed(of, of.flops_per_step() / (rate * of.run.plan.world_size))


def fast(run: Run, rate: float = 1e9, **place: Any) -> Record:
    """A record whose devices reach a rate of model FLOPs/s."""
    return at_rate(bare(run, **place), rate)


def simulated(
    run: Run,
    rate: float = 1e12,
    *,
    memory: float | None = None,
    bubble: float | None = None,
    in_flight: float | None = None,
    device: str = A100,
    status: Status = "ok",
) -> Record:
    """A record as `predict` leaves it."""
    full = fast(run, rate)
    ranks = [] if memory is None else [Rank(peak_memory_bytes=round(memory), memory_kind="predicted bytes")]
    return replace(
        full,
        source="simulated",
        tier="paper",
        status=status,
        environment=Environment(system="made up", stack="", device="cuda", device_name=device, backend="nccl"),
        steps=[Step(seconds=full.steps[0].seconds)] if status == "ok" else [],
        ranks=ranks,
        prediction=Prediction(bubble=bubble, microbatches_in_flight=in_flight),
        evaluations=[],
    )


def as_fast_as_printed(
    figure: Comparison, factor: Callable[[Run], float], make: Callable[..., Record] = simulated, **place: Any
) -> list[Record]:
    """Records of a figure's runs that are as fast as printed, times a factor."""
    rates = [one.printed["model_rate"] for one in figure.printed.values()]
    return [make(run, rate * factor(run), **place) for run, rate in zip(figure.runs, rates, strict=True)]


def counted(run: Run, times: float = 1.0) -> Record:
    """A record of the run, with the predicted memory, the activations multiplied."""
    full = record_of(run)
    full.resolved.head_positions = run.model.seq_len
    ours = predicted(run, 257, "cpu")
    for r, rank in enumerate(full.ranks):
        sizes = ours[r // (run.plan.dp * run.plan.tp)].as_dict()
        rank.memory = {name: size for name, size in sizes.items() if name not in ("total", "host")}
        rank.memory["activations"] = round(times * sizes["activations"])
    return full


def collectives(traffic: Mapping[str, Mapping[Any, Count]]) -> dict[str, dict[str, Collective]]:
    """Traffic by formula, as a rank counts it."""
    return {axes: {op: Collective(n.calls, n.bytes) for op, n in ops.items()} for axes, ops in traffic.items()}


def thrice(records: Sequence[Record]) -> list[Record]:
    """Three repeats of each measured record with equal numbers, so that verdicts depend on these alone."""
    runs = [(one, replace(one.run, repeat=i)) for one in records for i in range(1 if one.is_simulated else 3)]
    return [replace(one, run=run, id=run.id) for one, run in runs]


def judged(claims: Sequence[Claim], records: Sequence[Record]) -> list[str]:
    """The verdicts on claims, by records that are either all measured or all simulated."""
    found = claims_table(claims, records).frame
    return list(found[next(name for name in reversed(found.columns) if name.startswith("verdict"))])


def verdicts(experiment: Experiment, records: Sequence[Record]) -> list[str]:
    """On all claims."""
    return judged(experiment.claims, thrice(records))


def turned(experiment: Experiment, records: Sequence[Record]) -> list[str]:
    """The verdicts on all claims; one that holds in part, or is open, has turned."""
    return [NO if one in REFUTED else one for one in verdicts(experiment, records)]
