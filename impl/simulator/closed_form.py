"""Step time and memory of many plans at once, in closed form: prunes plans before events simulate the best of them.

Seconds and bytes of blocks, transfers and states are those of the event simulation, computed once for all plans that
share them; only how a pipeline adds them up is in closed form. In steady state a microbatch takes as long as the
slowest rank computes, or as the microbatches in flight take to go round; the first one fills the pipeline.

Letters: m microbatches, p pipeline ranks, v chunks of each. Ranks are of three kinds: the first, those between (the
fullest of them) and the last.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from impl.cost.buffers import gathered_elements, gradient_elements
from impl.cost.moments import fullest, kept_bytes
from impl.cost.parameters import MASTER_BYTES
from impl.cost.place import Place, Sizes, parameter_bytes
from impl.pipeline.schedule import Action, Op
from impl.pipeline.stage import Stage, split
from impl.run import Run
from impl.simulator.operations import STAGE, BlockName, block
from impl.simulator.passes import Passes, passes, stage_passes
from impl.simulator.plans import DEFAULTS, FLAGS, NAMES, Plans, run_of, value_of
from impl.simulator.reduction import ends_seconds, seconds_of, sharded, states, update
from impl.simulator.step import transfer_seconds
from impl.simulator.system import System

Array = np.ndarray
Table = dict[str, Array]
Quantities = Mapping[str, float | tuple[float, ...]]
"""Quantities of one plan that a law computes, by name."""
GPIPE, PLAIN, INTERLEAVED, SPLIT = map(NAMES["schedule"].index, ("gpipe", "one_f_one_b", "interleaved", "zb_h1"))
OPS = ("forward", "backward", "input_gradient", "weight_gradient")
STATES = ("reducing", "gathering", "updating", "bytes")
UNITS = {
    "one": Stage(range(1), is_first=False, is_last=False),
    "more": Stage(range(3), is_first=False, is_last=False),
    "first": Stage(range(1), is_first=True, is_last=False),
    "last": Stage(range(1), is_first=False, is_last=True),
    "whole": Stage(range(1), is_first=True, is_last=True),
}
"""Stages from which the quantities of any other follow: each further layer adds the same amount."""


class Estimate(NamedTuple):
    """Step time and memory of each plan."""

    seconds: Array
    bytes: Array
    """Bytes on the fullest device."""


class _Law(NamedTuple):
    """Quantity of a pipeline rank as a linear function of its layers and of whether it has the model's ends."""

    layer: Any
    one: Any
    """Quantity with one layer and no end."""
    first: Any
    last: Any
    whole: Any

    @classmethod
    def of(cls, sizes: Mapping[str, float]) -> "_Law":
        one = sizes["one"]
        return cls((sizes["more"] - one) / 2, one, sizes["first"], sizes["last"], sizes["whole"])

    def at(self, ranks: "_Ranks") -> list[Array]:
        """Return the quantity for each kind of rank."""
        ends = (self.first, np.where(ranks.p > 2, self.one, self.first), self.last)
        base = [np.where(ranks.p == 1, self.whole, end) for end in ends]
        return [end + (layers - 1) * self.layer for end, layers in zip(base, ranks.layers, strict=True)]


@dataclass(frozen=True)
class _Ranks:
    """Columns that describe the three kinds of pipeline rank."""

    p: Array
    v: Array
    m: Array
    schedule: Array
    layers: Array
    """Layers of a rank over all its chunks, by kind."""
    missing: Array
    """Layers that the ranks between lack in total, compared with all being the fullest."""
    holding: Array
    """Layers that the second rank would need to hold as many activations as the fullest rank between."""

    @property
    def is_first(self) -> list[Array]:
        return [self.p > 0, self.p <= 2, self.p == 1]

    @property
    def is_last(self) -> list[Array]:
        return [self.p == 1, self.p == 1, self.p > 0]


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
    ) -> None:
        """Store what all plans have in common.

        Args:
            base: the run whose plan and microbatch are searched.
            gpus: devices of each plan.
            head_positions: positions of a sequence that the output head scores; None: all.
        """
        self.positions = head_positions or base.model.seq_len
        self.base, self.vocab_size, self.system, self.gpus = system.habits.of(base), vocab_size, system, gpus
        self._known: dict[tuple[Any, ...], Quantities] = {}

    def estimate(self, plans: Plans) -> Estimate:
        """Return step time and memory of each plan, with the habits of the system's software applied."""
        habits = {knob: getattr(self.system.habits, knob, None) for knob in FLAGS}
        fixed = {knob: np.full(len(plans), int(way)) for knob, way in habits.items() if way is not None}
        plans = Plans({**plans.columns, **fixed})
        layers = self._gather(plans, self._layers, "pp", "chunks")
        m = self.base.train.global_batch // (plans["dp"] * plans["microbatch"])
        ranks = _Ranks(plans["pp"], plans["chunks"], m, plans["schedule"], **layers)
        held = self._gather(
            plans, self._states, "tp", "pp", "dp", "zero_stage", "sequence_parallel", "offload_optimizer"
        )
        return Estimate(self._seconds(plans, ranks, held), self._bytes(plans, ranks, held))

    def _gather(self, plans: Plans, law: Callable[..., Quantities], *knobs: str) -> Table:
        """Return a law's quantities for each plan as columns, evaluating it once for equal values of the knobs."""
        code = np.zeros(len(plans), dtype=np.int64)
        for knob in knobs:
            code = code * (int(plans[knob].max()) + 1) + plans[knob]
        _, at, which = np.unique(code, return_index=True, return_inverse=True)
        rows = zip(*(plans[knob][at].tolist() for knob in knobs), strict=True)
        found = [self._asked(law, dict(zip(knobs, row, strict=True))) for row in rows]
        return {name: np.array([one[name] for one in found]).T[..., which] for name in found[0]}

    def _asked(self, law: Callable[..., Quantities], numbers: dict[str, int]) -> Quantities:
        key = (law.__name__, *numbers.values())
        if key not in self._known:
            self._known[key] = law({name: value_of(name, number) for name, number in numbers.items()})
        return self._known[key]

    def _run(self, row: Mapping[str, Any], **others: Any) -> Run:
        """Return a run with these knobs and all others at their defaults."""
        return run_of({**DEFAULTS, "microbatch": 1, **row, **others}, self.base)

    def _layers(self, row: Mapping[str, Any]) -> Quantities:
        """Return fields of `_Ranks`: layers by kind of rank, `missing` and `holding`."""
        p, model = row["pp"], self.base.model
        count = p * row["chunks"]
        if self.system.habits.stages == "even" and model.num_layers % count == 0:
            sizes = [model.num_layers // count] * count
        else:
            sizes = [len(part.layers) for part in split(model, self.vocab_size, count)]
        ranks = [sum(sizes[rank::p]) for rank in range(p)]
        if p <= 2:
            return {"layers": (ranks[0], ranks[0], ranks[-1]), "missing": 0, "holding": ranks[0]}
        between, more = max(ranks[1:-1]), 1 if row["chunks"] == 1 else 2
        in_flight = [(row["chunks"] - 1) * p + more * (p - rank - 1) + 1 for rank in range(p)]
        holding = max(in_flight[rank] * ranks[rank] for rank in range(1, p - 1)) / in_flight[1]
        missing = between * (p - 2) - sum(ranks[1:-1])
        return {"layers": (ranks[0], between, ranks[-1]), "missing": missing, "holding": holding}

    def _blocks(self, row: Mapping[str, Any]) -> Quantities:
        """Return seconds of a microbatch in a layer, an empty stage, the embedding and the head, for each of OPS."""
        run = self._run(row, dp=self.gpus // row["tp"])
        each: dict[BlockName, Passes] = {
            name: passes(self.system, run, block(run, self.vocab_size, name, self.positions), is_layer=name == "layer")
            for name in STAGE
        }
        one, more, first, last = (
            stage_passes(self.system, each, UNITS[name]) for name in ("one", "more", "first", "last")
        )
        found: dict[str, tuple[float, ...]] = {}
        for op in OPS:
            of_one = getattr(one, op)
            layer = (getattr(more, op) - of_one) / 2
            found[op] = layer, of_one - layer, getattr(first, op) - of_one, getattr(last, op) - of_one
        return found

    def _hops(self, row: Mapping[str, Any]) -> Quantities:
        """Return seconds of a microbatch's transfers through all ranks, of the longest, and from the last rank back."""
        p, seconds = row["pp"], transfer_seconds(self._run(row), self.system)
        each = [seconds(rank, rank + 1) for rank in range(p - 1)]
        return {
            "one_way": sum(each, 0.0),
            "longest": max(each, default=0.0),
            "back": seconds(p - 1, 0) if p > 1 else 0.0,
        }

    def _states(self, row: Mapping[str, Any]) -> Quantities:
        """Return what gradients, parameters and updates need, each as a _Law.

        These are seconds to reduce, gather and update, and bytes; also seconds to sum tied gradients, and bytes of
        buffers on each kind of rank.
        """
        run = self._run(row)
        alone = self._run(row, pp=1)
        alone = replace(alone, train=replace(alone.train, global_batch=row["dp"]))
        each, laws = parameter_bytes(run), {name: dict[str, float]() for name in STATES}
        tied, buffers = 0.0, dict[str, float]()
        for name, stage in UNITS.items():
            place = Place(alone, self.vocab_size, 0, (stage,))
            state, divided = states(place), place.buckets
            is_master = (
                row["zero_stage"] == 3 and not row["offload_optimizer"] and each.weight < MASTER_BYTES[run.precision]
            )
            weights = 0 if is_master else sum(bucket.weights for bucket in divided)
            is_elsewhere = row["offload_optimizer"] and self.system.device.kind != "cpu"
            moments = 0 if is_elsewhere else sum(bucket.updated for bucket in divided)
            sizes = weights, sum(bucket.gradients for bucket in divided), moments
            laws["reducing"][name] = seconds_of(self.system, run, state, reducing=True)
            laws["gathering"][name] = seconds_of(self.system, run, state, reducing=False)
            laws["updating"][name] = update(self.system, run, state)
            laws["bytes"][name] = sum(a * b for a, b in zip(sizes, each, strict=True))
            if name in ("first", "last") and row["pp"] > 1:
                tied = ends_seconds(self.system, run, state)
            filled = gradient_elements(place, divided, [Action(Op.F, 0, 0), Action(Op.B, 0, 0)]) * each.gradient
            buffers[name] = gathered_elements(place, divided) * each.weight + filled
        between = buffers["more"]
        first, last = (max(between, buffers["whole" if row["pp"] == 1 else end]) for end in ("first", "last"))
        return {name: _Law.of(law) for name, law in laws.items()} | {"tied": tied, "buffers": (first, between, last)}

    def _kept(self, row: Mapping[str, Any]) -> Quantities:
        """Return bytes of activations that a microbatch keeps and of temporary tensors, both as a _Law.

        Also the bytes that a layer keeps for deferred weight gradients, and those of a received tensor.
        """
        run = self._run(row, dp=1)
        run = self.system.with_scores(replace(run, train=replace(run.train, global_batch=row["microbatch"])))
        positions, device = self.positions, self.system.device.kind
        kept, passing, owed = {}, {}, 0.0
        for name, stage in UNITS.items():
            place = Place(run, self.vocab_size, 0, (stage,) * row["pp"])
            kept[name] = float(kept_bytes(place, stage, positions, device))
            moment = lambda *ops, place=place: sum(fullest(place, [Action(op, 0, 0) for op in ops], positions, device))
            passing[name] = moment(Op.F, Op.B) - kept[name]
            if name == "more":
                owed = (moment(Op.F, Op.I, Op.F, Op.I) - moment(Op.F, Op.I)) / 3
        received = Sizes(run).transferred if row["pp"] > 1 else 0
        return {"kept": _Law.of(kept), "passing": _Law.of(passing), "owed": owed, "received": received}

    def _seconds(self, plans: Plans, ranks: _Ranks, held: Table) -> Array:
        knobs = ("tp", "microbatch", "sequence_parallel", "recompute")
        more = "partition_activations", "offload_activations", "overlap_input_grad_reduce"
        blocks = self._gather(plans, self._blocks, *knobs, *more)
        hops = self._gather(plans, self._hops, "tp", "pp", "dp", *knobs[1:3], "scatter_gather")
        reducing, gathering, updating = (_Law(*held[name]).at(ranks) for name in STATES[:3])
        zero, is_split = plans["zero_stage"], ranks.schedule == SPLIT
        work = self._work(plans, ranks, blocks, hops, reducing, gathering)
        hops = {name: (1 - self.system.constant("send_blocks")) * seconds for name, seconds in hops.items()}
        pipeline = _pipeline(ranks, work, blocks, hops)
        backward = np.where(is_split, work["weight_gradient"], work["backward"])
        drained = (ranks.p - 1) * (work["backward"][1] / ranks.v + hops["longest"]) * ~is_split
        exposed = [
            np.where(zero < 2, self._exposed(plans, ranks, *of), 0.0)
            for of in zip(reducing, backward, ranks.layers, strict=True)
        ]
        ends = np.maximum(pipeline + exposed[0], pipeline - drained + exposed[2]) + held["tied"]
        after = [u + np.where((zero == 1) | (zero == 2), g, 0.0) for u, g in zip(updating, gathering, strict=True)]
        total = np.maximum(ends, pipeline - drained / np.maximum(ranks.p - 1, 1) + exposed[1])
        total = total + np.maximum.reduce(after) + self.system.constant("step_seconds")
        return total * self._gather(plans, self._correction, "tp", "microbatch")["factor"]

    def _correction(self, row: Mapping[str, Any]) -> Quantities:
        return {"factor": self.system.correction(self._run(row, dp=self.gpus // row["tp"]))}

    def _work(
        self, plans: Plans, ranks: _Ranks, blocks: Table, hops: Table, reducing: list[Array], gathering: list[Array]
    ) -> Table:
        """Return seconds of a microbatch in all of a rank's stages, by operation and kind of rank."""
        p, v, zero = ranks.p, ranks.v, plans["zero_stage"]
        wait, blocking = (self.system.constant(name) for name in ("send_wait", "send_blocks"))
        waited = partial(sharded, self.system, ahead=plans["overlap_param_gather"], behind=plans["overlap_grad_reduce"])
        work: dict[str, Array] = {}
        for op, (layer, stage, embedding, head) in blocks.items():
            of_ranks = zip(ranks.layers, ranks.is_first, ranks.is_last, strict=True)
            work[op] = np.array([v * stage + n * layer + f * embedding + h * head for n, f, h in of_ranks])
        for kind, layers in enumerate(ranks.layers):
            gathers = np.where(zero == 3, gathering[kind] / 2, 0.0)
            reduces = {"forward": 0.0, "backward": np.where(zero >= 2, reducing[kind], 0.0)}
            ends = {"forward": ranks.is_last[kind], "backward": ranks.is_first[kind]}
            waits = wait * (2 * v - ends["forward"] - ends["backward"])
            for op, way in (("forward", "forward"), ("backward", "backward"), ("input_gradient", "backward")):
                chunk = work[op][kind] / v, np.maximum(layers / v, 1)
                beside = waited(gathers / v, reduces[way] / v, *chunk) * v
                sends = np.where(p > 1, waits + blocking * (v - ends[way]) * hops["longest"], 0.0)
                work[op][kind] += beside + sends
        return work

    def _exposed(self, plans: Plans, ranks: _Ranks, seconds: Array, backward: Array, layers: Array) -> Array:
        """Return the seconds that a rank's gradient reduction takes after its last backward pass."""
        chunk, n = backward / ranks.v, np.maximum(layers / ranks.v, 1)
        computing = chunk * (1 - 1 / n)
        behind = np.maximum(seconds / ranks.v, seconds - (ranks.v - 1) * ranks.p * chunk) - computing
        behind = np.maximum(behind, seconds / ranks.v / n)
        share = self.system.constant("overlap")
        overlapped = share * behind + (1 - share) * seconds
        return np.where(plans["overlap_grad_reduce"] == 1, overlapped, seconds)

    def _bytes(self, plans: Plans, ranks: _Ranks, held: Table) -> Array:
        knobs = ("tp", "microbatch", "sequence_parallel", "recompute", "partition_activations", "offload_activations")
        two = Plans({**plans.columns, "pp": np.minimum(ranks.p, 2)})
        found = self._gather(two, self._kept, *knobs, "scatter_gather", "pp")
        law, owed, received = _Law(*found["kept"]), found["owed"], found["received"]
        p, v, m = ranks.p, ranks.v, ranks.m
        states, passing, kept = (one.at(ranks) for one in (_Law(*held["bytes"]), _Law(*found["passing"]), law))
        most = []
        for kind, ahead in ((0, p - 1), (1, np.maximum(p - 2, 0)), (1, np.minimum(p - 1, 1)), (2, 0 * p)):
            is_held_less = (kind == 1) & ((ranks.schedule == PLAIN) | (ranks.schedule == INTERLEAVED))
            layers = np.where(is_held_less, ranks.holding, ranks.layers[kind])
            in_flight = np.where(v > 1, np.minimum(m * v, (v - 1) * p + 2 * ahead + 1), np.minimum(m, ahead + 1))
            in_flight = np.where(ranks.schedule == GPIPE, m, in_flight)
            ends = kept[kind] - law.one - (ranks.layers[kind] - 1) * law.layer
            chunk = law.one - law.layer + law.layer * layers / v
            with_ends = np.where(v > 1, np.minimum(m, p) if kind == 0 else 1, in_flight)
            put_off = np.where(ranks.schedule == SPLIT, np.minimum(p, m) - in_flight, 0)
            more = (0, np.where(v > 1, 3, np.where(ranks.schedule == GPIPE, 1, 2)), np.where(v > 1, 4, 1))[kind]
            receiving = np.minimum(in_flight + put_off + more, m * v + 1)
            receiving = np.where(ranks.is_first[kind], (v - 1) * p + 1, receiving)
            activations = in_flight * chunk + with_ends * ends + passing[kind]
            owing = np.maximum(activations + put_off * owed * layers, (put_off + 1) * owed * layers)
            activations = np.where(ranks.schedule == SPLIT, owing, activations)
            most.append(states[kind] + activations + receiving * received + held["buffers"][kind])
        return np.maximum.reduce(most)


def _pipeline(ranks: _Ranks, work: Table, blocks: Table, hops: Table) -> Array:
    """Return the seconds from the first forward pass to the last backward pass.

    1F1B: the time to fill the pipeline plus m - 1 turns of a microbatch; interleaved: p - 1 of these turns are of a
    chunk; zero-bubble fills the idle time with deferred weight gradients.
    """
    p, v, m = ranks.p, ranks.v, ranks.m
    is_split = ranks.schedule == SPLIT
    forward, backward = work["forward"], np.where(is_split, work["input_gradient"], work["backward"])
    put_off = np.where(is_split, work["weight_gradient"], 0.0)
    through = forward + backward
    layer = blocks["forward"][0] + np.where(is_split, blocks["input_gradient"][0], blocks["backward"][0])
    lacking = ranks.missing * layer
    one_way = v * hops["one_way"] + (v - 1) * hops["back"]
    fill = through[0] + (p > 1) * (through[2] + (p - 2) * through[1] - lacking) + 2 * one_way
    load = np.max(through + put_off, axis=0)
    plain = np.where(p > 2, through[1], np.minimum(through[0], through[2]))
    chunk = plain / v + np.max(through, axis=0) - plain
    links = np.where(p == 2, 2 * v - 1, v) * hops["longest"]
    turn = np.maximum(np.maximum(load, links), fill / np.where(v > 1, 2 * p - 1, p))
    longest = [np.maximum(np.max(of, axis=0), hops["longest"]) for of in (forward, backward)]
    turn = np.where(ranks.schedule == GPIPE, longest[0] + longest[1], turn)
    steady = fill + (m - 1) * turn
    chunked = fill + (m - p) * turn + (p - 1) * chunk
    spared = np.minimum(np.minimum(put_off[1], forward[1]), backward[1])
    split = steady + put_off[0] - (np.minimum(p, m) - 1) * spared
    return np.where(is_split, split, np.where(v > 1, chunked, steady))
