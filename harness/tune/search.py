"""The best of all plans: by the closed form, then judged by events or real runs; and Optuna's search for them.

Judgements are kept in a journal, failures with their reasons, and are not repeated.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from impl.errors import InputError
from impl.run import Run
from impl.simulator.closed_form import ClosedForm, Estimate
from impl.simulator.plans import KNOBS, Plans, run_of

if TYPE_CHECKING:
    from optuna import Study

CHUNK = 10_000
"""Plans estimated at once: their columns fit a core's cache, and progress is shown after each part."""
SHAPE = (
    *("tp", "pp", "dp", "microbatch", "schedule", "chunks"),
    *("recompute", "zero_stage", "sequence_parallel"),
)
"""Knobs in which plans of different shape differ; of plans that differ in other knobs only, the best counts."""
SAMPLE = 4000
"""Plans from which the importance of knobs is estimated."""
LEAST_SAVED = 0.1
"""Share of memory that a slower plan has to save to be on the front."""
TRIES = 50
"""Proposals for each trial; most failures are invalid plans, which cost nothing to detect."""

Judged = dict[str, Any]
"""A plan by knob, its `seconds` and `bytes`, and the `reason` of its failure, if any."""
Judge = Callable[[Run], Judged]


def estimates(form: ClosedForm, plans: Plans, progress: Callable[[int], None]) -> Estimate:
    """Return estimates of all plans by the closed form, computed in parts."""
    found = []
    for first in range(0, len(plans), CHUNK):
        found.append(form.estimate(plans.take(slice(first, first + CHUNK))))
        progress(min(first + CHUNK, len(plans)))
    return Estimate(*(np.concatenate(part) for part in zip(*found, strict=True)))


def ranked(plans: Plans, seconds: np.ndarray, top: int) -> list[int]:
    """Return places of the fastest plans that differ in SHAPE; the plainest of equals."""
    order = np.lexsort((plans.oddity, seconds))
    shapes = np.stack([plans[knob] for knob in SHAPE], axis=-1)
    chosen: dict[tuple[int, ...], int] = {}
    for i in order.tolist():
        chosen.setdefault(tuple(shapes[i].tolist()), i)
        if len(chosen) == top:
            break
    return list(chosen.values())


def front(
    seconds: np.ndarray, sizes: np.ndarray, oddity: np.ndarray | None = None, slowest: float = np.inf
) -> list[int]:
    """Return places of the plans that no other beats in both time and memory, fastest first; each saves memory.

    Args:
        sizes: bytes of each plan.
        oddity: the plainest of equal plans is returned.
        slowest: largest ratio to the fastest time.
    """
    order = np.lexsort((seconds if oddity is None else oddity, sizes, seconds))
    smallest = np.minimum.accumulate(sizes[order])
    chosen, least = [], np.inf
    for i in order[np.flatnonzero(np.r_[True, smallest[1:] < smallest[:-1]])].tolist():
        if seconds[i] > slowest * seconds[order[0]]:
            break
        if sizes[i] < (1 - LEAST_SAVED) * least:
            chosen.append(i)
            least = sizes[i]
    return chosen


def best_by_value(plans: Plans, seconds: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the fastest plan's seconds for each value of each knob that has several."""
    found: dict[str, dict[str, float]] = {}
    for knob in KNOBS:
        column = plans[knob]
        least = np.full(int(column.max()) + 1, np.inf)
        np.minimum.at(least, column, seconds)
        values, places = plans.values(knob), np.unique(column, return_index=True)[1]
        if len(places) > 1:
            found[knob] = {str(values[i]): float(least[column[i]]) for i in places.tolist()}
    return found


def importance(plans: Plans, seconds: np.ndarray) -> dict[str, float]:
    """Return each knob's share of what decides whether a plan is among the fastest tenth; shares add up to 1.

    Source: PED-ANOVA, Watanabe et al. 2023 (2304.10255), as Optuna has it; of a random sample where there are many.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    generator = np.random.default_rng(0)
    some = generator.choice(len(plans), min(SAMPLE, len(plans)), replace=False)
    sample = plans.take(some)
    knobs = [knob for knob in KNOBS if len(np.unique(sample[knob])) > 1]
    if len(some) < 2 or not knobs:
        return {}
    values = {knob: sample.values(knob) for knob in knobs}
    kind = optuna.distributions.CategoricalDistribution
    choices: dict[str, optuna.distributions.BaseDistribution] = {k: kind(sorted(set(of))) for k, of in values.items()}
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.create_trial(params=dict(zip(knobs, row, strict=True)), distributions=choices, value=value)
            for *row, value in zip(*values.values(), seconds[some].tolist(), strict=True)
        ]
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def shapley(values: np.ndarray) -> np.ndarray:
    """Return the mean size of every axis's Shapley value over a grid of equally likely points: exact, by all sets.

    A point's values add up to its difference from the grid's mean.

    Source: Lundberg and Lee 2017 (1705.07874), equation 8, with means over the grid as expectations.
    """
    axes = frozenset(range(values.ndim))
    sets = [frozenset(known) for n in range(len(axes) + 1) for known in itertools.combinations(sorted(axes), n)]
    means = {known: values.mean(axis=tuple(axes - known), keepdims=True) for known in sets}
    found = []
    for i in sorted(axes):
        own = np.zeros_like(values)
        for known in sets:
            if i not in known:
                own += (means[known | {i}] - means[known]) / (len(axes) * math.comb(len(axes) - 1, len(known)))
        found.append(abs(own).mean())
    return np.array(found)


@dataclass(frozen=True)
class Journal:
    """Judgements of runs by one judge of one system, a line each in a file that is only appended to."""

    path: Path | None
    """None: the journal is not kept."""
    judge: str

    @classmethod
    def of(cls, path: Path | None, *judge: object) -> "Journal":
        """Return the journal of the judge that these values define."""
        return cls(path, hashlib.sha256(repr(judge).encode()).hexdigest()[:12])

    def read(self) -> dict[str, Judged]:
        """Return judgements by the runs' ids; truncated lines are skipped."""
        if self.path is None or not self.path.exists():
            return {}
        found: dict[str, Judged] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                told = json.loads(line)
                if told["judge"] == self.judge:
                    found[told["id"]] = told["judged"]
            except (ValueError, TypeError, KeyError):
                continue
        return found

    def write(self, run_id: str, judged: Judged) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"judge": self.judge, "id": run_id, "judged": judged}) + "\n")


def judged(rows: Iterable[Mapping[str, Any]], base: Run, judge: Judge, journal: Journal) -> Iterator[Judged]:
    """Yield each plan with its judgement, new or from the journal; an impossible plan is a failure with its reason."""
    known = journal.read()
    for row in rows:
        run = run_of(row, base)
        if run.id not in known:
            try:
                known[run.id] = judge(run)
            except InputError as error:
                known[run.id] = {"reason": str(error)}
            journal.write(run.id, known[run.id])
        yield {"id": run.id, **row, **known[run.id]}


def study_of(journal: Journal) -> "Study":
    """Return Optuna's study for a journal's judge; it resumes from the file next to the journal, if any."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = None
    if journal.path is not None:
        journal.path.parent.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal.path.with_suffix(".optuna"))))
    sampler = optuna.samplers.TPESampler(seed=0, multivariate=True)
    return optuna.create_study(storage=storage, sampler=sampler, study_name=journal.judge, load_if_exists=True)


def searched(
    study: "Study", plans: Plans, first: Iterable[Judged], base: Run, judge: Judge, trials: int
) -> Iterator[Judged]:
    """Yield plans that Optuna proposes until `trials` are judged, those of `first` before; a failure is a failed trial.

    Args:
        plans: all valid plans; knobs take their values, and combinations that are no valid plan fail at once.
        first: plans to begin with.
    """
    from optuna.trial import TrialState

    world = int(plans["tp"][0] * plans["pp"][0] * plans["dp"][0])
    choices = {knob: list(dict.fromkeys(plans.values(knob))) for knob in KNOBS if knob != "dp"}
    if not study.trials:
        for row in first:
            study.enqueue_trial({knob: row[knob] for knob in choices})
    before = [{**trial.params, **trial.user_attrs} for trial in study.trials if trial.state.is_finished()]
    yield from before
    done = sum("id" in told for told in before)
    for _ in range(TRIES * trials):
        if done >= trials:
            return
        trial = study.ask()
        row = {knob: trial.suggest_categorical(knob, values) for knob, values in choices.items()}
        told = _try(row, base, judge, world)
        for name, value in told.items():
            trial.set_user_attr(name, value)
        study.tell(trial, told.get("seconds"), TrialState.FAIL if "reason" in told else TrialState.COMPLETE)
        done += "id" in told
        yield row | told


def _try(row: Mapping[str, Any], base: Run, judge: Judge, world: int) -> Judged:
    degrees = row["tp"] * row["pp"]
    if world % degrees:
        return {"reason": f"tp {row['tp']} x pp {row['pp']} does not divide {world} devices"}
    run = run_of({**row, "dp": world // degrees}, base)
    if reason := run.why_invalid():
        return {"reason": reason}
    try:
        return {"id": run.id, "dp": run.plan.dp} | judge(run)
    except InputError as error:
        return {"id": run.id, "dp": run.plan.dp, "reason": str(error)}
