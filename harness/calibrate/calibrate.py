"""The verb `calibrate`: measure this machine, and write it as a system that can be predicted for."""

import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.calibrate.runs import CalibrationOrders
from harness.calibrate.system import system_of
from harness.doctor.doctor import orders
from harness.launch.slurm import Device, Site
from harness.predict.memory import gpu_memory
from harness.predict.systems import SUFFIXES
from harness.rank import jobs
from harness.rank.devices import gpu_count
from harness.records.environment import processor
from harness.records.store import read_json, write_atomically
from harness.terminal import Flag, print_json
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.simulator.system import System

POLL_SECONDS = 0.5
LOOK_SECONDS, BUSY_PERCENT = 0.5, 15.0
"""Seconds for which the load is sampled before measuring, and percent of the processors that others may use."""
HEAD = """# Measured by `{command}`.
# SI units; seconds of products by m, n, k of [m, k] times [k, n], of attention by batch, heads, sequence and head size
# forward and backward, of collectives by bytes of the whole tensor. Every number says where it comes from.
"""


def calibrate(
    *,
    out: Path,
    device: Device | Literal["auto"] = "auto",
    ranks: int | None = None,
    precision: tuple[Precision, ...] = ("fp32",),
    threads: int = 1,
    wait: float = 900.0,
    json: Flag = False,
) -> int:
    """Measure this machine, in a minute or two, and write it down as a system for `predict` and `tune`.

    Products, attention, elementwise work, the update and collectives are timed on all ranks at once, and a few small
    runs are trained, whose steps decide what the software takes besides.

    Args:
        out: The YAML file to write.
        device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has GPUs.
        ranks: Ranks that measure together; by default one per GPU, or two.
        precision: What the runs to be predicted compute in, one or several.
        threads: CPU threads of a rank.
        wait: Seconds that it may take.
        json: Print the system as one JSON document on standard output.
    """
    chosen: Device = ("cuda" if gpu_count() else "cpu") if device == "auto" else device
    count = ranks if ranks is not None else gpu_count() or 2
    site = Site(on="local", device=chosen)
    _require(out, site, count, precision, threads, wait)
    run = Run(plan=Plan(dp=count), train=Recipe(global_batch=count, microbatch=1), threads=threads)
    if (busy := psutil.cpu_percent(LOOK_SECONDS)) > BUSY_PERCENT:
        print(
            f"warning: {busy:.0f}% of the processors' time is others': what they take is measured too", file=sys.stderr
        )
    found = _measured(site, run, precision, wait, quiet=json)
    if not found:
        return 1
    system = system_of(
        found, _about(out.stem, chosen, count, found[0]), precision, f"measured here on {datetime.date.today()}"
    )
    write_atomically(out, text_of(system, f"harness calibrate --device {chosen} --ranks {count}"))
    if json:
        return print_json(system.as_dict())
    _print(system, out)
    return 0


def text_of(system: System, command: str) -> str:
    """Return the text of a system's file."""
    document = yaml.safe_dump(system.as_dict(), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return HEAD.format(command=command) + document


def _require(out: Path, site: Site, ranks: int, precisions: Sequence[str], threads: int, wait: float) -> None:
    """Check that a calibration is possible, before anything is measured.

    Raises:
        InputError: an option has an impossible value.
    """
    if out.suffix not in SUFFIXES:
        raise InputError(f"--out {out}: a system is a YAML file; valid: a name that ends in {' or '.join(SUFFIXES)}")
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise InputError(f"--out {out}: {'is a folder' if out.is_dir() else 'its folder does not exist'}")
    for name, value in (("ranks", ranks), ("threads", threads)):
        if value < 1:
            raise InputError(f"--{name} {value}: must be 1 or more")
    if not 0 < wait < float("inf"):
        raise InputError(f"--wait {wait}: must be more than 0, and finite")
    if not precisions or len(set(precisions)) < len(precisions):
        raise InputError("--precision: one of each, at least one; valid: fp32, bf16, fp16, fp64")
    if reason := site.why_invalid(ranks):
        raise InputError(f"--ranks {ranks}: {reason}")


def _measured(
    site: Site, run: Run, precisions: tuple[Precision, ...], wait: float, *, quiet: bool
) -> list[dict[str, Any]]:
    """Return the facts that every rank measured; none if a rank failed, after its failure is printed."""
    ranks, folder = run.plan.world_size, Path(tempfile.mkdtemp(prefix="calibrate-")).resolve()
    attempt = folder / "calibrate"
    attempt.mkdir()
    try:
        common = asdict(orders(run, site, wait, "harness.calibrate.rank"))
        CalibrationOrders(**common, precisions=precisions).write(attempt)
        site.submit([attempt], ranks, wait, 1)
        _follow(attempt, wait, quiet=quiet)
        found = [read_json(attempt / f"rank-{rank}.json") or {} for rank in range(ranks)]
        if all(facts.get("at") == "" for facts in found):
            return found
        failures = [one for path in sorted(attempt.glob("rank-*.failure.json")) if (one := read_json(path))]
        if failures:
            reason = min(failures, key=lambda one: one["time"])["reason"]
        else:
            rank = next(rank for rank, facts in enumerate(found) if facts.get("at") != "")
            reason = f"rank {rank} was not ready in time (--wait {wait:g}): {found[rank].get('at', 'starting')}"
        print(f"error: {reason}", file=sys.stderr)
        return []
    finally:
        jobs.cancel([attempt])
        shutil.rmtree(folder, ignore_errors=True)


def _follow(attempt: Path, wait: float, *, quiet: bool) -> None:
    """Show the progress of the first rank, until the job has ended or has taken too long.

    On standard error: a bar on a terminal, else a line for every part.
    """
    end, shown = time.monotonic() + wait, ""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        while time.monotonic() < end:
            facts = read_json(attempt / "rank-0.json") or {}
            at, done = facts.get("at", ""), facts.get("done", 0)
            bar.update(task, description=at or "done", completed=done, total=facts.get("of"))
            if at and at != shown and not console.is_terminal:
                console.print(f"[{done}/{facts.get('of', '?')}] {at}", markup=False)
            shown = at
            state = jobs.states([attempt]).get(attempt)
            if state is not None and state.name == "ended":
                return
            time.sleep(POLL_SECONDS)


def _about(name: str, device: Device, ranks: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return which machine this is, and the share of it that is one rank's."""
    memory = gpu_memory() if device == "cuda" else None
    return {
        "name": name,
        "stack": f"this suite, PyTorch {facts['torch']}",
        "hardware": facts["device_name"] if device == "cuda" else processor(),
        "kind": device,
        "memory_bytes": memory or psutil.virtual_memory().total // ranks,
        "processors": facts.get("processors"),
    }


def _print(system: System, out: Path) -> None:
    rates = ", ".join(f"{p} {peak.value / 1e9:,.0f} GFLOP/s" for p, peak in system.device.peak_flops.items())
    device = system.device
    print(f"{system.hardware}: {rates}; memory {device.memory_bandwidth.value / 1e9:.1f} GB/s")
    for curve in system.collectives:
        ends = [curve.rows[0], curve.rows[-1]]
        shown = " to ".join(f"{seconds * 1e6:,.0f} µs ({size:,.0f} bytes)" for size, seconds in ends)
        print(f"{curve.op} over {curve.ranks} ranks: {shown}")
    if (made := system.calibration) is not None:
        print(
            f"{len(made.rows)} runs trained; each run's step, predicted from the others: {made.mape:.1f}% off on "
            f"average, {made.worst:.1f}% at most"
        )
    print(f"written: {out}; `lmscale predict ... --system {out}` predicts for it")
