"""Step time and memory of many plans at once, in closed form: prunes plans before events simulate the best of them.

Seconds and bytes of blocks, transfers and states are those of the event simulation, computed once for all plans that
share them; only how a pipeline adds them up is in closed form. In steady state a microbatch takes as long as the
slowest rank computes, or as the microbatches in flight take to go round; the first one fills the pipeline.

Where only every k-th layer has experts, each layer counts as the mean of k: exact for stages of a multiple of k layers.

Letters: m microbatches, p pipeline ranks, v chunks of each. Ranks are of three kinds: the first, those between (the
fullest of them) and the last. Shapes: a column has a number for each plan, [n]; a quantity of ranks [3, n], by kind.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from impl.cost.buffers import gathered_elements
from impl.cost.memory import state_parts
from impl.cost.moments import fullest_of, of_stage
from impl.cost.place import Place, Sizes, parameter_bytes
from impl.pipeline.schedule import Action, Op
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.simulator.buckets import OfUnit, buckets_of, by_kind, of_unit
from impl.simulator.columns import BETWEEN, FIRST, LAST, Array, Held, Hops, Kept, Law, Ranks, Size, Work, columns
from impl.simulator.operations import LAYERS, BlockName, block, names_of
from impl.simulator.passes import Passes, passes, stage_passes
from impl.simulator.plans import DEFAULTS, FLAGS, NAMES, Plans, run_of, value_of
from impl.simulator.reduction import States, beyond, blocks_of, ends_seconds, moving, sharded, states, update
from impl.simulator.step import stages_of, transfer_seconds
from impl.simulator.system import System

T = TypeVar("T")
GPIPE, SPLIT = map(NAMES["schedule"].index, ("gpipe", "zb_h1"))


class Estimate(NamedTuple):
    """Step time and memory of each plan."""

    seconds: Array
    bytes: Array
    """Memory of the fullest device, in bytes."""


class Parts(NamedTuple):
    """Memory of a device by category, in bytes."""

    parameters: Size
    gradients: Size
    optimizer: Size
    activations: Size
    buffers: Size
    rest: Size


class Details(NamedTuple):
    """Step time of each plan, and what it and the memory are made of."""

    seconds: Array
    memory: list[Parts]
    """Memory at several moments of the step, one of which needs most."""
    passes: Work
    """Seconds of a microbatch in the first, a middle and the last stage. Shape: [3, n]."""
    hops: Hops
    """Seconds of a microbatch's transfers that no rank waits for."""


class ClosedForm:
    """Estimator of plans for a model, a global batch and a system; intermediate results are cached."""

    def __init__(
        self,
        base: Run,
        vocab_size: int,
        system: System,
        gpus: int,
        *,
        head_positions: int | None = None,
        given: Collection[str] = (),
    ) -> None:
        """Store what all plans have in common.

        Args:
            base: the run whose plan and microbatch are searched.
            gpus: devices of each plan.
            head_positions: positions of a sequence that the output head scores; None: all.
            given: fields of a run, by dotted name, whose values replace the habits of the system's software.
        """
        self.period = base.model.experts_every
        self.units, self.law = units_of(self.period), partial(Law.of, period=self.period)
        self.positions = head_positions or base.model.seq_len
        self.base, self.vocab_size, self.system, self.gpus = system.habits.of(base, given), vocab_size, system, gpus
        self.given = given
        self.known: dict[tuple[Any, ...], Any] = {}
        """Results of laws, by the law's name and the knobs' values."""

    def estimate(self, plans: Plans) -> Estimate:
        """Return step time and memory of each plan, with the habits of the system's software applied."""
        common = self._common(plans, self.base.train.global_batch)
        return Estimate(self._seconds(*common), np.maximum.reduce([sum(parts) for parts in self._moments(*common)]))

    def details(self, plans: Plans, batch: Size) -> Details:
        """Return step time and memory of each plan with a global batch of its own, in parts."""
        plans, ranks, held = common = self._common(plans, batch)
        blocks, hops, under_way = self._passing(plans)
        stages = ranks._replace(p=ranks.p * ranks.v, v=1, layers=ranks.layers / ranks.v)
        moved = (law.at(ranks) / ranks.v for law in (held.reducing, held.gathering))
        factor = self._gather(plans, self.system.correction, "tp", "microbatch")
        passes = Work(*(factor * one for one in self._work(plans, stages, blocks, hops.longest, *moved)))
        hops = Hops(*(factor * one for one in under_way))
        return Details(self._seconds(*common), self._moments(*common), passes, hops)

    def _common(self, plans: Plans, batch: Size) -> tuple[Plans, Ranks, Held]:
        """Return plans with the habits of the system's software, their ranks, and what these hold."""
        habits = ((knob, f"plan.{knob}") for knob in FLAGS if f"plan.{knob}" not in self.given)
        ways = ((knob, self.system.habits.fields.get(name)) for knob, name in habits)
        fixed = {knob: np.full(len(plans), int(way)) for knob, way in ways if way is not None}
        plans = Plans({**plans.columns, **fixed})
        m = batch // (plans["dp"] * plans["microbatch"])
        ranks = self._gather(plans, self._ranks, "pp", "chunks")
        blocks = np.maximum(ranks.layers / ranks.v, 1)
        if self.base.model.shared_layers:
            blocks = np.full_like(blocks, blocks_of(self.base, self.vocab_size, self.units[-1]))
        ranks = ranks._replace(m=m, schedule=plans["schedule"], blocks=blocks)
        knobs = ("tp", "pp", "dp", "zero_stage", "zero_group", "sequence_parallel", "offload_optimizer")
        pp, near = plans["pp"], plans
        if not self.system.habits.owns_tensors:  # else states depend on pp beyond what is near
            inner = plans["tp"] * plans["cp"] * plans["dp"]
            most = np.maximum(2, 2 * self.system.widest // inner)
            near = Plans({**plans.columns, "pp": np.minimum(pp, most)})
        return plans, ranks, self._gather(near, self._states, *knobs)

    @property
    def everywhere(self) -> tuple[str, ...]:
        """Knobs on which every law depends."""
        return "cp", "cp_attention", *("ep",) * bool(self.base.model.experts)

    def _gather(self, plans: Plans, law: Callable[[Run], T], *knobs: str) -> T:
        """Return a law's quantities as columns: of a run for each set of the knobs' values, other knobs at defaults."""
        knobs = *knobs, *self.everywhere
        code = np.zeros(len(plans), dtype=np.int64)
        for knob in knobs:
            code = code * (int(plans[knob].max()) + 1) + plans[knob]
        _, at, which = np.unique(code, return_index=True, return_inverse=True)
        found = []
        for row in zip(*(plans[knob][at].tolist() for knob in knobs), strict=True):
            key = (law.__name__, *row)
            if key not in self.known:
                values = {knob: value_of(knob, number) for knob, number in zip(knobs, row, strict=True)}
                degrees = values.get("tp", 1) * values.get("pp", 1) * values["cp"]
                defaults = {**DEFAULTS, "microbatch": 1, "dp": self.gpus // degrees}
                run = run_of(defaults | values, self.base)
                self.known[key] = law(self.system.habits.with_buckets(run, self.given))
            found.append(self.known[key])
        return columns(found, which)

    def _ranks(self, run: Run) -> Ranks:
        p, v = run.plan.pp, run.plan.chunks
        sizes = [len(stage.layers) for stage in stages_of(run, self.vocab_size, self.system.habits.stages_of(run))]
        ranks = [sum(sizes[rank::p]) for rank in range(p)]  # every schedule of NAMES deals its stages in turn
        if p <= 2:
            return Ranks(p, v, (ranks[0], ranks[0], ranks[-1]), 0, ranks[0], p - 1)
        between = max(ranks[1:-1])
        behind = p - 1 - ranks.index(between, 1)
        return Ranks(p, v, (ranks[0], between, ranks[-1]), between * (p - 2) - sum(ranks[1:-1]), ranks[1], behind)

    def _blocks(self, run: Run) -> Work:
        """Return seconds of a microbatch in one stage, for each operation a law."""
        each: dict[BlockName, Passes] = {
            name: passes(self.system, run, block(run, self.vocab_size, name, self.positions), is_layer=name in LAYERS)
            for name in names_of(run.model)
        }
        units = [stage_passes(self.system, run, each, stage) for stage in self.units]
        return Work(*(self.law(lambda unit, op=op: getattr(unit, op), units) for op in Work._fields))

    def _hops(self, run: Run) -> Hops:
        p, seconds = run.plan.pp, transfer_seconds(run, self.system)
        each = [seconds(rank, rank + 1) for rank in range(p - 1)]
        return Hops(sum(each, 0.0), max(each, default=0.0), seconds(p - 1, 0) if p > 1 else 0.0)

    def _states(self, run: Run) -> Held:
        system, pp, weight = self.system, run.plan.pp, parameter_bytes(run).weight
        alone = _with_one_microbatch(replace(run, plan=replace(run.plan, pp=1, offload_optimizer=False)))
        units, places = _units(alone, self.vocab_size, needed(pp, self.units), system.habits.live_parameters)
        sizes = [state_parts(run, place.buckets, system.device.kind) for place, *_ in places]
        moved = [moving(system, run, unit) for unit in units]
        return Held(
            reducing=self.law(lambda one: one.reducing, moved),
            summing=self.law(lambda one: one.summing, moved),
            gathering=self.law(lambda one: one.gathering, moved),
            updating=self.law(lambda unit: update(system, run, unit), units),
            parameters=self.law(lambda at: at[0], sizes),
            gradients=self.law(lambda at: at[1], sizes),
            optimizer=self.law(lambda at: at[2], sizes),
            tied=max(ends_seconds(system, run, unit) for unit in units) if pp > 1 else 0.0,
            gathered=by_kind([gathered * weight for _, gathered, _ in places]),
            buckets=buckets_of(run, [unit for *_, unit in places], self.law),
        )

    def _kept(self, run: Run) -> Kept:
        run = self.system.with_scores(_with_one_microbatch(run))
        positions, device = self.positions, self.system.device.kind
        alone = [
            (Place(run, self.vocab_size, 0, (stage,) * run.plan.pp), stage) for stage in needed(run.plan.pp, self.units)
        ]
        units = [(place, of_stage(place, stage, positions, device)) for place, stage in alone]
        moment = lambda unit, *ops: sum(fullest_of(unit[0], {0: unit[1]}, [Action(op, 0, 0) for op in ops]))
        _, three_layers, *_ = units
        twice = moment(three_layers, Op.F, Op.I, Op.F, Op.I) - moment(three_layers, Op.F, Op.I)
        return Kept(
            kept=self.law(lambda unit: float(unit[1].kept), units),
            passing=self.law(lambda unit: moment(unit, Op.F, Op.B) - unit[1].kept, units),
            owed=twice / (3 * self.period),
            received=Sizes(run).transferred if run.plan.pp > 1 else 0,
        )

    def _passing(self, plans: Plans) -> tuple[Work, Hops, Hops]:
        """Return seconds of passes through a stage, of transfers, and of those that pass while no rank waits."""
        knobs = ("tp", "microbatch", "sequence_parallel", "recompute")
        more = "partition_activations", "offload_activations", "overlap_input_grad_reduce"
        blocks = self._gather(plans, self._blocks, *knobs, *more)
        hops = self._gather(plans, self._hops, "tp", "pp", "dp", *knobs[1:3], "scatter_gather")
        under_way = Hops(*((1 - self.system.constant("send_blocks")) * seconds for seconds in hops))
        return blocks, hops, under_way

    def _seconds(self, plans: Plans, ranks: Ranks, held: Held) -> Array:
        blocks, hops, under_way = self._passing(plans)
        reducing, summing, gathering, updating = (law.at(ranks) for law in held[:4])
        zero, is_split = plans["zero_stage"], ranks.schedule == SPLIT
        work = self._work(plans, ranks, blocks, hops.longest, reducing, gathering)
        pipeline = _pipeline(ranks, work, blocks, under_way)
        last_pass = np.where(is_split, work.weight_gradient, work.backward)
        drained = (ranks.p - 1) * (work.backward[BETWEEN] / ranks.v + under_way.longest) * ~is_split
        reduced, shape = np.where(zero < 2, reducing, 0.0) + summing, (ranks.v, ranks.p, ranks.blocks)
        beside = beyond(self.system, reduced, last_pass, *shape)
        exposed = np.where(plans["overlap_grad_reduce"] == 1, beside, reduced)
        ends = np.maximum(pipeline + exposed[FIRST], pipeline - drained + exposed[LAST]) + held.tied
        total = np.maximum(ends, pipeline - drained / np.maximum(ranks.p - 1, 1) + exposed[BETWEEN])
        if self.system.habits.gathers_ahead:
            beside = beyond(self.system, gathering, work.forward, *shape)
            gathering = np.where(plans["overlap_param_gather"] == 1, beside, gathering)
        after = updating + np.where((zero == 1) | (zero == 2), gathering, 0.0)
        total = total + np.max(after, axis=0) + self.system.constant("step_seconds")
        return total * self._gather(plans, self.system.correction, "tp", "microbatch")

    def _work(
        self, plans: Plans, ranks: Ranks, blocks: Work, longest: Array, reducing: Array, gathering: Array
    ) -> Work:
        """Return seconds of a microbatch in all of a rank's stages, each [3, n], with what they wait for."""
        v, layers, is_first, is_last = ranks.v, ranks.layers, ranks.is_first, ranks.is_last
        work = Work(
            *(
                v * (law.one - law.layer)
                + layers * law.layer
                + is_first * (law.first - law.one)
                + is_last * (law.last - law.one)
                for law in blocks
            )
        )
        wait, blocking = (self.system.constant(name) for name in ("send_wait", "send_blocks"))
        waited = partial(sharded, self.system, ahead=plans["overlap_param_gather"], behind=plans["overlap_grad_reduce"])
        gathers = np.where(plans["zero_stage"] == 3, gathering / 2, 0.0)
        reduces = np.where(plans["zero_stage"] >= 2, reducing, 0.0)
        waits = wait * (2 * v - is_first - is_last)

        def with_waits(seconds: Array, reduced: Array | float, is_end: Array) -> Array:
            sharing = waited(gathers / v, reduced / v, seconds / v, ranks.blocks) * v
            return seconds + (sharing + np.where(ranks.p > 1, waits + blocking * (v - is_end) * longest, 0.0))

        return Work(
            with_waits(work.forward, 0.0, is_last),
            with_waits(work.backward, reduces, is_first),
            with_waits(work.input_gradient, reduces, is_first),
            work.weight_gradient,
        )

    def _moments(self, plans: Plans, ranks: Ranks, held: Held) -> list[Parts]:
        """Return the memory of ranks by category at the moments of which one needs most."""
        knobs = ("tp", "microbatch", "sequence_parallel", "recompute", "partition_activations", "offload_activations")
        two = Plans({**plans.columns, "pp": np.minimum(ranks.p, 2)})
        found = self._gather(two, self._kept, *knobs, "scatter_gather", "pp")
        p, v, m, law = ranks.p, ranks.v, ranks.m, found.kept
        is_gpipe, is_split = ranks.schedule == GPIPE, ranks.schedule == SPLIT
        ends = law.at(ranks) - law.one - (ranks.layers - 1) * law.layer
        parameters, gradients, optimizer = (law.at(ranks) for law in (held.parameters, held.gradients, held.optimizer))
        passing, updated = found.passing.at(ranks), held.buckets.updated(ranks)
        filled = held.buckets.filled(ranks, is_split, plans["overlap_grad_reduce"] == 1)
        is_first, every, of_last = ranks.is_first, m * v, (v - 1) * p + 1
        own, each = np.where(is_gpipe, m, of_last), np.where(v > 1, 2, 1)

        def parts_of(kind: int, layers: Array, ahead: Array, under_way: Array | int) -> Parts:
            """Return the memory of a rank with `ahead` ranks before it, receiving `under_way` more tensors."""
            in_flight = np.minimum(every, own + each * ahead)
            chunk = law.one - law.layer + law.layer * layers / v
            with_ends = np.where(v > 1, np.minimum(m, p) if kind == FIRST else 1, in_flight)
            put_off = np.where(is_split, np.minimum(p, m) - in_flight, 0)
            receiving = np.minimum(in_flight + put_off + under_way, every + 1) + (put_off if kind == BETWEEN else 0)
            receiving = np.where(is_first[kind], of_last, receiving)
            activations = in_flight * chunk + with_ends * ends[kind]
            owing = np.maximum(passing[kind], found.owed * layers - activations) + put_off * found.owed * layers
            rest = np.where(is_split, owing, passing[kind])
            buffers = receiving * found.received + held.gathered[kind] + filled[kind]
            of_update = activations + rest < updated[kind]
            activations, rest = np.where(of_update, 0, activations), np.where(of_update, updated[kind], rest)
            return Parts(parameters[kind], gradients[kind], optimizer[kind], activations, buffers, rest)

        under_way, is_inner = np.where(v > 1, 3, np.where(is_gpipe, 1, 2)), p > 2
        kept = np.where(is_split, np.where(is_inner, law.layer, found.owed), found.owed)
        first, fullest, last = ranks.layers
        return [
            parts_of(FIRST, first, p - 1, 0),
            parts_of(BETWEEN, ranks.second, np.where(is_inner, p - 2, p - 1), under_way),
            parts_of(BETWEEN, fullest, np.where(kept < found.owed, np.where(m < p, 0, 1), ranks.behind), under_way),
            parts_of(LAST, last, 0 * p, np.where(v > 1, 4, 1)),
        ]


def units_of(period: int) -> tuple[Stage, ...]:
    """Return stages from which the quantities of any other follow: each further period of layers adds the same."""
    few, more = range(period), range(3 * period)
    ends = (True, False), (False, True), (True, True)
    inner = (Stage(layers, is_first=False, is_last=False) for layers in (few, more))
    return (*inner, *(Stage(few, is_first=first, is_last=last) for first, last in ends))


def needed(pp: int, units: tuple[T, ...]) -> tuple[T, ...]:
    """Return the units of `units_of` that a `Law` is used with: without a pipeline, or with one of several ranks."""
    return (*units[:2], *(units[2:4] if pp > 1 else units[4:]))


@lru_cache(maxsize=4096)
def _units(
    run: Run, vocab_size: int, units: tuple[Stage, ...], live: int | None
) -> tuple[list[States], list[tuple[Place, int, OfUnit]]]:
    """Return states of each unit; and its place, with the elements of gathered parameters and the buckets."""
    places = [Place(run, vocab_size, 0, (stage,)) for stage in units]
    each = [(at, gathered_elements(at, at.buckets, live), of_unit(at)) for at in places]
    return [states(at) for at in places], each


def _with_one_microbatch(run: Run) -> Run:
    return replace(run, train=replace(run.train, global_batch=run.train.microbatch * run.plan.dp))


def _pipeline(ranks: Ranks, work: Work, blocks: Work, hops: Hops) -> Array:
    """Return the seconds from the first forward pass to the last backward pass.

    1F1B: the time to fill the pipeline plus m - 1 turns of a microbatch; interleaved: p - 1 of these turns are of a
    chunk; zero-bubble fills the idle time with deferred weight gradients.
    """
    p, v, m = ranks.p, ranks.v, ranks.m
    is_split = ranks.schedule == SPLIT
    forward, backward = work.forward, np.where(is_split, work.input_gradient, work.backward)
    put_off = np.where(is_split, work.weight_gradient, 0.0)
    first, between, last = through = forward + backward
    layer = blocks.forward.layer + np.where(is_split, blocks.input_gradient.layer, blocks.backward.layer)
    lacking = ranks.missing * layer
    one_way = v * hops.one_way + (v - 1) * hops.back
    fill = first + (p > 1) * (last + (p - 2) * between - lacking) + 2 * one_way
    load = np.max(through + put_off, axis=0)
    plain = np.where(p > 2, between, np.minimum(first, last))
    chunk = plain / v + np.max(through, axis=0) - plain
    links = np.where(p == 2, 2 * v - 1, v) * hops.longest
    turn = np.maximum(np.maximum(load, links), fill / np.where(v > 1, 2 * p - 1, p))
    slowest = lambda of: np.maximum(np.max(of, axis=0), hops.longest)
    turn = np.where(ranks.schedule == GPIPE, slowest(forward) + slowest(backward), turn)
    steady = fill + (m - 1) * turn
    chunked = fill + (m - p) * turn + (p - 1) * chunk
    spared = np.minimum(np.minimum(put_off[BETWEEN], forward[BETWEEN]), backward[BETWEEN])
    split = steady + put_off[FIRST] - (np.minimum(p, m) - 1) * spared
    return np.where(is_split, split, np.where(v > 1, chunked, steady))
