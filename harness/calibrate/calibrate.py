"""The verb `calibrate`: measure this machine, and write it as a system that can be predicted for."""

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.calibrate.runs import MEASURED, CalibrationOrders
from harness.calibrate.system import Measurements, system_of
from harness.doctor.checks import BUSY_PERCENT, LOOK_SECONDS
from harness.doctor.measuring import failure_of, follow, orders, started
from harness.doctor.report import Report, report_of
from harness.launch.flags import DeviceChoice, require_positive
from harness.launch.slurm import DeviceKind, Site
from harness.predict.systems import SUFFIXES
from harness.rank.devices import gpu_count
from harness.rank.json_files import read_as
from harness.records.store import write_atomically
from harness.records.writable import require_writable
from harness.terminal import Flag, print_json
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.simulator.system import System

HEAD = """# Measured by `{command}`.
# SI units; seconds of products by m, n, k of [m, k] times [k, n], of attention by batch, heads, sequence and head size
# forward and backward, of collectives by bytes of the whole tensor. Every number says where it comes from.
"""


def calibrate(
    *,
    out: Path,
    device: DeviceChoice = "auto",
    ranks: int | None = None,
    precision: tuple[Precision, ...] = ("fp32",),
    threads: int = 1,
    wait: float = 900.0,
    json: Flag = False,
) -> int:
    """Measure this machine, in a minute or two, and write it down as a system for `predict` and `tune`.

    Products, attention, elementwise work, the update and collectives are timed on all ranks at once. A few small runs
    are trained, and the software's other costs are fitted to their step times.

    Args:
        out: The YAML file to write.
        device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has GPUs.
        ranks: Ranks that measure together; by default one per GPU, or two on processors.
        precision: Precisions of the runs to be predicted, one or several.
        threads: CPU threads of a rank.
        wait: Longest duration in seconds.
        json: Print the system as one JSON document on standard output.
    """
    chosen: DeviceKind = ("cuda" if gpu_count() else "cpu") if device == "auto" else device
    count = ranks if ranks is not None else (gpu_count() if chosen == "cuda" else 0) or 2
    site = Site(on="local", device=chosen)
    _require(out, site, count, precision, threads, wait)
    run = Run(plan=Plan(dp=count), train=Recipe(global_batch=count, microbatch=1), threads=threads)
    if (busy := psutil.cpu_percent(LOOK_SECONDS)) > BUSY_PERCENT:
        print(
            f"warning: other programs use {busy:.0f}% of the processors, which slows what is measured", file=sys.stderr
        )
    spec = CalibrationOrders(**vars(orders(run, site, wait, "harness.calibrate.rank")), precisions=precision)
    found = _measured(spec, site, quiet=json)
    if found is None:
        return 1
    system = system_of(found, out.stem)
    how = f"--ranks {count} --precision {' '.join(precision)} --threads {threads}"
    write_atomically(out, text_of(system, f"lmscale calibrate --out {out.name} --device {chosen} {how}"))
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
    require_writable(out.resolve().parent)
    require_positive(ranks=ranks, threads=threads, wait=wait)
    if not precisions or len(set(precisions)) < len(precisions) or "fp8" in precisions:
        raise InputError("--precision: one of each, at least one; valid: fp32, bf16, fp16, fp64")
    if reason := site.why_invalid(ranks):
        raise InputError(f"--ranks {ranks}: {reason}")


def _measured(orders: CalibrationOrders, site: Site, *, quiet: bool) -> Measurements | None:
    """Return the ranks' measurements; None if a rank failed, after its failure is printed."""
    with started(orders, site) as attempt:
        _follow(attempt, orders, quiet=quiet)
        reports = [read_as(Report, report_of(attempt, rank)) or Report(rank=rank) for rank in range(orders.ranks)]
        late = next((one for one in reports if one.at), None)
        if late is None:
            return TypeAdapter(Measurements).validate_json((attempt / MEASURED).read_bytes())
        failure = failure_of(attempt, orders.ranks)
        not_ready = f"rank {late.rank} was not ready in time (--wait {orders.time_limit_seconds:g}): {late.at}"
        print(f"error: {failure.reason if failure else not_ready}", file=sys.stderr)
        return None


def _follow(attempt: Path, orders: CalibrationOrders, *, quiet: bool) -> None:
    """Show the progress of the first rank, until the job has ended or has taken too long.

    On standard error: a bar on a terminal, else a line for every part.
    """
    shown = Report(rank=0, at="")
    console = Console(stderr=True, highlight=False, quiet=quiet)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def look() -> None:
            nonlocal shown
            report = read_as(Report, report_of(attempt, 0)) or Report(rank=0, at="")
            bar.update(task, description=report.at or "done", completed=report.done, total=report.of or None)
            if report.at not in ("", shown.at) and not console.is_terminal:
                console.print(f"[{report.done}/{report.of or '?'}] {report.at}", markup=False)
            shown = report

        follow(attempt, orders, look)


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
