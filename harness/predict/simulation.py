"""Simulation of a run on a system: the one path to a prediction for fields, rows, experiments and plans."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from harness.predict.memory import tokenizer_size
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.run import Run, with_fields
from impl.simulator.step import Prediction, predict, step_seconds
from impl.simulator.system import Habits, System


def completed(run: Run, given: Collection[str], system: System) -> tuple[Run, dict[str, Any]]:
    """Return the run with values for fields that are not given, and these values.

    They are the system's defaults and, where there are chunks, the interleaved schedule.

    Args:
        given: dotted names of the fields that a command line or a row sets, to a default too.
    """
    assumed = {name: value for name, value in system.defaults.items() if name not in given}
    if run.plan.chunks > 1 and "plan.schedule" not in given:
        assumed["plan.schedule"] = "interleaved"
    return with_fields(run, assumed) if assumed else run, assumed


def as_simulated(run: Run, system: System) -> Run:
    """Return the run that is simulated: in a precision that the device has, with the habits of the system's software.

    Raises:
        InputError: the engine or the precision is not simulated there.
    """
    return _with_habits(run, system.name, system.habits, tuple(system.device.peak_flops))


@lru_cache(maxsize=4096)
def _with_habits(run: Run, name: str, habits: Habits, precisions: tuple[str, ...]) -> Run:
    if run.engine != "native":
        raise InputError(f"the {run.engine} engine is not simulated; valid: --engine native")
    if run.precision == "bf16" and "bf16" not in precisions and "fp16" in precisions:
        run = replace(run, precision="fp16")  # moves and computes as much
    if run.precision not in precisions:
        raise InputError(f"precision {run.precision} is not known of {name}; valid there: {', '.join(precisions)}")
    return habits.of(run)


def vocabulary_of(run: Run) -> int:
    """Return the size of the model's vocabulary; it is looked up in the data only if the run does not give it."""
    return run.model.vocab_size or run.model.vocabulary(tokenizer_size(run))


def predicted(run: Run, system: System, slowdown: Mapping[int, float] | None = None) -> Prediction:
    """Return time and memory of one step of a run.

    Args:
        slowdown: ratio of a pipeline rank's computing seconds to the system's, where they differ.

    Raises:
        InputError: the run is impossible, or is not simulated.
    """
    done = as_simulated(run, system)
    how: dict[str, Any] = {"slowdown": slowdown, "with_timeline": False}
    stages, positions = system.habits.stages_of(done), head_positions(done.model)
    return predict(done, vocabulary_of(run), system, stages=stages, head_positions=positions, **how)


def predicted_seconds(run: Run, system: System) -> float:
    """Return the seconds of one step of a valid run: those of `predicted`, without its memory."""
    done = as_simulated(run, system)
    stages, positions = system.habits.stages_of(done), head_positions(done.model)
    return step_seconds(done, vocabulary_of(run), system, stages=stages, head_positions=positions)
