"""The typed record of one run, and what is measured from it: each measure is defined once, in SI units."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from harness.records.parts import (
    MOST_OTHERS,
    READ,
    Collective,
    Environment,
    Evaluation,
    Forecast,
    Head,
    LossForecast,
    Prediction,
    Rank,
    Resolved,
    on_same_cores,
    others_share,
)
from harness.records.statistics import WARMUP_STEPS, quartiles, warmup_steps
from harness.records.steps import Steps
from impl.cost.flops import hardware_flops, model_flops
from impl.cost.peaks import peak_flops
from impl.grouping import by_key
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Timeline, simulate
from impl.run import Run

CONVENTION = "palm_12"
"""FLOP convention, that of most published numbers; for GPT and for BERT."""
STATES = ("parameters", "gradients", "optimizer")
"""Categories of memory that are model states."""
NONE = Collective()


@dataclass(config=READ, kw_only=True, eq=False)
class Record(Head):
    """Record of one run with the raw values of its steps, ranks and evaluations.

    A measure that the record cannot give is NaN.
    """

    run: Annotated[Run, Field(validation_alias="config")]
    resolved: Resolved = field(default_factory=Resolved)
    environment: Environment = field(default_factory=Environment)
    prediction: Prediction = field(default_factory=Prediction)
    forecast: Forecast | None = None
    loss_forecast: LossForecast | None = None
    ranks: list[Rank] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    evaluations: list[Evaluation] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    certified: bool = False  # every step was hashed, and not timed: `harness.records.certificate`

    @cached_property
    def point(self) -> Run:
        """Run with seed and repeat 0, which all its repeats and seeds share."""
        return point(self.run)

    @property
    def parameters(self) -> float:
        """Parameters of the model."""
        return float_or_nan(self.resolved.parameters or None)

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of each timed step, slowest rank, without the warm-up steps of the run and of its resumptions."""
        seconds = self.steps.slowest()
        cold = {step for at in self.times.resumed_at for step in range(at, at + WARMUP_STEPS)}
        return [seconds[step] for step in range(warmup_steps(len(seconds)), len(seconds)) if step not in cold]

    @property
    def losses(self) -> Sequence[float]:
        """Training loss of every step, NaN included; empty where nothing was trained."""
        return () if self.is_simulated else self.steps.losses

    @cached_property
    def courses(self) -> dict[tuple[str, str], list[Evaluation]]:
        """Evaluations by the name of the text and the kind, each in order of the steps."""
        in_order = sorted(self.evaluations, key=lambda evaluation: evaluation.step)
        return by_key(((evaluation.name, evaluation.kind), evaluation) for evaluation in in_order)

    @property
    def last_evaluations(self) -> list[Evaluation]:
        """Last evaluation of each text and kind."""
        return [course[-1] for course in self.courses.values()]

    @property
    def has_diverged(self) -> bool:
        """True if a loss became NaN, or the last loss is above the first."""
        rose = bool(self.losses) and not self.losses[-1] <= self.losses[0]
        return self.status == "nan" or (self.status == "ok" and rose)

    @property
    def is_oversubscribed(self) -> bool:
        """True if the ranks' threads shared CPU cores, so that times are useless for scaling."""
        where, threads, found = self.environment, self.run.threads, on_same_cores([rank.host for rank in self.ranks])
        cores = [(len(of), of[0].cores) for of in found] or [(self.run.plan.world_size, where.cores or math.inf)]
        return where.device == "cpu" and any(ranks * threads > there for ranks, there in cores)

    @cached_property
    def is_disturbed(self) -> bool:
        """True if others took more than a tenth of the processors' time during training, on some host."""
        return others_share([rank.host for rank in self.ranks]) > MOST_OTHERS

    @property
    def has_trusted_code(self) -> bool:
        """True if the run's schedule and norm placement may be used; False if one is code that only a record names."""
        from impl.own_code import code_of, is_trusted  # of which few runs have any

        return all(map(is_trusted, code_of(self.run)))

    @cached_property
    def tokens_per_second(self) -> float:
        """Global tokens of the timed steps over their wall time."""
        seconds = self.timed_seconds
        return len(seconds) * self.run.tokens_per_step / math.fsum(seconds) if seconds else math.nan

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens_per_second / self.run.plan.world_size

    @cached_property
    def step_quartiles(self) -> tuple[float, float, float]:
        """Quartiles of the seconds of the timed steps."""
        return quartiles(seconds) if (seconds := self.timed_seconds) else (math.nan, math.nan, math.nan)

    @property
    def step_seconds(self) -> float:
        """Median seconds of the timed steps."""
        return self.step_quartiles[1]

    @property
    def flop_rate(self) -> float:
        """Model FLOP/s of one device, without recomputation, in the convention `palm_12`."""
        return self._flop_rate(self.flops_per_step())

    @property
    def hardware_flop_rate(self) -> float:
        """FLOP/s of one device, those that are recomputed counted, too."""
        return self._flop_rate(self.flops_per_step(recomputed=True))

    @property
    def mfu(self) -> float:
        """Share of the device's peak that `flop_rate` is."""
        return self.flop_rate / self.peak_flops

    @property
    def hfu(self) -> float:
        """Share of the device's peak that model FLOPs and recomputed ones are."""
        return self.hardware_flop_rate / self.peak_flops

    @property
    def gemm_rate(self) -> float:
        """FLOP/s of matrix products alone, mean over the ranks."""
        gemm = [rank.gemm_flops_per_s for rank in self.ranks if rank.gemm_flops_per_s]
        return math.fsum(gemm) / len(gemm) if gemm else math.nan

    @property
    def skipped_steps(self) -> float:
        """Steps of an fp16 run whose gradients overflowed, so that only the loss scale was changed."""
        return float(self.steps.skipped) if self.run.precision == "fp16" and self.losses else math.nan

    @property
    def alone_seconds(self) -> float:
        """Seconds that a step's matrix products and attention take when they run alone, on the slowest rank."""
        limits = [rank.limit for rank in self.ranks if rank.limit]
        return max((one.gemm_seconds + one.attention_seconds for one in limits), default=math.nan)

    @property
    def peak_memory_bytes(self) -> float:
        """Peak memory of the rank with most."""
        return self._largest(lambda rank: rank.peak_memory_bytes)

    @property
    def is_memory_predicted(self) -> bool:
        """True if `peak_memory_bytes` was predicted, as for simulated runs."""
        return any(rank.memory_kind == "predicted bytes" for rank in self.ranks)

    @property
    def split_state_bytes(self) -> float:
        """Weights and optimizer states that tensor-parallel ranks divide, on the rank with most."""
        return self._largest(lambda rank: (rank.state_bytes or {}).get("split"))

    @property
    def whole_state_bytes(self) -> float:
        """Weights and optimizer states that every tensor-parallel rank has, on the rank with most."""
        return self._largest(lambda rank: (rank.state_bytes or {}).get("whole"))

    @property
    def model_activation_bytes(self) -> float:
        """Bytes that the rank with most keeps of one microbatch."""
        return self._largest(lambda rank: (rank.activation_bytes or {}).get("model"))

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that the rank with most keeps of one microbatch in one layer."""
        return self._largest(lambda rank: (rank.activation_bytes or {}).get("layer"))

    @property
    def memory_bytes(self) -> float:
        """Device memory of the fullest rank, counted at the fullest moment of a step."""
        return self.bytes_of("total")

    @property
    def predicted_memory_bytes(self) -> float:
        """Device memory of the fullest rank, predicted; NaN where it was not counted or the schedule is not trusted."""
        return self.predicted_bytes_of("total")

    @property
    def states_bytes(self) -> float:
        """Model states in `memory_bytes`."""
        return self.bytes_of(*STATES)

    @property
    def predicted_states_bytes(self) -> float:
        """Model states in `predicted_memory_bytes`."""
        return self.predicted_bytes_of(*STATES)

    @property
    def tp_calls(self) -> float:
        """Tensor-parallel collectives of the busiest rank in a step."""
        return self._busiest(lambda axes: sum(count.calls for count in axes.get("tp", {}).values()))

    @property
    def tp_bytes_sent(self) -> float:
        """Bytes that the busiest rank sends in a step's tensor-parallel collectives."""
        return self._sent_in_rings("tp")

    @property
    def dp_bytes_sent(self) -> float:
        """Bytes that the busiest rank sends in a step's data-parallel collectives."""
        return self._sent_in_rings("dp", "zero", "replicas", "dp_cp", "owners", "cp")

    @property
    def pp_sends(self) -> float:
        """Messages that the busiest rank sends to other pipeline stages in a step."""
        return self._busiest(lambda axes: axes.get("pp", {}).get("send", NONE).calls)

    @property
    def pp_bytes_sent(self) -> float:
        """Bytes that the busiest rank sends to other pipeline stages in a step."""
        return self._busiest(lambda axes: axes.get("pp", {}).get("send", NONE).bytes)

    @cached_property
    def timeline(self) -> Timeline | None:
        """Pipeline timeline of the last step; None for runs without a pipeline, or that did not reach that step."""
        rows = [rank.timeline for rank in self.ranks if rank.timeline]
        return Timeline.from_rows(rows) if rows else None

    @property
    def bubble(self) -> float:
        """Idle over computing time of all pipeline ranks in the last step, the optimizer update not counted."""
        return float(self.timeline.bubble) if self.timeline else float_or_nan(self.prediction.bubble)

    @property
    def predicted_bubble(self) -> float:
        """Bubble of `simulated_timeline`; NaN where the schedule is not trusted."""
        return float(self._simulated.bubble) if self._simulated else math.nan

    @property
    def pipeline_seconds(self) -> float:
        """Seconds of the last step from the first start to the last end, without the optimizer update."""
        return float(self.timeline.step_time) if self.timeline else math.nan

    @property
    def predicted_pipeline_seconds(self) -> float:
        """Seconds of `simulated_timeline`; NaN where the schedule is not trusted."""
        return float(self._simulated.step_time) if self._simulated else math.nan

    @property
    def microbatches_in_flight(self) -> float:
        """Most microbatches whose activations a pipeline rank keeps at once, over all its chunks."""
        if self.timeline is None:
            return float_or_nan(self.prediction.microbatches_in_flight)
        return max(float(self.timeline.microbatches_in_flight(rank)) for rank in self.timeline.rows)

    @property
    def in_flight_bytes(self) -> float:
        """Activations of the microbatches in flight, on the pipeline rank with most."""
        if self.timeline is None:
            return math.nan
        held = [(rank.activation_bytes or {}).get("model") for rank in self.ranks if rank.timeline]
        counts = [self.timeline.microbatches_in_flight(rank) for rank in self.timeline.rows]
        return max(float(count) * float_or_nan(size) for count, size in zip(counts, held, strict=True))

    @property
    def training_seconds(self) -> float:
        """Seconds of all steps."""
        return float_or_nan(self.times.training_seconds)

    def simulated_timeline(self) -> Timeline:
        """Return the schedule simulated with the median times of each stage's passes in `timeline`.

        Raises:
            InputError: the schedule is not trusted.
        """
        spans = self.timeline.spans if self.timeline else ()
        seconds = by_key((span.action[:2], float(span.end - span.start)) for span in spans)
        usual, plan = {kind: quartiles(values)[1] for kind, values in seconds.items()}, self.run.plan
        schedule = build(plan.schedule, plan.pp, self.run.microbatches, plan.chunks)
        return simulate(schedule, lambda action: usual[action[:2]])

    def flops_per_step(self, *, recomputed: bool = False) -> float:
        """Return the model FLOPs of one optimizer step over all ranks; NaN if the vocabulary size is unknown.

        Args:
            recomputed: return hardware FLOPs instead, including what the run recomputes in the backward pass.
        """
        if (vocab_size := self.resolved.vocab_size) is None and self.run.model.vocab_size is None:
            return math.nan
        # BERT's head sees the masked positions only; the record has their number
        counted = CONVENTION, (run := self.run).model, run.train.global_batch, vocab_size, self.resolved.head_positions
        return hardware_flops(*counted, recompute=run.plan.recompute) if recomputed else model_flops(*counted)

    def _flop_rate(self, flops: float) -> float:
        """Return the FLOP/s of one device, given those of a step."""
        return flops * (self.tokens_per_second / self.run.tokens_per_step / self.run.plan.world_size)

    def bytes_of(self, *categories: str) -> float:
        """Return the fullest rank's bytes of these categories; all of its device memory for `total`."""
        if (fullest := self._fullest) is None or not fullest.memory:
            return math.nan
        return float(sum((fullest.memory | {"total": fullest.total_bytes})[name] for name in categories))

    def predicted_bytes_of(self, *categories: str) -> float:
        """Return the bytes of these categories that are predicted for the rank of `bytes_of`."""
        sizes = self._predicted_memory
        return float(sum(sizes[name] for name in categories)) if sizes else math.nan

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of the device in the run's precision; NaN on a CPU, whose peak depends on its clock."""
        where = self.environment
        return float_or_nan(None if where.device == "cpu" else peak_flops(where.device_name or "", self.run.precision))

    @cached_property
    def _simulated(self) -> Timeline | None:
        return self.simulated_timeline() if self.timeline and self.has_trusted_code else None

    @cached_property
    def _predicted_memory(self) -> dict[str, int] | None:
        """Predicted bytes of `_fullest` by category; None where they were not counted."""
        fullest = self._fullest
        if fullest is None or not fullest.memory or not self.has_trusted_code:
            return None
        run, resolved = self.point, self.resolved
        alike = dataclasses.replace(run, train=dataclasses.replace(run.train, lr=1.0))  # lr does not change it
        place = self.ranks.index(fullest) // (run.plan.world_size // run.plan.pp)
        return _predicted_memory(alike, resolved.vocab_size, place, resolved.head_positions, self.environment.device)

    @property
    def _fullest(self) -> Rank | None:
        return max(self.ranks, key=lambda rank: rank.total_bytes, default=None)

    def _busiest(self, of: Callable[[dict[str, dict[str, Collective]]], float]) -> float:
        """Return the largest value over the ranks whose traffic was counted."""
        return max((float(of(rank.traffic)) for rank in self.ranks if rank.traffic is not None), default=math.nan)

    def _largest(self, of: Callable[[Rank], int | None]) -> float:
        return max((float(value) for value in map(of, self.ranks) if value is not None), default=math.nan)

    def _sent_in_rings(self, *axes: str) -> float:
        """Return the bytes that the busiest rank sends along these axes in rings: all but sends and all-to-alls."""
        plan, times = self.run.plan, {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        degrees = {axis: plan.zero // plan.ep if axis == "owners" else getattr(plan, axis) for axis in axes}
        # in a ring of t ranks each sends (t - 1) / t of the tensor, in an all-reduce twice that
        moved = lambda counts: sum(count.bytes * times.get(op, 0) for op, count in counts.items())
        return self._busiest(lambda axes: sum(moved(axes.get(axis, {})) * (t - 1) / t for axis, t in degrees.items()))


@functools.lru_cache(maxsize=1024)
def _predicted_memory(*asked: object) -> dict[str, int]:
    """Return the predicted memory, cached: many records differ only in fields that it does not depend on."""
    from impl.cost.memory import memory  # to the byte: the book has activations only

    return memory(*asked).as_dict()  # type: ignore[arg-type]


def point(run: Run) -> Run:
    """Return the run with seed and repeat 0, which repeats and seeds of the run share."""
    return dataclasses.replace(run, seed=0, repeat=0) if run.seed or run.repeat else run


def float_or_nan(value: float | None) -> float:
    """Return the number as a float, NaN for None."""
    return math.nan if value is None else float(value)
