"""Published steps, predicted with constants that were fitted to others of them, or to nothing."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from harness.experiment.published import FOLDER
from harness.predict.csv_rows import CALIBRATE, Row, read_rows
from harness.predict.doubt import COMPUTING, NETWORK
from harness.predict.fit import Measured, fit, linear, percent_off, seconds_of
from harness.predict.interval import factors, octaves_beyond, uncalibrated
from harness.predict.simulation import Done
from harness.predict.systems import load_system
from impl.errors import InputError
from impl.run import Run
from impl.simulator.constants import Constant
from impl.simulator.residuals import place
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
    """Smallest and largest number of GPUs."""
    hidden: tuple[int, int] = (1, MOST)
    cp: tuple[int, int] = (1, MOST)
    precision: str = ""
    """Precision of all rows; empty: any."""

    def read(self, system: str) -> list[Measured]:
        """Return the selected rows of the file."""
        limits = {"gpus": self.gpus, "hidden": self.hidden, "cp": self.cp}
        return [
            row.measured._replace(file=self.file)
            for row in rows_of(self.file, system)
            if row.measured and row.split.startswith(self.split)
            if self.precision in ("", row.cells.get("precision"))
            if all(least <= row.cells.get(name, 1) <= most for name, (least, most) in limits.items())
        ]


class Case(NamedTuple):
    """Rows that are predicted with constants fitted to others, or to none."""

    id: str
    what: str
    system: str
    asked: tuple[Rows, ...]
    fitted: Rows | None = None
    """Rows that constants are fitted to; None: no rows, or with `by` the other groups'."""
    goals: Goals = (None, None, None)
    calculon: float | None = None
    """Mean error in percent of Calculon as published, measured for this project on the same kind of rows."""
    by: Callable[[Run], Hashable] | None = None
    """Key of a group of rows, each of which is predicted with constants fitted to the others."""
    is_new: Callable[[Run], Hashable] | None = None
    """Key; only rows whose value no fitted row has are predicted."""
    has_surface: bool = True
    """Whether the constants' residuals are kept as a surface."""


TABLE_1 = Rows("ptdp2021_table1", CALIBRATE)
TABLE_5 = Rows("korthikanti2022_table5", CALIBRATE)
VTRAIN = Rows("vtrain2024")
ONE_NODE, NODES = (VTRAIN._replace(gpus=gpus) for gpus in ((1, 8), (9, MOST)))
FITTED_ONE, FITTED_NODES = (rows._replace(split=CALIBRATE) for rows in (ONE_NODE, NODES))
BLOOM = Rows("bloom2022", CALIBRATE)
H100, NVIDIA, EXPERTS = Rows("h100_2024"), Rows("nvidia_h100", CALIBRATE), Rows("experts_h100")
CASES = (
    Case("H1", "PTD-P table 1, fitted to 3 of 10 rows", "selene", (Rows("ptdp2021_table1"),), TABLE_1, (2, None, 5),
         12.1),
    Case("H2", "PTD-P table 2, constants of H1", "selene", (Rows("ptdp2021_table2"),), TABLE_1, (2.5, None, 6), 13.1),
    Case("H3", "Korthikanti table 5, sequence parallel and selective, fitted to 2 fully recomputed", "selene_2022",
         (Rows("korthikanti2022_table5"),), TABLE_5, (3, None, 6), 5.16),
    Case("H3'", "Korthikanti section 6.3, 8-way data parallel, constants of H3", "selene_2022",
         (Rows("korthikanti2022_table5", "data parallel"),), TABLE_5, calculon=11.5),
    Case("H4", "PTD-P table 2, ZeRO-3, fitted to 2 of 6 rows", "selene_deepspeed", (Rows("ptdp2021_table2_zero3"),),
         Rows("ptdp2021_table2_zero3", CALIBRATE), (8, None, 13)),
    Case("H5", "A100, one node, fitted to 64 rows", "a100_cluster", (ONE_NODE,), FITTED_ONE, (6, 4, None), 38.9),
    Case("H5x", "8 GPUs, fitted to up to 4", "a100_cluster", (VTRAIN._replace(gpus=(8, 8)),),
         FITTED_ONE._replace(gpus=(1, 4)), (10, None, None), 41.9),
    Case("H5x", "hidden size 2048, fitted to 1024", "a100_cluster", (ONE_NODE._replace(hidden=(2048, 2048)),),
         FITTED_ONE._replace(hidden=(1, 1024)), (10, None, None), 27.7),
    Case("H6", "A100, 64 to 512 GPUs, fitted to 32 rows", "a100_cluster", (NODES,), FITTED_NODES, (7.5, 4.5, None),
         14.2),
    Case("H6x", "512 GPUs, fitted to up to 256", "a100_cluster", (VTRAIN._replace(gpus=(512, MOST)),),
         FITTED_NODES._replace(gpus=(9, 256)), (10, None, None), 11.5),
    Case("H6x", "175B, fitted to 39B", "a100_cluster", (NODES._replace(hidden=(12288, MOST)),),
         FITTED_NODES._replace(hidden=(8192, 8192)), (10, None, None), 7.2),
    Case("H7", "MT-NLG 530B, fitted to 1 of 3 rows", "selene", (Rows("mtnlg2022"),), Rows("mtnlg2022", CALIBRATE),
         (4, None, None), 29.7),
    Case("figures", "PTD-P figures 11 to 18, constants of H1", "selene", (Rows("ptdp2021_figures", "figure"),), TABLE_1,
         (6, None, None)),
    Case("Frontier", "Frontier 22B and 1T, fitted to 175B", "frontier", (Rows("frontier2023"),),
         Rows("frontier2023", CALIBRATE), (None, None, 8)),
    Case("BLOOM", "BLOOM's trials with 150 numbers a head, fitted to other sizes", "jean_zay",
         (BLOOM._replace(hidden=(14400, MOST)),), BLOOM._replace(hidden=(1, 14399)), (12, None, None)),
    Case("BLOOM", "BLOOM's trials, each hidden size fitted to the others", "jean_zay", (BLOOM,), goals=(7, None, None),
         by=lambda run: run.model.hidden_size),
    Case("InternEvo", "InternLM 7B on 8 to 1,024 A100s, fitted to 7 of 46 rows", "internevo", (Rows("internevo2023"),),
         Rows("internevo2023", CALIBRATE), (8, None, None)),
    Case("NVIDIA", "NVIDIA's GPT-3 175B on H100s, fitted to their smaller ones", "dgx_h100",
         (NVIDIA._replace(hidden=(12288, 12288)),), NVIDIA._replace(hidden=(1, 12287))),
    Case("NVIDIA", "NVIDIA's steps on H100s, bf16 and fp8, each model fitted to the others", "dgx_h100", (NVIDIA,),
         goals=(7, None, None), by=lambda run: run.model),
    Case("NVIDIA", "NVIDIA's context parallelism, fitted to steps without it", "dgx_h100",
         (NVIDIA._replace(cp=(2, MOST)),), NVIDIA._replace(cp=(1, 1)), (7, None, None)),
    Case("NVIDIA", "NVIDIA's steps on H100s, bf16 and fp8, nothing fitted", "dgx_h100", (NVIDIA,)),
    Case("H100", "three stacks on H100s, bf16, GPT, Llama and Nemotron, nothing fitted", "h100",
         (H100, NVIDIA._replace(precision="bf16"))),
    Case("NVIDIA", "Llama 3.1 405B on H100s, bf16 and fp8, fitted to NVIDIA's 16 other steps", "dgx_h100",
         (Rows("llama405b_h100"),), NVIDIA, has_surface=False),
    Case("NVIDIA", "Llama 2 7B, 4,096 to a million tokens, fp8, fitted to steps of up to 8,192", "dgx_h100",
         (Rows("long_h100"),), NVIDIA, has_surface=False),
    Case("Experts", "mixtures of experts on H100s, bf16, fitted to NVIDIA's models without experts", "dgx_h100",
         (EXPERTS._replace(precision="bf16"),), NVIDIA, has_surface=False),
    Case("Experts", "mixtures of experts on H100s, fp8, fitted to NVIDIA's models without experts", "dgx_h100",
         (EXPERTS._replace(precision="fp8"),), NVIDIA, has_surface=False),
    Case("Experts", "DeepSpeed-MoE, 128 experts on 128 A100s, constants of H4", "selene_deepspeed",
         (Rows("deepspeed_moe2021"),), Rows("ptdp2021_table2_zero3", CALIBRATE)),
)  # fmt: skip

HARDER = (
    Case("H5", "A100, one node, fitted to 64 rows, shapes that none of them has", "a100_cluster", (ONE_NODE,),
         FITTED_ONE, (5, None, None), is_new=lambda run: tuple(place(run))),
    Case("H5", "A100, one node, fitted to 64 rows, laws alone", "a100_cluster", (ONE_NODE,), FITTED_ONE,
         (5.5, None, None), has_surface=False),
)  # fmt: skip
"""Cases whose rows are among those of others, asked for without what makes them easy."""


class Part(NamedTuple):
    """Rows with their predictions, and the rows that constants were fitted to."""

    fitted: list[Measured]
    rows: list[Measured]
    predicted: np.ndarray
    bounds: np.ndarray
    """90% interval of the seconds. Shape: [rows, 2]."""
    kinds: list[str]
    """How each row differs from the fitted ones."""

    @property
    def measured(self) -> np.ndarray:
        return np.array([row.seconds for row in self.rows])

    @property
    def off(self) -> np.ndarray:
        """Errors in percent."""
        return percent_off(self.predicted, self.measured)

    @property
    def is_inside(self) -> np.ndarray:
        """Whether each measured step is inside its interval."""
        return (self.bounds[:, 0] <= self.measured) & (self.measured <= self.bounds[:, 1])


class Result(NamedTuple):
    """A case's rows with their predictions: in one part, or in one for each group."""

    case: Case
    parts: list[Part]

    @property
    def whole(self) -> Part:
        """All parts joined into one."""
        join = lambda each: np.concatenate(each) if isinstance(each[0], np.ndarray) else [*itertools.chain(*each)]
        columns: list[Any] = list(map(join, zip(*self.parts, strict=True)))
        return Part(*columns)


def result_of(case: Case) -> Result:
    """Fit the case's constants, and predict its rows."""
    return Result(case, [_part(case, fitted, asked) for fitted, asked in parts_of(case)])


def parts_of(case: Case) -> list[tuple[list[Measured], list[Measured]]]:
    """Return the rows to fit to and the rows that are then asked for: of a case, or of each of its groups."""
    asked = [row for rows in case.asked for row in rows.read(case.system)]
    if case.by is None:
        fitted = case.fitted.read(case.system) if case.fitted else []
        if key := case.is_new:
            known = {key(row.run) for row in fitted}
            asked = [row for row in asked if key(row.run) not in known]
        return [(fitted, asked)]
    keys = [case.by(row.run) for row in asked]
    of = lambda key, ours: [row for row, own in zip(asked, keys, strict=True) if (own == key) is ours]
    return [(of(key, False), of(key, True)) for key in dict.fromkeys(keys)]


def _part(case: Case, fitted: list[Measured], asked: list[Measured]) -> Part:
    known = fitted_system(case.system, tuple(fitted), case.has_surface)
    predicted = seconds_of(asked, known)
    bounds = predicted[:, None] * np.array([factors(known.calibration, row.run) for row in asked])
    return Part(fitted, asked, predicted, bounds, [_kind(row.run, known) for row in asked])


def _kind(run: Done, system: System) -> str:
    """Return how a run differs from those that the system's constants were fitted to."""
    if system.calibration is None:
        return "nothing fitted"
    if uncalibrated(run, system):
        return "a kind of plan or block that was not fitted"
    return "beyond the fitted sizes" if octaves_beyond(run, system.calibration) else "within the fitted sizes"


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


@lru_cache(maxsize=64)
def fitted_system(system: str, rows: tuple[Measured, ...], has_surface: bool) -> System:
    """Return the system of this name with constants fitted to the rows."""
    return fitted_to(rows, load_system(system), has_surface=has_surface)


def fitted_to(rows: Sequence[Measured], system: System, *, has_surface: bool = True) -> System:
    """Return the system with constants fitted to the rows; its priors without rows."""
    return fit(rows, system, with_surface=has_surface) if rows else with_priors(system)


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


def on_data_sheet(system: System) -> System:
    """Return the system as its makers rate it: efficiencies are 1, and nothing takes time but products and bytes."""
    full = {name: 1.0 for name in system.all_constants if name.endswith("efficiency")}
    own = full | dict.fromkeys(("gemm_fill", *NETWORK[1], *COMPUTING[1]), 0.0) | {"nic_shared": 1.0}
    return replace(system, constants={name: Constant(value) for name, value in own.items()}, calibration=None)


def with_priors(system: System) -> System:
    """Return the system as before it was fitted."""
    constants = {name: replace(one, value=one.prior or one.value) for name, one in system.constants.items()}
    return replace(system, constants=constants, calibration=None)
