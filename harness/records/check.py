"""Whether a record holds what tables and figures read from it: a file that anybody may have written or damaged."""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from impl.pipeline.schedule import Action
from impl.pipeline.schedules import SCHEDULES, build
from impl.run import Run

MOST = 1e18
"""Beyond what anything here counts; sums and products of such numbers are still numbers."""
LOOSE = ConfigDict(extra="allow", allow_inf_nan=False)

Count = Annotated[int, Field(ge=0, le=int(MOST))]
Some = Annotated[int, Field(ge=1, le=int(MOST))]
Difference = Annotated[int, Field(ge=-int(MOST), le=int(MOST))]
Size = Annotated[float, Field(ge=0, le=MOST)]
Positive = Annotated[float, Field(ge=1e-12, le=MOST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Of training that diverges, too."""
Nats = Annotated[float, Field(ge=0, le=100)]
"""Of a token or word whose perplexity is taken."""
ALWAYS = {
    "model": ("family", "num_layers", "hidden_size", "num_heads", "seq_len", "norm_placement"),
    "plan": ("dp",),
    "train": ("lr", "steps", "global_batch", "microbatch"),
    "data": ("dataset",),
}
"""Of a configuration, what every record has had from the first one on; newer fields are at their defaults."""
Ops = dict[str, "Moved"]
Span = tuple[str, Number, Number]


@with_config(LOOSE)
class Moved(TypedDict, total=False):
    """Collectives of one kind in one step."""

    calls: Count
    bytes: Count


@with_config(LOOSE)
class Rank(TypedDict, total=False):
    """What one rank measured."""

    rank: Count
    peak_memory_bytes: Count | None
    memory_kind: str | None
    gemm_flops_per_s: Positive | None
    state_bytes: dict[str, Count] | None
    activation_bytes: dict[str, Count] | None
    memory: "Memory | None"
    traffic: dict[str, Ops]
    timeline: list[Span] | None
    limit: "Limit | None"
    profile: "Profile | None"


@with_config(LOOSE)
class Memory(TypedDict, total=False):
    """Bytes in a step by category."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    buffers: Count
    rest: Difference
    host: Count


@with_config(LOOSE)
class Limit(TypedDict):
    """What parts of a step take alone."""

    gemm_seconds: Size
    attention_seconds: Size
    collective_seconds: Size


@with_config(LOOSE)
class Parts(TypedDict):
    """Seconds of a profiled step."""

    products: Size
    attention: Size
    optimizer: Size
    operators: Size
    communication: Size
    rest: Number


@with_config(LOOSE)
class Profile(TypedDict):
    """A profiled step."""

    seconds: Positive
    parts: Parts


@with_config(LOOSE)
class Step(TypedDict, total=False):
    """One optimizer step."""

    step: Count
    loss: Finite | None
    grad_norm: Finite | None
    lr: Finite | None
    seconds: Annotated[list[Positive], Field(min_length=1)]
    skipped: bool


@with_config(LOOSE)
class Evaluation(TypedDict):
    """One evaluation after a step."""

    name: str
    kind: Literal["causal", "masked", "words", "last_word", "choice"]
    step: Count


@with_config(LOOSE)
class Counted(Evaluation, total=False):
    """One evaluation, with its sums."""

    nats: Finite | None
    tokens: Count | None
    words: Count | None
    bytes: Count | None
    correct: Count | None
    total: Count | None
    key: dict[str, str | int | float | bool | None] | None


@with_config(LOOSE)
class Sample(TypedDict, total=False):
    """The entropy of the text that was validated on."""

    nats_per_token: Nats
    standard_error: Size | None


@with_config(LOOSE)
class Entropy(TypedDict):
    """A language's exact rates."""

    nats_per_token: Nats


@with_config(LOOSE)
class Rates(Entropy, total=False):
    """A language's exact rates, and of its sample."""

    valid: Sample | None


@with_config(LOOSE)
class Data(TypedDict, total=False):
    """What was trained on."""

    name: str
    sha256: str
    entropy: Rates | None


@with_config(LOOSE)
class Resolved(TypedDict, total=False):
    """What followed from the data."""

    vocab_size: Annotated[int, Field(ge=2, le=10**9)]
    padded_vocab_size: Some
    parameters: Some
    head_positions: Annotated[int, Field(ge=0, le=10**9)] | None
    data: Data | None


@with_config(LOOSE)
class Environment(TypedDict, total=False):
    """Where it was measured."""

    device: str | None
    device_name: str | None
    backend: str | None
    cores: Count | None
    memory_bytes: Count | None
    processor: str | None
    lock_sha256: str | None
    command: list[str] | None
    packages: dict[str, str] | None
    variables: dict[str, str] | None
    git: "Git | None"


@with_config(LOOSE)
class Git(TypedDict, total=False):
    """The code that measured."""

    commit: str | None
    dirty: bool
    diff_sha256: str | None


@with_config(LOOSE)
class Prediction(TypedDict, total=False):
    """What was simulated of a step, besides its seconds and bytes."""

    bubble: Number | None
    microbatches_in_flight: Number | None
    warnings: list[str]


@with_config(LOOSE)
class Times(TypedDict, total=False):
    """When, and how long."""

    started: str | None
    ended: str | None
    training_seconds: Number | None
    total_seconds: Number | None
    resumed_at: list[Count] | None


@with_config(LOOSE)
class Inside(TypedDict):
    """A record, whatever came of the run."""

    config: Run
    status: Literal["ok", "nan", "invalid", "oom", "failed", "timeout"]


@with_config(LOOSE)
class Whole(Inside, total=False):
    """A record with all that may be in it."""

    id: str
    source: str
    reason: str | None
    cause: str
    engine: dict[str, Any]
    resolved: Resolved | None
    environment: Environment | None
    prediction: Prediction | None
    times: Times | None
    ranks: list[Rank] | None
    steps: list[Step] | None
    evaluations: list[Counted] | None
    log: list[str] | None
    tries: list[dict[str, Any]] | None


_WHOLE = TypeAdapter(Whole)


def why_not_whole(record: dict[str, Any], text: bytes | None = None) -> str | None:
    """The first thing in a record that nobody can read, in one line; None: it is whole.

    Nothing that it names is loaded or run for this.

    Args:
        text: the record as JSON, where it is at hand.
    """
    try:
        found = _WHOLE.validate_json(json.dumps(record) if text is None else text, strict=True)
        given = record["config"]
        missing = [
            f"{part}.{name}" for part, names in ALWAYS.items() for name in names if name not in given.get(part, {})
        ]
        if why := f"config: no {missing[0]}" if missing else _why_inconsistent(found):
            return why
        named, run_id = found.get("id"), found["config"].id
        return None if named == run_id else f"config: it is that of the run {run_id}, not of {named!r:.60}"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
        return f"{where or 'record'}: {' '.join(first['msg'].split())}"[:300]
    except (ValueError, RecursionError) as error:  # a number that JSON has no word for, lists in lists without end
        return f"not a record: {' '.join(str(error).split())}"[:300]


def _why_inconsistent(record: Whole) -> str | None:
    """What contradicts the configuration; None: nothing."""
    run, ranks = record["config"], record.get("ranks") or []
    if len(ranks) > run.plan.world_size:
        return f"ranks: {len(ranks)} of {run.plan.world_size}"
    for i, step in enumerate(record.get("steps") or []):
        if "seconds" in step and len(step["seconds"]) > run.plan.world_size:
            return f"steps.{i}.seconds: of {len(step['seconds'])} ranks, there are {run.plan.world_size}"
    if any(one.get("total") and one.get("correct") is None for one in record.get("evaluations") or []):
        return "evaluations: answers were counted, but not the right ones"
    if any(rank.get("memory") for rank in ranks) and (why := _why_no_prediction(run, record)):
        return why
    rows = [timeline for rank in ranks if (timeline := rank.get("timeline"))]
    return _why_no_timeline(run, rows) if rows else None


def _why_no_prediction(run: Run, record: Whole) -> str | None:
    """Memory by category stands beside what was predicted: what that is made from."""
    if run.plan.schedule in SCHEDULES and (reason := run.why_invalid()):
        return f"config: {reason}"
    categories = {"parameters", "gradients", "optimizer", "activations", "buffers", "rest"}
    for rank in record.get("ranks") or []:
        if (memory := rank.get("memory")) and (missing := categories - memory.keys()):
            return f"ranks.{rank.get('rank')}.memory: no {', '.join(sorted(missing))}"
    resolved, environment = record.get("resolved") or {}, record.get("environment") or {}
    if "vocab_size" not in resolved or resolved.get("head_positions") is None:
        return "resolved: no vocab_size or head_positions"
    if environment.get("device") not in ("cpu", "cuda"):
        return "environment.device: neither cpu nor cuda"
    return None


def _why_no_timeline(run: Run, rows: list[list[Span]]) -> str | None:
    """A timeline stands beside the simulation of its schedule, whose kinds of action it must have."""
    try:
        found = {Action.parse(text)[:2] for row in rows for text, _, _ in row}
    except ValueError as error:
        return f"ranks.timeline: {error}"
    lengths = [end - start for row in rows for _, start, end in row]
    if min(lengths) < 0 or max(lengths) == 0:
        return "ranks.timeline: actions that end before they begin, or take no time"
    if run.plan.schedule not in SCHEDULES:
        return None
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
    wanted = {action[:2] for row in schedule.rows for action in row}
    return None if wanted <= found else f"ranks.timeline: not all actions of {run.plan.schedule}"
