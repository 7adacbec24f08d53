"""Simulation of a run on a system: the one path to a prediction for fields, rows, experiments and plans."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, NewType

from harness.predict.memory import tokenizer_size
from harness.records.labels import DEFAULTS, fields, sized
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.run import Run, with_fields
from impl.simulator.step import Prediction, predict, step_seconds
from impl.simulator.system import System

Done = NewType("Done", Run)
"""Run as the system's software carries it out, which only `simulated` knows."""


class Simulated(NamedTuple):
    """A run that was asked for, and the run that is simulated for it."""

    asked: Run
    """Run with the given fields; fields that are not given have the system's defaults."""
    done: Done
    """The same run in a precision that the device has, with the habits of the system's software."""
    assumed: Mapping[str, object]
    """Fields that are not given, with the values that they have."""
    differences: list[str]
    """How the simulated run differs from the one asked for, and fields that only a real step depends on, in words."""


def simulated(run: Run, given: Collection[str], system: System) -> Simulated:
    """Return what is simulated for a run of which some fields are given: every prediction begins here.

    A field is as given; else as the software always has it (`habits`); else as the measured runs had it (`defaults`);
    else as in `run`. With chunks the schedule that is not given is the interleaved one.

    Args:
        given: dotted names of the fields that a command line, a row, an experiment or a search sets, to defaults too.

    Raises:
        InputError: the engine or the precision is not simulated there, or the run is impossible.
    """
    assumed = {name: value for name, value in system.defaults.items() if name not in given}
    if run.plan.chunks > 1 and "plan.schedule" not in given:
        assumed["plan.schedule"] = "interleaved"
    asked = system.habits.with_buckets(with_fields(run, assumed) if assumed else run, given)
    if asked.plan.bucket_bytes != run.plan.bucket_bytes and "plan.bucket_bytes" not in given:
        assumed["plan.bucket_bytes"] = asked.plan.bucket_bytes
    if asked.engine != "native":
        raise InputError(f"the {asked.engine} engine is not simulated; valid: --engine native")
    as_known, precisions = asked, system.device.peak_flops
    if asked.precision == "bf16" and "bf16" not in precisions and "fp16" in precisions:
        as_known = replace(asked, precision="fp16")  # moves and computes as much
    elif asked.precision not in precisions:
        valid = ", ".join(precisions)
        raise InputError(f"precision {asked.precision} is not known of {system.name}; valid there: {valid}")
    if problems := asked.problems():
        raise InputError(problems[0])
    done = system.habits.of(as_known, given)
    if done != asked and (problems := done.problems()):
        raise InputError(f"as {system.stack} does it: {problems[0]}")
    return Simulated(asked, Done(done), assumed, [*_differences(asked, done, system), *_ignored(asked)])


def _differences(asked: Run, done: Run, system: System) -> Iterator[str]:
    if done.precision != asked.precision:
        yield f"{system.name} has no {asked.precision}: predicted as {done.precision}"
    if changes := system.habits.changes(asked, done):
        yield f"as {system.stack} does it: {', '.join(changes)}"


def _ignored(run: Run) -> Iterator[str]:
    if run.compile:
        yield f"ignored: compile {run.compile}: layers are predicted as they are without torch.compile"
    if run.threads > 1:
        yield f"ignored: threads {run.threads}: rates hold for the threads that the system was measured with"
    if run.train.clip_norm == 0:
        yield "ignored: train.clip_norm 0: every predicted step has the time of clipping"
    if run.model.expert_capacity is not None:
        all_rows = "predicted ranks are no fuller than it allows, and none of their rows is left out"
        yield f"ignored: model.expert_capacity {run.model.expert_capacity}: {all_rows}"
    if run.data.race:
        yield f"ignored: data.race {run.data.race}: steps are predicted for text, not for questions"


def given_by(run: Run, varied: Collection[str], system: System) -> frozenset[str]:
    """Return the fields that count as given in a whole run, such as a point of an experiment or a plan of a search.

    They are those of its model's size, those that differ from a new run's, and those that vary from run to run, except
    where the software has a habit.
    """
    set_here = {name for name, value in fields(run).items() if value != DEFAULTS[name]}
    return sized(run.model) | set_here | (frozenset(varied) - system.habits.fields.keys())


def vocabulary_of(run: Run) -> int:
    """Return the size of the model's vocabulary; it is looked up in the data only if the run does not give it."""
    return run.model.vocab_size or run.model.vocabulary(tokenizer_size(run))


def predicted(run: Done, system: System, slowdown: Mapping[int, float] | None = None) -> Prediction:
    """Return time and memory of one step of a run.

    `slowdown` is the ratio of a pipeline rank's computing seconds to the system's, where they differ.
    """
    stages, positions = system.habits.stages_of(run), head_positions(run.model)
    return predict(run, vocabulary_of(run), system, stages=stages, head_positions=positions, slowdown=slowdown)


def predicted_seconds(run: Done, system: System) -> float:
    """Return the seconds of one step of a run: those of `predicted`, without its memory."""
    stages, positions = system.habits.stages_of(run), head_positions(run.model)
    return step_seconds(run, vocabulary_of(run), system, stages=stages, head_positions=positions)
