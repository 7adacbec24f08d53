"""Fits the constants of packaged systems to their rows again: `python -m tests.packaged_constants`.

To be run after a law of the simulator or a habit of a system has changed. It writes the numbers that a fit gives into
the systems' files and leaves everything else: priors, sources, names of rows, what is known of other predictors.
"""

import dataclasses
import json
import re
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import tyro

from harness.predict.csv_rows import CALIBRATE
from harness.predict.fit import constant_mfu, error_sizes, fit, interval_of, percent_off, seconds_of
from harness.predict.held_out import Rows, with_priors
from harness.predict.systems import load_system, names, path_of
from harness.records.store import write_atomically
from impl.simulator.system import System

WIDTH = 160
ABOUT = "  # log measured over predicted, and hidden size, tensor-parallel degree and microbatch, of each row\n"


def main(only: str = "") -> None:
    """Write them.

    Args:
        only: The systems whose name this is a part of.
    """
    for name in names():
        if only in name and load_system(name).calibration is not None:
            before = path_of(name).read_text()
            after = written(before, fitted_again(name))
            write_atomically(path_of(name), after)
            print(f"{name}: {'unchanged' if after == before else 'changed'}", flush=True)


def fitted_again(name: str) -> System:
    """Return a system with constants and calibration as its rows give them today, with a surface if it has one."""
    system = load_system(name)
    assert system.calibration is not None
    rows = Rows(system.calibration.table, CALIBRATE).read(name)
    found = fit(rows, with_priors(system), with_surface=system.calibration.residuals is not None)
    if not system.calibration.held_out:
        return found
    held_out = Rows(system.calibration.table).read(name)
    measured, predicted = np.array([row.seconds for row in held_out]), seconds_of(held_out, found)
    mean, _, worst = error_sizes(percent_off(predicted, measured))
    baseline, _, _ = error_sizes(percent_off(constant_mfu(rows, held_out), measured))
    interval = interval_of(np.log(measured / predicted), system.row_sd)
    assert found.calibration is not None
    of_held_out = replace(found.calibration, mape=mean, worst=worst, constant_mfu_mape=baseline, interval=interval)
    return replace(found, calibration=of_held_out)


def written(text: str, found: System) -> str:
    """Return the file of a system, which ends with its calibration, with numbers of this one.

    Raises:
        ValueError: it has no place for one of them.
    """
    known = found.calibration
    assert known is not None
    places = {rf"  {name}: {{value: ": one.value for name, one in found.all_constants.items() if one.log_sd > 0}
    places |= {f"  {name}: ": getattr(known, name) for name in ("mape", "worst", "constant_mfu_mape", "interval")}
    for place, value in places.items():
        numbers = f"[{', '.join(map(_short, value))}]" if isinstance(value, tuple) else _short(value)
        text, count = re.subn(rf"(?m)^({place})(\[[^]]*\]|[-+.\de]+)", rf"\g<1>{numbers}", text)
        if count != 1:
            raise ValueError(f"{count} lines begin with {place!r}")
    blocks = {"spread": known.spread, "residuals": known.residuals and dataclasses.asdict(known.residuals)}
    for block, fields in blocks.items():
        text = re.sub(rf"(?m)^(  #.*\n)?  {block}:\n(    .*\n)+", "", text)
        if fields:
            lines = [_line(name, value) for name, value in fields.items()]
            text += "\n".join([f"{ABOUT * (block == 'residuals')}  {block}:", *lines, ""])
    return text


def _line(name: str, value: Any) -> str:
    """Return a field of a block, in several lines if it is long."""
    words = f"{name}: {json.dumps(value)}"
    shorter = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: _short(float(number[0])), words)
    return textwrap.fill(shorter, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6, break_on_hyphens=False)


def _short(value: float) -> str:
    return f"{value or 0.0:.5g}" if value.is_integer() else f"{value:.4g}"


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
