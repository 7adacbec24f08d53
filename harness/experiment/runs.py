"""Runs that experiments are made of: for speed or memory only, and repeated in turn."""

from collections.abc import Iterable
from dataclasses import replace

from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run

UNTESTED = EvaluationConfig(sequences=None)
"""No evaluation: the run is for its speed or its memory."""


def untested(model: ModelConfig, plan: Plan, recipe: Recipe, precision: Precision = "fp32") -> Run:
    """Return a run that is not evaluated."""
    return Run(model=model, plan=plan, train=recipe, evaluation=UNTESTED, precision=precision)


def repeated(runs: Iterable[Run], repeats: int) -> list[Run]:
    """Return the runs several times, in turn: A B C A B C."""
    every = list(runs)
    return [replace(run, repeat=repeat) for repeat in range(repeats) for run in every]
