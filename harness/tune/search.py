"""The best of all plans: by the closed form, then judged by events or real runs; and Optuna's search for them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.predict.interval import BASELINE
from harness.terminal import shown_progress
from impl.errors import InputError
from impl.run import Run
from impl.simulator.closed_form import ClosedForm, Estimate
from impl.simulator.plans import KNOBS, Plans, run_of, value_of

if TYPE_CHECKING:
    from optuna import Study

CHUNK = 10_000
"""Plans estimated at once: their columns fit a core's cache, and progress is shown after each part."""
SHAPE = (
    *("tp", "cp", "pp", "dp", "microbatch", "schedule", "chunks"),
    *("recompute", "zero_stage", "sequence_parallel", "ep"),
)
"""Knobs in which plans of different shape differ; of plans that differ in other knobs only, the best counts."""
KIND = ("tp", "cp", "ep", "pp", "dp", *(name for name in BASELINE if name in KNOBS))
"""Knobs that decide whether a calibration covers a plan; of stages, replicas and groups only if there are several."""
TOP = 0.1
"""Share of the plans that are the fastest."""
LEAST_SAVED = 0.1
"""Share of memory that a slower plan has to save to be on the front."""
TRIES = 50
"""Proposals for each trial; most failures are invalid plans, which cost nothing to detect."""

Judged = dict[str, Any]
"""A plan by knob, its `seconds` and `bytes`, and the `reason` of its failure, if any."""
Judge = Callable[[Run], Judged]


def estimates(form: ClosedForm, plans: Plans) -> Estimate:
    """Return estimates of all plans by the closed form, computed in parts."""
    firsts = shown_progress(range(0, len(plans), CHUNK), "plans")
    parts = [form.estimate(plans.take(slice(first, first + CHUNK))) for first in firsts]
    return Estimate(*map(np.concatenate, zip(*parts, strict=True)))


def ranked(plans: Plans, seconds: np.ndarray, top: int) -> list[int]:
    """Return places of the fastest plans that differ in SHAPE; the plainest of equals."""
    chosen: dict[tuple[int, ...], int] = {}
    for i in np.lexsort((plans.oddity, seconds)).tolist():
        chosen.setdefault(tuple(int(plans[knob][i]) for knob in SHAPE), i)
        if len(chosen) == top:
            break
    return list(chosen.values())


def by_kind(plans: Plans) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of one plan of each kind, and for every plan which of these it is like.

    A calibration that covers a plan covers all plans of its kind.
    """
    code = np.zeros(len(plans), dtype=np.int64)
    for knob in KIND:
        column = np.minimum(plans[knob], 2) if knob in ("cp", "ep", "pp", "dp", "zero_group") else plans[knob]
        code = code * (int(column.max()) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which


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


def unbeaten(rows: Sequence[Judged]) -> list[Judged]:
    """Return the judged plans that are on the `front`."""
    took, needed = (np.array([row[name] for row in rows]) for name in ("seconds", "bytes"))
    return [rows[i] for i in front(took, needed)] if rows else []


def agreement(rows: Iterable[Judged]) -> dict[str, float] | None:
    """Return the mean and largest difference of closed-form from event-simulated seconds; None: none was simulated."""
    off = [row["closed_form_seconds"] / row["seconds"] - 1 for row in rows if "seconds" in row]
    return {"mean": float(np.mean(np.abs(off))), "worst": float(max(off, key=abs))} if off else None


def best_by_value(plans: Plans, seconds: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the fastest plan's seconds for each value of each knob that has several."""
    found: dict[str, dict[str, float]] = {}
    for knob in KNOBS:
        numbers, places = np.unique(plans[knob], return_inverse=True)
        if len(numbers) > 1:
            least = np.full(len(numbers), np.inf)
            np.minimum.at(least, places, seconds)
            found[knob] = {str(value_of(knob, n)): s for n, s in zip(numbers.tolist(), least.tolist(), strict=True)}
    return found


def importance(plans: Plans, seconds: np.ndarray) -> dict[str, float]:
    """Return each knob's share of what sets the fastest tenth of the plans apart; shares add up to 1, largest first.

    A knob counts by how far its values there are from those of all plans (Pearson's divergence), also where they only
    go with those of a knob that matters.
    Source: PED-ANOVA, Watanabe et al. 2023 (2304.10255), from all plans, and so without estimates of densities.
    """
    fastest, found = seconds <= np.quantile(seconds, TOP), {}
    for knob in KNOBS:
        numbers, places = np.unique(plans[knob], return_inverse=True)
        if len(numbers) > 1:
            shares, there = (np.bincount(of, minlength=len(numbers)) / len(of) for of in (places, places[fastest]))
            found[knob] = float(((there - shares) ** 2 / shares).sum())
    total = sum(found.values()) or 1.0
    return {knob: found[knob] / total for knob in sorted(found, key=found.__getitem__, reverse=True)}


def shapley(values: np.ndarray) -> np.ndarray:
    """Return the mean size of every axis's Shapley value over a grid of equally likely points: exact, by all orders.

    A point's values add up to its difference from the grid's mean.

    Source: Lundberg and Lee 2017 (1705.07874), equation 8, with means over the grid as expectations.
    """
    orders = list(itertools.permutations(range(values.ndim)))
    found = np.zeros((values.ndim, *values.shape))
    for order in orders:
        known = values
        for axis in order:
            rest = known.mean(axis=axis, keepdims=True)
            found[axis] += (known - rest) / len(orders)
            known = rest
    return abs(found).reshape(values.ndim, -1).mean(axis=1)


def judged(rows: Iterable[Mapping[str, Any]], base: Run, judge: Judge) -> list[Judged]:
    """Return each plan with its judgement; an impossible plan is a failure with its reason."""
    runs = ((row, run_of(row, base)) for row in rows)
    return [{"id": run.id, **row, **_judgement(judge, run)} for row, run in runs]


def judged_until(
    judge: Callable[[list[Judged]], list[Judged]], rows: list[Judged], enough: int, first: Sequence[Judged]
) -> list[Judged]:
    """Return judgements of further rows, `enough` at a time, until as many have passed, those of `first` included."""
    found = list[Judged]()
    for begin in range(0, len(rows), enough):
        if sum("reason" not in row for row in (*first, *found)) >= enough:
            break
        found += judge(rows[begin : begin + enough])
    return found


def _judgement(judge: Judge, run: Run) -> Judged:
    try:
        return judge(run)
    except InputError as error:
        return {"reason": str(error)}


def study_of(name: str, path: Path | None = None, seed: int = 0) -> "Study":
    """Return the Optuna study of this name; it resumes from its file, if there is one, and is kept there."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = path and optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    return optuna.create_study(storage=storage, sampler=sampler, study_name=name, load_if_exists=True)


def searched(
    study: "Study", plans: Plans, first: Iterable[Judged], base: Run, judge: Judge, trials: int
) -> list[Judged]:
    """Return plans that Optuna proposes until `trials` are judged; a failure is a failed trial.

    Args:
        study: trials so far, from which the search resumes.
        plans: all valid plans; knobs take their values, and combinations that are no valid plan fail at once.
        first: plans to begin with.
    """
    from optuna.trial import TrialState

    world = plans.run(0, base).plan.world_size
    choices = {knob: list(plans.values(knob)) for knob in KNOBS if knob != "dp"}
    dps = set(plans.values("dp"))
    if not study.trials:
        for row in first:
            if any(row[knob] not in values for knob, values in choices.items()):
                continue  # another order of passes, or a grid, which no knob has
            study.enqueue_trial({knob: row[knob] for knob in choices})
    ended = [trial for trial in study.trials if trial.state.is_finished() and "id" in trial.user_attrs]
    found = [{**trial.params, **trial.user_attrs} for trial in ended]
    for _ in range(TRIES * trials):
        if len(found) >= trials:
            break
        trial = study.ask()
        row: Judged = {knob: trial.suggest_categorical(knob, values) for knob, values in choices.items()}
        dp, rest = divmod(world, row["tp"] * row["cp"] * row["pp"])
        if rest or dp not in dps or (run := run_of({**row, "dp": dp}, base)).problems():
            study.tell(trial, state=TrialState.FAIL)
            continue
        judgement = {"id": run.id, "dp": dp} | _judgement(judge, run)
        for name, value in judgement.items():
            trial.set_user_attr(name, value)
        if "reason" in judgement:
            study.tell(trial, state=TrialState.FAIL)  # also with seconds, as of a plan that does not fit
        else:
            study.tell(trial, judgement["seconds"])
        found.append(row | judgement)
    return found
