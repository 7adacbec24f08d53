"""Parts of a record: its head, and the raw values of steps, ranks and evaluations."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from harness.records.store import SIMULATED

MOST = 1e18
"""Largest number accepted in a record: sums and products of such numbers are still finite."""
READ = ConfigDict(extra="ignore", allow_inf_nan=False, validate_by_name=True)

Count = Annotated[int, Field(ge=0, le=int(MOST))]
Some = Annotated[int, Field(ge=1, le=int(MOST))]
Difference = Annotated[int, Field(ge=-int(MOST), le=int(MOST))]
Size = Annotated[float, Field(ge=0, le=MOST)]
Positive = Annotated[float, Field(ge=1e-12, le=MOST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Loss or gradient norm of a training run that may diverge."""
Nats = Annotated[float, Field(ge=0, le=100)]
"""Nats per token or word, small enough for a finite perplexity."""
Span = tuple[str, Number, Number]
"""Action of a pipeline rank, its start and its end in seconds."""
Status = Literal["ok", "nan", "invalid", "oom", "failed", "timeout"]
MOST_OTHERS = 0.1
"""Share of the processors' time that others may take while a run trains, without a mark; chosen, not measured."""
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "rest")
"""Categories of a step's device memory."""


@dataclass(config=READ, slots=True)
class Collective:
    """Calls and bytes of one kind of collective in one step."""

    calls: Count = 0
    bytes: Count = 0


@dataclass(config=READ)
class Limit:
    """Seconds that parts of a step take when run alone."""

    gemm_seconds: Size
    attention_seconds: Size
    collective_seconds: Size


@dataclass(config=READ)
class Parts:
    """Seconds of a profiled step by kind of work."""

    products: Size
    attention: Size
    optimizer: Size
    operators: Size
    communication: Size
    rest: Number


@dataclass(config=READ)
class Profile:
    """One step under the profiler."""

    seconds: Positive
    parts: Parts


@dataclass(config=READ, slots=True, kw_only=True)
class HostUse:
    """Processor time of a rank's cores while it trained, in seconds of one core."""

    local_rank: Count
    core: Count
    """First of the cores that the rank may use."""
    cores: Some
    seconds: Size
    """Time that training took."""
    own: Size
    """Processor time of the rank itself."""
    busy: Size
    """Processor time of all programs on these cores."""
    stolen: Size
    """Time that the host of a virtual machine gave to others."""


def on_same_cores(uses: Sequence[HostUse | None]) -> list[list[HostUse]]:
    """Return the ranks that may use the same cores of one host, together; none where a rank did not measure it."""
    hosts, host = dict[tuple[int, int, int], list[HostUse]](), -1
    for use in uses:
        if use is None:
            return []
        host += use.local_rank == 0
        hosts.setdefault((host, use.core, use.cores), []).append(use)
    return [*hosts.values()]


def others_share(uses: Sequence[HostUse | None]) -> float:
    """Return the share of the processors' time that other programs and machines took, on the busiest host.

    Supervisors of the run count as others. NaN where a rank did not measure it.

    Args:
        uses: of every rank; those of one host stand together, in order.
    """
    largest = lambda found, field: max(getattr(use, field) for use in found)
    others = lambda found: max(0.0, largest(found, "busy") - math.fsum(use.own for use in found))
    times = ((found, largest(found, "seconds") * found[0].cores) for found in on_same_cores(uses))
    return max(((others(found) + largest(found, "stolen")) / time for found, time in times if time), default=math.nan)


@dataclass(config=READ, slots=True)
class Rank:
    """Measurements of one rank."""

    rank: Count = 0
    peak_memory_bytes: Count | None = None
    memory_kind: str | None = None
    """Method of the peak's measurement, as `peak RSS`."""
    gemm_flops_per_s: Positive | None = None
    """FLOP/s of the rank's matrix products alone."""
    state_bytes: dict[str, Count] | None = None
    """Bytes of weights and optimizer states, `split` over tensor-parallel ranks or `whole`."""
    activation_bytes: dict[str, Count] | None = None
    """Bytes kept of one microbatch, by the whole `model` and by one `layer`."""
    memory: dict[str, Difference] | None = None
    """Bytes at the fullest moment of a step, by CATEGORIES, plus `host` memory."""
    traffic: dict[str, dict[str, Collective]] | None = None
    """Collectives of a step by axis of the mesh and kind."""
    timeline: list[Span] | None = None
    """Actions of the last step of a pipeline."""
    limit: Limit | None = None
    profile: Profile | None = None
    host: HostUse | None = None

    @property
    def total_bytes(self) -> int:
        """Device bytes at the fullest moment of a step; 0 where not counted."""
        return sum(size for name, size in (self.memory or {}).items() if name != "host")


@dataclass(config=READ)
class Dimensions:
    """Magnitudes of the residual stream's dimensions in an evaluation."""

    layers: dict[str, list[Size]]
    """Root mean square of each dimension, by layer."""
    norms: dict[str, dict[str, tuple[Number, Count]]]
    """How far the largest value of each norm's `weight` and `bias` stands out, and its dimension."""
    nats: Finite
    zeroed: list[tuple[Count, Finite]] | None = None
    """Nats per token with one dimension set to zero: the largest, and one of average size."""


HELD_OUT = "valid"
"""Name of the evaluations of the data's own held-out text."""


@dataclass(config=READ, slots=True)
class Evaluation:
    """Sums of one evaluation of a text or of questions."""

    name: str
    kind: Literal["causal", "masked", "words", "last_word", "choice"]
    step: Count
    nats: Finite | None = None
    tokens: Count | None = None
    words: Count | None = None
    bytes: Count | None = None
    correct: Count | None = None
    total: Count | None = None
    key: dict[str, str | int | float | bool | None] | None = None
    """Comparability key: values that must be equal in evaluations that are compared."""
    dimensions: Dimensions | None = None

    def per(self, unit: str) -> float:
        """Return nats per `tokens`, `words` or `bytes`; NaN where they were not counted."""
        count = getattr(self, unit)
        return self.nats / count if self.nats is not None and count else math.nan

    @property
    def token_perplexity(self) -> float:
        """Exponential of the nats per token."""
        return _exp(self.per("tokens"))

    @property
    def word_perplexity(self) -> float:
        """Exponential of the nats per word."""
        return _exp(self.per("words"))

    @property
    def bits_per_byte(self) -> float:
        """Bits that coding one byte of the text takes."""
        return self.per("bytes") / math.log(2)

    @property
    def accuracy(self) -> float:
        """Share of the questions that are answered correctly."""
        return self.correct / self.total if self.correct is not None and self.total else math.nan


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@dataclass(config=READ, slots=True)
class Sample:
    """Entropy of the validation sample."""

    nats_per_token: Nats | None = None
    standard_error: Size | None = None


@dataclass(config=READ, slots=True)
class Entropy:
    """Exact entropy rates of a synthetic language."""

    nats_per_token: Nats
    valid: Sample | None = None

    @property
    def floor(self) -> float:
        """Nats per token that no model can be expected to beat on the validation sample."""
        return self.nats_per_token if not self.valid or self.valid.nats_per_token is None else self.valid.nats_per_token


@dataclass(config=READ, slots=True)
class Data:
    """Text that the model was trained on."""

    name: str | None = None
    sha256: str | None = None
    valid_tokens: Some | None = None
    entropy: Entropy | None = None


@dataclass(config=READ, slots=True)
class Resolved:
    """Sizes of a run that are known only with its data, such as the vocabulary, and a summary of that data."""

    vocab_size: Annotated[int, Field(ge=2, le=10**9)] | None = None
    padded_vocab_size: Some | None = None
    parameters: Some | None = None
    head_positions: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Positions of a sequence that the output head is computed for."""
    data: Data | None = None


@dataclass(config=READ)
class Git:
    """Version of the code that ran."""

    commit: str | None = None
    dirty: bool = False
    diff_sha256: str | None = None
    step: Count = 0
    """First of the steps that it trained."""
    before: "list[Git]" = field(default_factory=list)
    """Other code that trained earlier steps, before an interruption; without a commit where that is not known."""


@dataclass(config=READ, slots=True)
class Environment:
    """Hardware and software of a measured run, or the system that a run was simulated for."""

    device: str | None = None
    device_name: str | None = None
    system: str | None = None
    """Name of the simulated system."""
    stack: str | None = None
    """Simulated software stack."""
    backend: str | None = None
    cores: Count | None = None
    memory_bytes: Count | None = None
    processor: str | None = None
    cpu_capability: str | None = None
    os: str | None = None
    python: str | None = None
    lock_sha256: str | None = None
    command: list[str] | None = None
    packages: dict[str, str] | None = None
    variables: dict[str, str] | None = None
    git: Git | None = None
    own_code: dict[str, str] | None = None
    """SHA-256 of the files of a schedule or norm placement of the user's own, by name; None without any."""


@dataclass(config=READ, slots=True)
class Prediction:
    """Simulated values of a step other than its recorded seconds and bytes."""

    seconds: Number | None = None
    low: Number | None = None
    """Lower end of the 90% interval of seconds; `high` is the upper one."""
    high: Number | None = None
    bubble: Number | None = None
    microbatches_in_flight: Number | None = None
    warnings: list[str] = field(default_factory=list)
    fitted: str | None = None
    """Name of the published row of this run that the system's constants were fitted to; None if there is none."""
    calibrated_on: Count | None = None
    """Number of rows that the system's constants were fitted to; None in records that do not say so."""
    slopes: dict[str, Number] = field(default_factory=dict)
    """Change of log seconds by constant of the system, when the constant is off by its standard deviation."""
    own_sd: Size = 0.0
    """Standard deviation of log seconds that this run does not share with others on the system."""
    without: dict[str, Positive] = field(default_factory=dict)
    """Seconds with a part of the machine idealised, a null model: `network`, `computing` or `bubble` for free."""


@dataclass(config=READ)
class Forecast:
    """Seconds of a step that were predicted before the run began."""

    system: str
    """Name of the system that they were predicted for."""
    seconds: Positive
    low: Positive
    """Lower end of the interval that should hold nine of ten steps; `high` is the upper one."""
    high: Positive
    made: str
    """Time of the prediction."""


@dataclass(config=READ)
class LossForecast:
    """Loss on held-out text after the last step, in nats per token, that a scaling law gave before the run began."""

    nats: Positive
    low: Positive
    """Lower end of the interval that should hold nine of ten such runs; `high` is the upper one."""
    high: Positive
    runs: Count
    """Number of finished runs that the law was fitted to."""
    off: Size
    """Root mean square of the logarithm of their losses over the law's."""
    made: str
    """Time of the forecast."""


@dataclass(config=READ, slots=True)
class Times:
    """Start, end and durations of a run."""

    started: str | None = None
    ended: str | None = None
    startup_seconds: Number | None = None
    training_seconds: Number | None = None
    evaluation_seconds: Number | None = None
    total_seconds: Number | None = None
    resumed_at: list[Count] = field(default_factory=list)
    """Steps at which training was resumed after an interruption."""


@dataclass(config=READ)
class Try:
    """Outcome of an earlier attempt by the same command."""

    status: str | None = None
    reason: str | None = None
    cause: str | None = None
    attempt: str | None = None
    ended: str | None = None


@dataclass(config=READ, kw_only=True, eq=False)
class Head:
    """Identity and outcome of a record's run."""

    schema: Literal[1, 2]
    """Version of the document; those of version 2 begin with a digest."""
    id: str
    experiment: str
    tier: str
    source: str = "measured"
    status: Status
    reason: str | None = None
    cause: str | None = None
    """Kind of the failure; None in records written before causes existed."""
    attempt: str | None = None
    tries: list[Try] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @property
    def is_simulated(self) -> bool:
        """True if the record was simulated and nothing was run."""
        return self.source == SIMULATED

    def as_try(self) -> dict[str, Any]:
        """Return the entry for this record in the `tries` of a later one."""
        return dataclasses.asdict(Try(self.status, self.reason, self.cause, self.attempt, self.times.ended))
