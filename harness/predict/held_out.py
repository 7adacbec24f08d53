"""Published steps, predicted with constants that were fitted to others of them, or to nothing."""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from harness.experiment.published import FOLDER
from harness.predict.csv_rows import CALIBRATE, Row, read_rows
from harness.predict.fit import Measured, constant_mfu, fit, linear, percent_off, seconds_of
from harness.predict.systems import load_system
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.simulator.system import System

STEPS = FOLDER / "steps"
PICKED = 3
"""Number of rows of PTD-P's table 1 that a system's constants are fitted to; its other rows are predicted."""
MOST = 10**9
"""Limit of a size that any row is below."""
Goals = tuple[float | None, float | None, float | None]
"""Goals for errors in percent: mean, median, largest."""


class Rows(NamedTuple):
    """A selection of published steps: rows of a file by split and size."""

    file: str
    split: str = "check"
    """Start of the names of their splits."""
    gpus: tuple[int, int] = (1, MOST)
    """Least and most."""
    hidden: tuple[int, int] = (1, MOST)

    def read(self, system: str) -> list[Measured]:
        """Return the selected rows of the file."""
        limits = {"gpus": self.gpus, "hidden": self.hidden}
        return [
            row.measured
            for row in rows_of(self.file, system)
            if row.measured and row.split.startswith(self.split)
            if all(least <= row.cells[name] <= most for name, (least, most) in limits.items())
        ]


class Case(NamedTuple):
    """Rows that are predicted with constants fitted to others."""

    id: str
    what: str
    system: str
    asked: Rows
    fitted: Rows
    goals: Goals = (None, None, None)
    calculon: float | None = None
    """Mean error in percent of Calculon as published, measured for this project on the same kind of rows."""


TABLE_1 = Rows("ptdp2021_table1", CALIBRATE)
TABLE_5 = Rows("korthikanti2022_table5", CALIBRATE)
VTRAIN = Rows("vtrain2024")
ONE_NODE, NODES = (VTRAIN._replace(gpus=gpus) for gpus in ((1, 8), (9, MOST)))
FITTED_ONE, FITTED_NODES = (rows._replace(split=CALIBRATE) for rows in (ONE_NODE, NODES))
BLOOM = Rows("bloom2022", CALIBRATE)
H100, NVIDIA = Rows("h100_2024"), Rows("nvidia_h100", CALIBRATE)
CASES = (
    Case("H1", "PTD-P table 1, fitted to 3 of 10 rows", "selene", Rows("ptdp2021_table1"), TABLE_1, (2, None, 5), 12.1),
    Case("H2", "PTD-P table 2, constants of H1", "selene", Rows("ptdp2021_table2"), TABLE_1, (2.5, None, 6), 13.1),
    Case("H3", "Korthikanti table 5, sequence parallel and selective, fitted to 2 fully recomputed", "selene_2022",
         Rows("korthikanti2022_table5"), TABLE_5, (3, None, 6), 5.16),
    Case("H3'", "Korthikanti section 6.3, 8-way data parallel, constants of H3", "selene_2022",
         Rows("korthikanti2022_table5", "data parallel"), TABLE_5, calculon=11.5),
    Case("H4", "PTD-P table 2, ZeRO-3, fitted to 2 of 6 rows", "selene_deepspeed",
         Rows("ptdp2021_table2_zero3"), Rows("ptdp2021_table2_zero3", CALIBRATE), (8, None, 13)),
    Case("H5", "A100, one node, fitted to 64 rows", "a100_cluster", ONE_NODE, FITTED_ONE, (6, 4, None), 38.9),
    Case("H5x", "8 GPUs, fitted to up to 4", "a100_cluster", VTRAIN._replace(gpus=(8, 8)),
         FITTED_ONE._replace(gpus=(1, 4)), (10, None, None), 41.9),
    Case("H5x", "hidden size 2048, fitted to 1024", "a100_cluster", ONE_NODE._replace(hidden=(2048, 2048)),
         FITTED_ONE._replace(hidden=(1, 1024)), (10, None, None), 27.7),
    Case("H6", "A100, 64 to 512 GPUs, fitted to 32 rows", "a100_cluster", NODES, FITTED_NODES, (7.5, 4.5, None), 14.2),
    Case("H6x", "512 GPUs, fitted to up to 256", "a100_cluster", VTRAIN._replace(gpus=(512, MOST)),
         FITTED_NODES._replace(gpus=(9, 256)), (10, None, None), 11.5),
    Case("H6x", "175B, fitted to 39B", "a100_cluster", NODES._replace(hidden=(12288, MOST)),
         FITTED_NODES._replace(hidden=(8192, 8192)), (10, None, None), 7.2),
    Case("H7", "MT-NLG 530B, fitted to 1 of 3 rows", "selene", Rows("mtnlg2022"), Rows("mtnlg2022", CALIBRATE),
         (4, None, None), 29.7),
    Case("figures", "PTD-P figures 11 to 18, constants of H1", "selene", Rows("ptdp2021_figures", "figure"), TABLE_1,
         (6, None, None)),
    Case("Frontier", "Frontier 22B and 1T, fitted to 175B", "frontier", Rows("frontier2023"),
         Rows("frontier2023", CALIBRATE), (None, None, 8)),
    Case("BLOOM", "BLOOM's trials with 150 numbers a head, fitted to other sizes", "jean_zay",
         BLOOM._replace(hidden=(14400, MOST)), BLOOM._replace(hidden=(1, 14399)), (12, None, None)),
    Case("NVIDIA", "NVIDIA's GPT-3 175B on H100s, fitted to their other models", "dgx_h100",
         NVIDIA._replace(hidden=(12288, 12288)), NVIDIA._replace(hidden=(1, 12287))),
    Case("InternEvo", "InternLM 7B on 8 to 1,024 A100s, fitted to 7 of 46 rows", "internevo", Rows("internevo2023"),
         Rows("internevo2023", CALIBRATE), (8, None, None)),
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

    @property
    def off(self) -> np.ndarray:
        """Errors in percent."""
        return percent_off(self.predicted, self.measured)


def result_of(case: Case) -> Result:
    """Fit the case's constants, and predict its rows."""
    chosen, asked = case.fitted.read(case.system), case.asked.read(case.system)
    return Result(case, asked, seconds_of(asked, _fitted(case.system, case.fitted)), constant_mfu(chosen, asked))


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
def _fitted(system: str, rows: Rows) -> System:
    return fit(rows.read(system), load_system(system))


def splits() -> np.ndarray:
    """Return the mean error in percent of the other seven rows of table 1, for every choice of three rows to fit.

    The predictions are taken as linear in the constants.
    """
    rows = Rows("ptdp2021_table1", split="").read("selene")
    logs, slopes = linear(rows, load_system("selene"))
    errors = []
    for picked in map(list, itertools.combinations(range(len(rows)), PICKED)):
        covariance = slopes[picked] @ slopes[picked].T + load_system("selene").row_sd ** 2 * np.eye(PICKED)
        expected = slopes @ slopes[picked].T @ np.linalg.solve(covariance, logs[picked])
        errors.append(np.delete(abs(100 * np.expm1(expected - logs)), picked).mean())
    return np.array(errors)


def by_group(
    system: str, selected: Rows, key: Callable[[ModelConfig], Hashable] = lambda model: model
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return errors in percent of each group of rows, predicted from the other groups, and those of the baseline.

    Args:
        key: of a group.
    """
    known, rows = load_system(system), selected.read(system)
    found = []
    for group in dict.fromkeys(key(row.run.model) for row in rows):
        asked = [row for row in rows if key(row.run.model) == group]
        others = [row for row in rows if key(row.run.model) != group]
        measured = np.array([row.seconds for row in asked])
        each = seconds_of(asked, fit(others, known)), constant_mfu(others, asked)
        found.append((percent_off(each[0], measured), percent_off(each[1], measured)))
    return found


def on_priors(system: str) -> Result:
    """Return steps on H100s, of GPTs, Llamas and Nemotrons, predicted with constants that were fitted to nothing.

    The baseline is fitted to these steps themselves.

    Args:
        system: h100, for bf16 by three stacks; or dgx_h100, for NVIDIA's alone, in fp8 too.
    """
    rows = NVIDIA.read(system)
    what = "NVIDIA's steps on H100s, bf16 and fp8, nothing fitted"
    if system == "h100":
        rows = [*H100.read(system), *(row for row in rows if row.run.precision == "bf16")]
        what = "three stacks on H100s, bf16, GPT, Llama and Nemotron, nothing fitted"
    case = Case("H100" if system == "h100" else "NVIDIA", what, system, NVIDIA, NVIDIA)
    priors = with_priors(load_system(system))
    return Result(case, rows, seconds_of(rows, priors), constant_mfu(rows, rows))


def plain_nvidia() -> float:
    """Return the mean error in percent of NVIDIA's steps by priors, had its software none of its overlaps."""
    system, rows = load_system("dgx_h100"), NVIDIA.read("dgx_h100")
    habits = replace(system.habits, splits_products=False, gathers_ahead=False)
    predicted = seconds_of(rows, with_priors(replace(system, habits=habits)))
    return float(abs(percent_off(predicted, np.array([row.seconds for row in rows]))).mean())


def with_priors(system: System) -> System:
    """Return the system as before it was fitted."""
    constants = {name: replace(one, value=one.prior or one.value) for name, one in system.constants.items()}
    return replace(system, constants=constants, calibration=None)
