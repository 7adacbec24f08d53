"""What `tune` prints: the fastest plans, what makes them doubtful, and which knobs matter most."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from harness.predict.interval import EXTRAPOLATES, is_beyond
from harness.predict.kinds import MISSED
from harness.records.measures import size_name
from harness.terminal import console, shown
from harness.tune.measured import print_compared
from harness.tune.search import Judged
from impl.grouping import by_key
from impl.simulator.plans import DEFAULTS, KNOBS
from impl.simulator.system import System

GIB = 2**30


def print_search(document: Mapping[str, Any], system: System) -> int:
    """Print the document of a search; returns the exit status."""
    took, rate = document["closed_form"]["seconds"], document["closed_form"]["plans_per_s"]
    size = size_name(document["model"]["parameters"])
    print(
        f"{size} on {document['gpus']:,} x {system.hardware} ({system.name}, {system.stack}), batch "
        f"{document['global_batch']:,}: {document['plans']:,} plans in closed form in {took:.1f} s ({rate:,.0f} a "
        f"second), of which {document['fitting']:,} fit {shown(document['memory_limit_bytes'])}"
    )
    if agreement := document["agreement"]:
        print(
            f"events say within {agreement['mean']:.2%} of that on average, {abs(agreement['worst']):.2%} at most; "
            f"{len(document['failed'])} plans do not fit, or failed"
        )
    if interval := document["interval"]:
        print(f"the fastest takes {interval['low']:.4g} to {interval['high']:.4g} s, nine times of ten")
        for warning in interval["warnings"]:
            if not is_beyond(warning):
                print(f"warning: {warning}")
    _print_doubts(document, system)
    tables = {"fastest": document["best"], "faster or smaller than all others": document["pareto"]}
    if any(row["doubts"] for row in document["best"][:1]):
        tables = {"fastest": document["best"], "fastest of calibrated kinds": document["trusted"]} | tables
    for title, rows in ((title, rows) for title, rows in tables.items() if rows):
        _print_plans(title, rows)
        if doubts := _beyond(rows):
            known = system.calibration is not None
            print(f"warning: * {f'{system.name} was not calibrated on ' * known}{doubts}")
        if unsure := _numbered([["may not fit"] * (row["fit"] == "may fit") for row in rows]):
            print(f"warning: {unsure}{system.device.taken.doubt('may fit')}")
        if missed := _numbered([[doubt for doubt in row["doubts"] if MISSED in doubt] for row in rows]):
            print(f"warning: * {missed}")
    if order := document["order"]:
        _print_order(order)
    _print_knobs(document["importance"], document["best_by_value"])
    if tried := document.get("trials"):
        failed = sum("reason" in row for row in tried)
        fastest = f"; the fastest takes {tried[0]['seconds']:.4g} s" if failed < len(tried) else ""
        print(f"Optuna: {len(tried)} plans, {failed} failed{fastest}")
    if "measured" in document:
        print_compared(document["measured"])
    return 0


def _print_doubts(document: Mapping[str, Any], system: System) -> None:
    """Print why the kind of the fastest plan is doubtful, and what the fastest of a kind without doubt takes."""
    if not document["best"] or not (doubts := document["best"][0]["doubts"]):
        return
    print(f"warning: the fastest plan is of a kind that {system.name} is in doubt about: {'; '.join(doubts)}")
    if not (trusted := document["trusted"]):
        print("no plan that fits is of a kind without such doubt")
        return
    first, best = trusted[0], document["best"][0]
    longer = first["seconds"] / best["seconds"] - 1
    print(
        f"the fastest of a kind without such doubt takes {first['seconds']:.4g} s, {longer:.0%} longer: {_words(first)}"
    )


def _print_order(order: Mapping[str, Any]) -> None:
    """Print how much shorter the fastest pipeline's step can be by another order of its passes."""
    less = lambda seconds: f"{seconds:.4g} s, {1 - seconds / order['seconds']:.1%} less"
    found = f"; the shortest that was found takes {less(order['found'])}" if "found" in order else ""
    if "not_searched" in order:
        found = "; its table is too large to search for the shortest"
    print(
        f"the fastest pipeline takes {order['seconds']:.4g} s; no order of its passes in its memory takes less than "
        f"{less(order['bound'])}{found}"
    )
    if table := order.get("schedule"):
        print(f"that table is a plan's: --plan.schedule {table}")


def _words(row: Judged) -> str:
    """Return a plan in words: degrees and microbatch, and each other knob that differs from its default."""
    always = ("tp", "pp", "dp", "microbatch")
    return ", ".join(f"{knob} {row[knob]}" for knob in (*always, *_changed(row, always))).lower()


def _changed(row: Judged, shown: Sequence[str]) -> list[str]:
    """Return the knobs of a plan, other than those that are shown anyway, that differ from their defaults."""
    changed = [knob for knob in KNOBS if knob not in shown and row[knob] != DEFAULTS.get(knob)]
    return changed + ["tp3"] * ("tp3" in row)


def _beyond(rows: Sequence[Judged]) -> str:
    """Return sizes and features that systems were not calibrated on, each with the numbers of its plans."""
    short = lambda warning: warning.removeprefix(EXTRAPOLATES).partition(", calibrated on")[0].strip()
    return _numbered([list(map(short, filter(is_beyond, row["warnings"]))) for row in rows])


def _numbered(rows: Sequence[Sequence[str]]) -> str:
    """Return each text of rows with the numbers of its rows."""
    numbers = by_key((text, number) for number, texts in enumerate(rows, 1) for text in texts)
    plans = lambda of: "all plans" if len(of) == len(rows) else f"plan{'s' * (len(of) > 1)} {', '.join(map(str, of))}"
    return "; ".join(f"{what} ({plans(of)})" for what, of in numbers.items())


def _print_plans(title: str, rows: Sequence[Judged]) -> None:
    names = ("tp", "pp", "dp", "microbatch", "schedule", "chunks", "recompute", "zero_stage")
    table = Table("", "step (s)", "TFLOP/s", "MFU", "GiB", *names, "besides", title=title, title_justify="left")
    for column in table.columns:
        column.no_wrap = True
    for number, row in enumerate(rows, 1):
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        said = lambda knob, value: knob if value is True else f"no {knob}" if value is False else f"{knob} {value}"
        besides = ", ".join(said(knob, row[knob]) for knob in _changed(row, names))
        rate = row["model_flops_per_gpu_s"] / 1e12
        numbers = (f"{row['seconds']:.3f}", f"{rate:.1f}", mfu, f"{row['bytes'] / GIB:.1f}")
        star = "*" * (any(map(is_beyond, row["warnings"])) or bool(row["doubts"]))
        table.add_row(f"{number}{star}", *numbers, *(str(row[name]) for name in names), besides)
    console(table).print(table)


def _print_knobs(shares: Mapping[str, float], by_value: Mapping[str, Mapping[str, float]]) -> None:
    heads = ("knob", "importance", "fastest step (s) with each value")
    table = Table(*heads, title="what matters most", title_justify="left")
    for knob in sorted(by_value, key=lambda knob: -shares.get(knob, 0.0)):
        values = sorted(by_value[knob].items(), key=lambda item: item[1])
        fastest = ", ".join(f"{value} {seconds:.4g}" for value, seconds in values[:8])
        table.add_row(knob, f"{shares.get(knob, 0.0):.0%}", fastest + (", ..." if len(values) > 8 else ""))
    console(table).print(table)
