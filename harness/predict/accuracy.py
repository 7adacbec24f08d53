"""The verb `accuracy`: errors of the simulator on published steps that its constants were not fitted to."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from harness.analysis import render
from harness.analysis.render import Column, Table
from harness.experiment import folders
from harness.experiment.experiment import load
from harness.experiment.published import FOLDER
from harness.figures.style import mark, save, style
from harness.predict.csv_rows import CALIBRATE, Row, read_rows
from harness.predict.fit import ROW_SD, Measured, constant_mfu, fit, linear, percent_off, seconds_of
from harness.predict.published_memory import torchtitan
from harness.predict.published_scaling import FITTED, frontier
from harness.predict.simulation import predicted
from harness.predict.systems import load_system
from harness.records.store import Store, write_atomically
from harness.terminal import Flag, console, print_json
from impl.errors import InputError
from impl.simulator.system import System

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = FOLDER / "steps"
PICKED = 3
"""Rows of table 1 that constants are fitted to."""
TIE = 1e-9
"""Relative difference of seconds up to which predictions count as equal."""
PERCENT = {"unit": "%", "digits": 3}
COLUMNS = (
    Column(key="set", header="set", text=True),
    Column(key="what", header="rows", text=True),
    Column(key="n", header="n"),
    Column(key="mape", header="mean", **PERCENT),
    Column(key="median", header="median", **PERCENT),
    Column(key="worst", header="largest", **PERCENT),
    Column(key="goal", header="goal", text=True),
    Column(key="met", header="met", text=True),
    Column(key="constant", header="constant MFU", **PERCENT),
    Column(key="calculon", header="Calculon", **PERCENT),
)


class Case(NamedTuple):
    """Rows that are predicted with constants fitted to others."""

    id: str
    what: str
    system: str
    file: str
    asked: Callable[[Row], bool]
    fitted: Callable[[Row], bool] = lambda row: row.split == CALIBRATE
    fitted_file: str = ""
    """File of the fitted rows, if it is another one."""
    goals: tuple[float | None, float | None, float | None] = (None, None, None)
    """Goals for the errors in percent: mean, median, largest."""
    calculon: float | None = None
    """Mean error in percent of Calculon as published, measured for this project on the same kind of rows."""


def _split(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.split in names


def _size(name: str, *, split: str = "check", least: int = 1, most: int = 10**9) -> Callable[[Row], bool]:
    return lambda row: row.split == split and least <= row.cells[name] <= most


def _both(*conditions: Callable[[Row], bool]) -> Callable[[Row], bool]:
    return lambda row: all(holds(row) for holds in conditions)


ONE_NODE, NODES = _size("gpus", most=8), _size("gpus", least=9)
FITTED_ONE, FITTED_NODES = _size("gpus", split=CALIBRATE, most=8), _size("gpus", split=CALIBRATE, least=9)
SMALL, LARGE = _size("hidden", split=CALIBRATE, most=1024), _size("hidden", least=2048, most=2048)
CASES = (
    Case("H1", "PTD-P table 1, fitted to 3 of 10 rows", "selene", "ptdp2021_table1", _split("check"),
         goals=(2, None, 5), calculon=12.1),
    Case("H2", "PTD-P table 2, constants of H1", "selene", "ptdp2021_table2", _split("check"),
         fitted_file="ptdp2021_table1", goals=(2.5, None, 6), calculon=13.1),
    Case("H3", "Korthikanti table 5, sequence parallel and selective, fitted to 2 fully recomputed", "selene_2022",
         "korthikanti2022_table5", _split("check"), goals=(3, None, 6), calculon=5.16),
    Case("H3'", "Korthikanti section 6.3, 8-way data parallel, constants of H3", "selene_2022",
         "korthikanti2022_table5", _split("data parallel"), calculon=11.5),
    Case("H4", "PTD-P table 2, ZeRO-3, fitted to 2 of 6 rows", "selene_deepspeed", "ptdp2021_table2_zero3",
         _split("check"), goals=(8, None, 13)),
    Case("H5", "A100, one node, fitted to 64 rows", "a100_cluster", "vtrain2024", ONE_NODE, FITTED_ONE,
         goals=(6, 4, None), calculon=38.9),
    Case("H5x", "8 GPUs, fitted to up to 4", "a100_cluster", "vtrain2024", _size("gpus", least=8, most=8),
         _size("gpus", split=CALIBRATE, most=4), goals=(10, None, None), calculon=41.9),
    Case("H5x", "hidden size 2048, fitted to 1024", "a100_cluster", "vtrain2024",
         _both(ONE_NODE, LARGE), _both(FITTED_ONE, SMALL),
         goals=(10, None, None), calculon=27.7),
    Case("H6", "A100, 64 to 512 GPUs, fitted to 32 rows", "a100_cluster", "vtrain2024", NODES, FITTED_NODES,
         goals=(7.5, 4.5, None), calculon=14.2),
    Case("H6x", "512 GPUs, fitted to up to 256", "a100_cluster", "vtrain2024", _size("gpus", least=512),
         _both(FITTED_NODES, _size("gpus", split=CALIBRATE, most=256)), goals=(10, None, None), calculon=11.5),
    Case("H6x", "175B, fitted to 39B", "a100_cluster", "vtrain2024", _both(NODES, _size("hidden", least=12288)),
         _both(FITTED_NODES, _size("hidden", split=CALIBRATE, least=8192, most=8192)), goals=(10, None, None),
         calculon=7.2),
    Case("H7", "MT-NLG 530B, fitted to 1 of 3 rows", "selene", "mtnlg2022", _split("check"), goals=(4, None, None),
         calculon=29.7),
    Case("figures", "PTD-P figures 11 to 18, constants of H1", "selene", "ptdp2021_figures",
         lambda row: row.split.startswith("figure"), fitted_file="ptdp2021_table1", goals=(6, None, None)),
    Case("Frontier", "Frontier 22B and 1T, fitted to 175B", "frontier", "frontier2023", _split("check"),
         goals=(None, None, 8)),
)  # fmt: skip


class Result(NamedTuple):
    """A case's rows with their predictions."""

    case: Case
    rows: list[Measured]
    predicted: np.ndarray
    baseline: np.ndarray
    """Seconds at a constant utilization, fitted to the same rows."""

    @property
    def measured(self) -> np.ndarray:
        return np.array([row.seconds for row in self.rows])


def accuracy(*, out: Path | None = None, json: Flag = False) -> int:
    """Predict published and measured steps with constants fitted to others, and print how far off that is.

    Args:
        out: Folder to write accuracy.md and accuracy.png to, whose records of this machine are read; without it the
            committed records are read and nothing is written.
        json: Print one JSON document.
    """
    shown = Console(stderr=True)
    results = [result_of(case) for case in track(CASES, "fitting, predicting", console=shown, transient=True)]
    tables = [errors_table(results, out or folders.ARCHIVE), plans_table(results), figures_table(results)]
    if out is not None:
        _write(results, tables, out)
    if json:
        return print_json({"tables": [render.as_json(table) for table in tables]})
    for table in tables:
        console(render.console(table)).print(render.console(table))
    if out is not None:
        print(f"written: {out / 'accuracy.md'}, {out / 'accuracy.png'}")
    return 0


def _write(results: Sequence[Result], tables: Sequence[Table], out: Path) -> None:
    """Write the tables as a document with a figure of all rows."""
    out.mkdir(parents=True, exist_ok=True)
    head = "# Accuracy of the simulator\n\nWritten by `make accuracy`. Constants are fitted to some rows, errors are "
    text = head + "those of others.\n\n![Predicted against measured](accuracy.png)\n\n"
    write_atomically(out / "accuracy.md", text + "\n".join(render.markdown(table) for table in tables))
    save(figure(results), out / "accuracy.png")


def result_of(case: Case) -> Result:
    """Fit the case's constants, and predict its rows."""
    system = load_system(case.system)
    chosen = [row.measured for row in rows_of(case.fitted_file or case.file, case.system) if case.fitted(row)]
    asked = [row.measured for row in rows_of(case.file, case.system) if case.asked(row)]
    fitted = _fitted(case.system, tuple(chosen))
    assert system.name == fitted.name
    return Result(case, asked, seconds_of(asked, fitted), constant_mfu(chosen, asked))


@lru_cache(maxsize=32)
def rows_of(file: str, system: str) -> list[Row]:
    """Return published steps.

    Raises:
        InputError: one of them is impossible.
    """
    rows = read_rows(STEPS / f"{file}.csv", load_system(system))
    if wrong := [row for row in rows if row.problem]:
        raise InputError(f"{STEPS / file}.csv: {wrong[0].problem}")
    return rows


@lru_cache(maxsize=32)
def _fitted(system: str, rows: tuple[Measured, ...]) -> System:
    return fit(rows, load_system(system))


def splits() -> np.ndarray:
    """Return the mean error in percent of the other seven rows of table 1, for every choice of three rows to fit.

    The predictions are taken as linear in the constants.
    """
    rows = [row.measured for row in rows_of("ptdp2021_table1", "selene")]
    logs, slopes = linear(rows, load_system("selene"))
    errors = []
    for picked in map(list, itertools.combinations(range(len(rows)), PICKED)):
        covariance = slopes[picked] @ slopes[picked].T + ROW_SD**2 * np.eye(PICKED)
        expected = slopes @ slopes[picked].T @ np.linalg.solve(covariance, logs[picked])
        errors.append(np.delete(abs(100 * np.expm1(expected - logs)), picked).mean())
    return np.array(errors)


def choices(rows: Sequence[Measured], predicted: Iterable[float]) -> tuple[int, float, float]:
    """Return the number of groups of plans, the share whose best plan is predicted, and the mean loss of the choice.

    A group has plans for the same model, GPUs and batch. The loss is how much slower the predicted best plan is than
    the measured best, as a share.
    """
    groups: dict[object, list[tuple[float, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        key = (row.run.model, row.run.plan.world_size, row.run.train.global_batch)
        groups.setdefault(key, []).append((seconds, row.seconds))
    several = [np.array(group).T for group in groups.values() if len(group) > 1]
    found, regrets = [], []
    for guess, measured in several:
        chosen = measured[guess <= guess.min() * (1 + TIE)]  # a tie is broken by chance
        found.append(np.mean(chosen == measured.min()))
        regrets.append(np.mean(chosen) / measured.min() - 1)
    return len(several), float(np.mean(found)), float(np.mean(regrets))


def errors_table(results: Sequence[Result], out: Path) -> Table:
    """Tabulate sizes of errors of every set, next to those of the baselines."""
    rows = [_row(result) for result in results]
    spread = splits()
    rows.insert(1, _line("H1'", "PTD-P table 1, each 3 of 10 rows", 120, spread, (2.8, None, None)))
    points = np.array([one.predicted - one.published for one in frontier()])
    what = "Frontier's weak and strong scaling, percentage points of efficiency"
    rows.append(_line("Frontier", what, len(points), points, (None, None, 3)))
    torch = 100 * np.array([one.off for one in torchtitan()])
    rows.append(_line("H8", "memory: torchtitan's published rows, nothing fitted", len(torch), torch, (None, None, 8)))
    rows += [_beyond_memory(), *_own_machine(out)]
    notes = (
        "Errors are sizes of predicted / measured - 1, in percent: their mean, median and largest. Calculon's means "
        "are the published tool's on rows of the same kind; H5, H6: on all that are published.",
        "H1': largest is that of a set of three, on average over its seven other rows.",
        "Only constants are fitted, and only to other rows; the laws and the constants' priors were written with all "
        "these errors in sight. H5, H6: one campaign of measurements, 96 rows fitted to, these 420 not.",
        "Frontier's scaling: where it begins and its batches are assumed; microbatches of 1 are the launch scripts'. "
        f"Fitted, so not in this table: strong scaling with a microbatch of 4, picked to match, {_fitted_scaling()}.",
        "H8: the share that the allocator loses to gaps was assumed with these rows in sight.",
    )
    return Table("accuracy", "Errors on steps that were not fitted", COLUMNS, pd.DataFrame(rows), notes)


def _fitted_scaling() -> str:
    """Return Frontier's strong scaling with the microbatch that was picked to match it, in words."""
    return " and ".join(f"{one.predicted:.1f}% ({one.published:g}% published)" for one in frontier(FITTED))


def _row(result: Result) -> dict[str, Any]:
    case = result.case
    off = percent_off(result.predicted, result.measured)
    base = abs(percent_off(result.baseline, result.measured)).mean()
    line = _line(case.id, case.what, len(off), off, case.goals)
    return line | {"constant": base, "calculon": case.calculon}


def _line(
    name: str, what: str, n: int, off: np.ndarray, goals: tuple[float | None, float | None, float | None]
) -> dict[str, Any]:
    sizes = abs(off)
    found = float(sizes.mean()), float(np.median(sizes)), float(sizes.max())
    kinds = ("mean", "median", "largest")
    asked = [(value, goal, of) for value, goal, of in zip(found, goals, kinds, strict=True) if goal]
    goal = ", ".join(f"{of} {goal:g}" for _, goal, of in asked)
    met = ("yes" if all(value <= goal for value, goal, _ in asked) else "no") if asked else ""
    mean, median, worst = found
    return {
        "set": name, "what": what, "n": n, "mape": mean, "median": median, "worst": worst, "goal": goal, "met": met,
        "constant": None, "calculon": None,
    }  # fmt: skip


def _beyond_memory() -> dict[str, Any]:
    """Return a row that counts the rows of table 1, all of which ran, that are predicted not to fit in memory."""
    rows, system = rows_of("ptdp2021_table1", "selene"), load_system("selene")
    wrong = sum(predicted(row.run, row.vocab_size, system).fits is False for row in rows)
    what = f"memory: {wrong} of PTD-P table 1's rows said not to fit"
    numbers = dict.fromkeys(("mape", "median", "worst", "constant", "calculon"))
    return {"set": "H8", "what": what, "n": len(rows), "goal": "0 rows", "met": "no" if wrong else "yes", **numbers}


def _own_machine(out: Path) -> list[dict[str, Any]]:
    """Return a row of the runs on the machine that `calibrate` measured, if there are records of them."""
    from scipy.stats import kendalltau

    experiment = load("ours/predicted")
    assert experiment.table is not None
    frame = experiment.table(Store(out, experiment.id, "small").with_simulated()).frame
    if frame.empty:
        return []
    tau, _ = kendalltau(frame["predicted"], frame["step"])
    what = f"this machine: runs of two ranks, calibrated on others; Kendall's tau {tau:.2f}"
    return [_line("H9", what, len(frame), 100 * frame["off"].to_numpy(dtype=float), (10, None, None))]


def plans_table(results: Sequence[Result]) -> Table:
    """Tabulate whether the plan that is predicted to be the fastest is the fastest."""
    rows = []
    for result in results:
        if result.case.file == "vtrain2024":
            for of, predicted in (("simulator", result.predicted), ("constant MFU", result.baseline)):
                groups, share, regret = choices(result.rows, predicted)
                row = {"set": result.case.id, "what": result.case.what, "by": of, "groups": groups}
                rows.append(row | {"best": 100 * share, "regret": 100 * regret})
    columns = (
        *COLUMNS[:2],
        Column(key="by", header="predicted by", text=True),
        Column(key="groups", header="groups"),
        Column(key="best", header="best plan found", **PERCENT),
        Column(key="regret", header="slower than the best", **PERCENT),
    )
    note = "A group: plans for the same model, GPUs and batch. Goal for H5: the best in 66 %, 3.4 % slower on average."
    return Table("plans", "The fastest plan", columns, pd.DataFrame(rows), (note,))


def figures_table(results: Sequence[Result]) -> Table:
    """Tabulate errors for each of PTD-P's figures."""
    result = next(one for one in results if one.case.id == "figures")
    off = percent_off(result.predicted, result.measured)
    named = [row.name.split(",")[0] for row in result.rows]
    rows = []
    for name in dict.fromkeys(named):
        chosen = off[[one == name for one in named]]
        rows.append(_line("PTD-P", name, len(chosen), chosen, (None, None, None)) | {"bias": float(chosen.mean())})
    columns = (*COLUMNS[:6], Column(key="bias", header="mean with sign", **PERCENT))
    note = "Digitised to about 1 TFLOP/s per GPU."
    return Table("figures", "PTD-P's figures", columns, pd.DataFrame(rows), (note,))


def figure(results: Sequence[Result]) -> "Figure":
    """Draw predicted against measured seconds, every set in its colour; extrapolations apart."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.case.id for result in results))
    panels = {"Fitted to rows of the same kind": "", "Extrapolated": "x"}
    with style():
        drawn, axes = plt.subplots(1, 2, figsize=(12, 6), sharex=True, sharey=True)
        for ax, (title, last) in zip(axes, panels.items(), strict=True):
            for result in (one for one in results if one.case.id.endswith("x") == bool(last)):
                i, known = names.index(result.case.id), ax.get_legend_handles_labels()[1]
                label = None if result.case.id in known else result.case.id
                ax.plot(
                    result.measured, result.predicted, linestyle="", markersize=4, alpha=0.6, label=label, **mark(i)
                )
            least = min(one.measured.min() for one in results) / 1.3
            most = max(one.measured.max() for one in results) * 1.3
            for off, width in ((1.0, 0.8), (0.9, 0.4), (1.1, 0.4)):
                ax.plot([least, most], [least * off, most * off], color="black", linewidth=width)
            ax.set(xscale="log", yscale="log", xlabel="measured step (s)", ylabel="predicted step (s)")
            ax.set_title(f"{title}; lines: as measured, 10 % off")
            ax.legend(loc="upper left", ncols=2) if ax.get_legend_handles_labels()[1] else None
        plt.close(drawn)
    return drawn
