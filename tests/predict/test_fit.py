"""Constants are found again in rows that they made, with errors and intervals that hold."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from harness.predict.fit import SURFACE_ROWS, Measured, constant_mfu, fit, percent_off, seconds_of
from harness.predict.interval import interval
from harness.predict.simulation import Done, Simulated, simulated
from harness.records.labels import FIELDS
from impl.errors import InputError
from impl.run import Run
from impl.simulator.constants import Constant
from impl.simulator.system import System
from tests.impl.simulator.made_up import SYSTEM, run_of, with_constants

TRUE: dict[str, Any] = {"gemm_efficiency": 0.6, "memory_efficiency": 0.9, "step_seconds": 0.05}
FREE = {"gemm_efficiency": Constant(0.8, 0.5), "memory_efficiency": Constant(0.75, 0.5)}
FREE |= {"step_seconds": Constant(0.01, 1.0)}


def only(free: dict[str, Constant]) -> System:
    """The made-up system with these constants free, and no others."""
    still = {name: dataclasses.replace(one, log_sd=0.0) for name, one in SYSTEM.all_constants.items()}
    return dataclasses.replace(SYSTEM, constants=still | free)


def asked(run: Run) -> Simulated:
    """A run all of whose fields are given."""
    return simulated(run, FIELDS, SYSTEM)


def rows(count: int, off: float = 0.0) -> list[Measured]:
    """Steps of different sizes as the true constants make them, by turns longer and shorter."""
    truth, made = with_constants(SYSTEM, **TRUE), []
    for i in range(count):
        run = run_of(global_batch=16 * (1 + i % 3), microbatch=2 ** (i % 4), tp=2 ** (i % 2), dp=1 + i // 4 % 2)
        made.append(Measured(f"row {i}", Done(run), 1.0))
    seconds = seconds_of(made, truth) * np.exp(off * (-1.0) ** np.arange(count))
    return [row._replace(seconds=float(one)) for row, one in zip(made, seconds, strict=True)]


def test_constants_are_found_again_from_the_same_priors():
    made = rows(8)
    found = fit(made, dataclasses.replace(only(FREE), row_sd=0.005))
    for name, value in TRUE.items():
        assert found.constant(name) == pytest.approx(value, rel=0.05), name
    assert abs(percent_off(seconds_of(made, found), np.array([row.seconds for row in made]))).max() < 2
    known = found.calibration
    assert known is not None
    assert known.mape < 2 < (known.constant_mfu_mape or 0)
    assert known.rows == [row.name for row in made]
    assert known.ranges["tp"] == (1, 2)
    assert (known.features["precision"], known.features["zero_stage"]) == (["16-bit"], ["0"])
    assert found.all_constants["step_seconds"].prior == pytest.approx(0.01)
    assert fit(made, found).constants == found.constants


def test_what_is_fixed_stays():
    found = fit(rows(4), only({}))
    assert found.constants == only({}).constants


def test_many_rows_have_a_surface_that_learns_what_they_share():
    made = [row._replace(seconds=row.seconds * (1.1 if row.run.train.microbatch == 8 else 1.0)) for row in rows(24)]
    flat, curved = fit(made, only(FREE), with_surface=False), fit(made, only(FREE))
    assert len(made) >= SURFACE_ROWS
    assert flat.calibration is not None
    assert flat.calibration.residuals is None
    assert curved.calibration is not None
    assert curved.calibration.residuals is not None
    measured = np.array([row.seconds for row in made])
    assert abs(percent_off(seconds_of(made, curved), measured)).mean() < 1
    assert curved.calibration.mape < flat.calibration.mape
    low, high, doubts = interval(curved, asked(made[0].run), 1.0)
    assert low < 1 < high
    assert not doubts


def test_rows_left_out_are_answered_as_by_a_fit_without_them():
    made = rows(6, off=0.05)
    flat = only({"gemm_efficiency": Constant(0.8, 0.2)})
    known = fit(made, flat).calibration
    assert known is not None
    errors = []
    for i, row in enumerate(made):
        others = fit([*made[:i], *made[i + 1 :]], flat)
        errors.append(abs(percent_off(seconds_of([row], others), np.array([row.seconds])))[0])
    assert known.mape == pytest.approx(np.mean(errors), rel=0.3)


def test_intervals_grow_with_doubt():
    made = rows(8, off=0.02)
    found, run = fit(made, only(FREE)), made[0].run
    low, high, doubts = interval(found, asked(run), 1.0)
    assert 0.9 < low < 1 < high < 1.1
    assert not doubts
    _, other, doubts = interval(found, asked(run), 1.0, stack="another")
    assert other > high
    assert doubts == ["constants are those of made up, not of another"]
    far = run_of(global_batch=64, dp=32)
    _, farther, doubts = interval(found, asked(far), 1.0)
    assert farther > high
    assert "extrapolates: dp 32, calibrated on 1 to 2" in doubts
    _, widest, doubts = interval(SYSTEM, asked(run), 1.0)
    assert widest > high
    assert doubts == ["system made_up is not calibrated: its constants are priors"]


def test_constant_utilization_is_exact_where_utilization_is():
    made = rows(4)
    rate = constant_mfu(made[:1], made[:1])
    assert rate[0] == pytest.approx(made[0].seconds)
    assert constant_mfu(made, made).prod() == pytest.approx(math.prod(row.seconds for row in made))


def test_no_rows_is_one_line():
    with pytest.raises(InputError, match="no row to fit"):
        fit([], SYSTEM)
