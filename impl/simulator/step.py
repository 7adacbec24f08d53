"""Time and memory of one training step of a run on a system: its schedule table, executed with predicted seconds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Literal, NamedTuple

from impl.cost.flops import hardware_flops, model_flops
from impl.cost.memory import Memory, memory_of_ranks
from impl.cost.place import Place, Sizes, ranks_of_stages
from impl.cost.traffic import blocks as blocks_of
from impl.errors import InputError
from impl.pipeline.schedule import Op as Work
from impl.pipeline.stage import Stage, partition, split
from impl.run import Run
from impl.simulator.operations import LAYERS, Block, BlockName, block, names_of
from impl.simulator.passes import Passes, adjacent, passes, stage_passes
from impl.simulator.periodic import Seconds, execute
from impl.simulator.reduction import States, finish, moving, sharded, states
from impl.simulator.room import Fit
from impl.simulator.seconds import collective, group, send
from impl.simulator.system import System

Transfer = Callable[[int, int], float]
Stages = Literal["even"] | tuple[Stage, ...] | None
FIELD = {Work.F: "forward", Work.B: "backward", Work.I: "input_gradient", Work.W: "weight_gradient"}
"""Field of `Passes` with the seconds of an operation."""
WAITS = ("tensor_parallel", "context", "pipeline", "gather", "host", "experts")
"""Fields of `Passes` that are not computation."""
EXPOSED = {
    "tp": ("tensor_parallel",),
    "cp": ("context",),
    "ep": ("experts",),
    "pp": ("pipeline",),
    "dp": ("gradients",),
    "ends": ("ends",),
    "zero": ("gather", "parameters"),
}
"""Parts of a step in which a rank waits for communication, by the axis of the mesh that it goes along."""


@dataclass(frozen=True)
class Prediction:
    """Predicted step of a run on a system."""

    seconds: float
    tokens_per_s: float
    model_flops_per_gpu_s: float
    """Model FLOPs, as PTD-P counts them, per second and device."""
    hardware_flops_per_gpu_s: float
    """FLOPs with recomputation (PTD-P's equation 3), per second and device."""
    mfu: float | None
    """Model FLOP/s over the peak; None: the peak is not known."""
    hfu: float | None
    bubble: float
    """Idle over busy seconds of the pipeline, as PTD-P counts."""
    exposed: dict[str, float]
    """Seconds that the rank which ends the step waits, by axis."""
    parts: list[dict[str, float]]
    """Seconds of each pipeline rank by part; they sum to `seconds`."""
    memory: list[Memory] = field(repr=False)
    """Memory of each pipeline rank."""
    fit: Fit
    """Whether memory suffices on every rank."""

    @property
    def fits(self) -> bool:
        """False if memory does not suffice, as far as is known."""
        return self.fit != "does not fit"


class _Prepared(NamedTuple):
    """Quantities of a run that do not depend on the system."""

    parts: tuple[Stage, ...]
    """Stages of the model, in order."""
    blocks: dict[BlockName, Block]
    states: list[States]
    """States of every pipeline rank."""
    rank_of: tuple[int, ...]
    """Pipeline rank of every stage."""
    head_positions: int

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


class _Carried(NamedTuple):
    """Executed step on a system."""

    seconds: float
    bubble: float
    ranks: list[dict[str, float]]
    """Seconds of each rank by part, one after another."""


def predict(
    run: Run,
    vocab_size: int,
    system: System,
    *,
    stages: Stages = None,
    head_positions: int | None = None,
    slowdown: Mapping[int, float] | None = None,
) -> Prediction:
    """Predict time, FLOP/s and memory of one step.

    Args:
        vocab_size: tokens of the data, or the model's own.
        stages: even: as many layers in each, as the papers' runs have; None: as this project's engine splits them, the
            head's weight counted; else all stages of the model, in order.
        head_positions: positions of a sequence that the output head scores; None: all.
        slowdown: factor on a pipeline rank's computing seconds over the system's, where they differ.

    Raises:
        InputError: the run is impossible.
    """
    if problems := run.problems():
        raise InputError(problems[0])
    prepared = _prepared(run, vocab_size, stages, head_positions)
    carried = _carry_out(run, system, prepared, slowdown or {})
    factor = system.correction(run)
    seconds = carried.seconds * factor
    model = model_flops("ptdp", run.model, run.train.global_batch, vocab_size)
    hardware = hardware_flops("ptdp", run.model, run.train.global_batch, vocab_size, recompute=run.plan.recompute)
    devices, peak = run.plan.world_size, system.peak(run.precision)
    counted = system.with_scores(run)
    positions, live = prepared.head_positions, system.habits.live_parameters
    kept = memory_of_ranks(counted, vocab_size, positions, system.device.kind, prepared.parts, live)
    critical = min(carried.ranks, key=lambda parts: parts["wait"])
    return Prediction(
        seconds=seconds,
        tokens_per_s=run.tokens_per_step / seconds,
        model_flops_per_gpu_s=model / seconds / devices,
        hardware_flops_per_gpu_s=hardware / seconds / devices,
        mfu=None if peak is None else model / seconds / devices / peak,
        hfu=None if peak is None else hardware / seconds / devices / peak,
        bubble=carried.bubble,
        exposed={axis: factor * sum(critical[part] for part in parts) for axis, parts in EXPOSED.items()},
        parts=[{name: factor * one for name, one in parts.items()} for parts in carried.ranks],
        memory=kept,
        fit=system.device.fit(max(one.total for one in kept)),
    )


def step_seconds(
    run: Run, vocab_size: int, system: System, *, stages: Stages = None, head_positions: int | None = None
) -> float:
    """Return the seconds of one step of a valid run."""
    prepared = _prepared(run, vocab_size, stages, head_positions)
    return _carry_out(run, system, prepared, {}).seconds * system.correction(run)


def pipeline_of(
    run: Run, vocab_size: int, system: System, *, stages: Stages = None, head_positions: int | None = None
) -> tuple[Seconds, Transfer]:
    """Return the seconds of every pass of a valid run's pipeline, by operation and stage, and those between ranks."""
    prepared = _prepared(run, vocab_size, stages, head_positions)
    factor = system.correction(run)
    seconds, delay, _ = _timed(run, system, prepared, {})
    corrected = {op: [factor * one for one in of_stages] for op, of_stages in seconds.items()}
    return corrected, lambda sender, receiver: factor * delay(sender, receiver)


def stages_of(run: Run, vocab_size: int, stages: Stages) -> tuple[Stage, ...]:
    """Return all stages of the model, in order, as `predict` takes them."""
    count = run.plan.pp * run.plan.chunks
    if stages is None:
        return split(run.model, vocab_size, count)
    if stages == "even":
        layers = partition(run.model.num_layers, count)
        return tuple(Stage(own, i == 0, i == count - 1) for i, own in enumerate(layers))
    if len(stages) != count:
        raise InputError(f"{len(stages)} stages were given; valid: plan.pp x plan.chunks, {count}")
    return stages


@lru_cache(maxsize=4096)
def _prepared(run: Run, vocab_size: int, stages: Stages, head_positions: int | None) -> _Prepared:
    parts = stages_of(run, vocab_size, stages)
    positions = run.model.seq_len if head_positions is None else head_positions
    blocks: dict[BlockName, Block] = {name: block(run, vocab_size, name, positions) for name in names_of(run.model)}
    alike: dict[object, States] = {}
    found = []
    for rank in range(run.plan.pp):
        place = Place(run, vocab_size, rank, parts)
        key = tuple(tuple(blocks_of(run, [stage]).values()) for stage in place.stages)
        if key not in alike:
            alike[key] = states(place)
        found.append(alike[key])
    return _Prepared(parts, blocks, found, ranks_of_stages(run), positions)


def _carry_out(run: Run, system: System, prepared: _Prepared, slowdown: Mapping[int, float]) -> _Carried:
    plan, p = run.plan, run.plan.pp
    seconds, delay, through = _timed(run, system, prepared, slowdown)
    ran = execute(plan.schedule, p, run.microbatches, plan.chunks, seconds, delay)
    ends, busy = ran.ends, ran.busy
    last = [[ran.last[stage] for stage in prepared.stages_of(rank)] for rank in range(p)]
    forward = [sum(through[stage].forward for stage in prepared.stages_of(rank)) for rank in range(p)]
    after = finish(system, run, prepared.states, ends, last, forward)
    ranks = []
    for rank in range(p):
        stages = [one for one, owner in zip(through, prepared.rank_of, strict=True) if owner == rank]
        waits = {name: run.microbatches * sum(getattr(one, name) for one in stages) for name in WAITS}
        own = {"compute": busy[rank] - sum(waits.values()), **waits}
        ranks.append(own | {"pipeline": waits["pipeline"] + ends[rank] - busy[rank]} | after[rank])
    return _Carried(sum(ranks[0].values()), p * max(ends) / sum(busy) - 1, ranks)


def _timed(
    run: Run, system: System, prepared: _Prepared, slowdown: Mapping[int, float]
) -> tuple[Seconds, Transfer, list[Passes]]:
    """Return the seconds of all passes, those between ranks, and every stage's passes in parts."""
    each: dict[BlockName, Passes] = {
        name: passes(system, run, one, is_layer=name in LAYERS) for name, one in prepared.blocks.items()
    }
    transfer = transfer_seconds(run, system)
    through = _through(run, system, prepared, each, transfer)
    seconds = {
        op: [getattr(one, name) * _slower(one, op, slowdown.get(prepared.rank_of[i])) for i, one in enumerate(through)]
        for op, name in FIELD.items()
    }
    under_way = 1 - system.constant("send_blocks")
    return seconds, lambda sender, receiver: under_way * transfer(sender, receiver), through


def _slower(one: Passes, op: Work, slowdown: float | None) -> float:
    """Return how many times as long a pass takes on a rank whose computing is slower; its waits are as they were."""
    if slowdown is None or op is Work.W:
        return slowdown or 1.0
    waits = sum(getattr(one, name) for name in WAITS) / (one.forward + one.backward)
    return slowdown + (1 - slowdown) * waits


def _through(
    run: Run, system: System, prepared: _Prepared, each: Mapping[BlockName, Passes], transfer: Transfer
) -> list[Passes]:
    """Return every stage's passes, including transfers of ZeRO's stages 2 and 3 and waits for neighbours."""
    plan, wait, blocks = run.plan, system.constant("send_wait"), system.constant("send_blocks")
    found = [stage_passes(system, run, each, stage) for stage in prepared.parts]
    waited = partial(sharded, system, ahead=plan.overlap_param_gather, behind=plan.overlap_grad_reduce)
    rank_of = dict(enumerate(prepared.rank_of))
    for rank, state in enumerate(prepared.states):
        reducing, gathering = 0.0, 0.0
        if plan.zero_stage >= 2:
            moved = moving(system, run, state)
            reducing = moved.reducing / run.microbatches
            gathering = moved.gathering / run.microbatches / 2 * (plan.zero_stage == 3)
        for i, share, layers in zip(prepared.stages_of(rank), state.shares, state.layers, strict=True):
            one = found[i]
            parts = share * gathering, share * reducing
            forward = waited(parts[0], 0.0, one.forward, layers)
            backward, inputs = (waited(*parts, c, layers) for c in (one.backward, one.input_gradient))
            others = [rank_of.get(i + way, rank) for way in (1, -1)]
            waits = wait * sum(other != rank for other in others)
            ahead, back = (waits + (blocks * transfer(rank, one) if one != rank else 0.0) for one in others)
            found[i] = one._replace(
                forward=one.forward + forward + ahead,
                backward=one.backward + backward + back,
                input_gradient=one.input_gradient + inputs + back,
                pipeline=ahead + back,
                gather=forward + backward,
            )
    return found


def transfer_seconds(run: Run, system: System) -> Transfer:
    """Return a function of the seconds of a microbatch's activations from one pipeline rank to another."""
    plan, node = run.plan, system.node.size.value
    sizes, ranks = Sizes(run), plan.world_size // plan.pp
    gathered = 0.0
    if run.scatters and plan.x > 1:
        gathered = float(
            collective(system, "all_gather", sizes.activations, group(("tp",), adjacent(plan, plan.x), system))
        )
    shares = {level.size.value: system.rate_out(level) / min(ranks, level.size.value) for level in system.levels}

    @cache
    def sent(is_inter: bool, most: float) -> float:
        return gathered + send(system, sizes.transferred, is_inter=is_inter, senders=min(ranks, node), most=most)

    def transfer(sender: int, receiver: int) -> float:
        apart = lambda size: sender * ranks // size != receiver * ranks // size
        return sent(apart(node), min((share for size, share in shares.items() if apart(size)), default=math.inf))

    return transfer
