"""Time of one step by kind of work, for any engine, from PyTorch's profiler."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import profile as profiler
from torch.profiler import record_function

from harness.records.store import Document
from impl.device import Device
from impl.grouping import by_key

STEP = "one step"
PARTS: tuple[str, ...] = ("products", "attention", "optimizer", "operators", "communication", "rest")
"""Kinds of work; time in which several go on at once counts for the first of them, and `rest` is when none does."""
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "mkldnn_linear")}
COVERS = ("aten::linear", "aten::matmul", "aten::einsum")
"""Operators that prepare a product and call the one that computes it, which is counted instead."""
ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::", "gloo:", "nccl:")
COMPILED = "## Call CompiledFxGraph"
"""Code of a compiled layer; its time outside of operators is that of fused kernels."""
LARGEST = 20
"""Number of operators or kernels that a profile names."""


class Event(NamedTuple):
    """Operator, kernel or collective that PyTorch's profiler saw, with its start and end in seconds on one clock."""

    name: str
    start: float
    end: float
    thread: int = 0
    id: int = 0
    on_device: bool = False
    """True for a kernel or a copy; its `id` is then that of the operator that launched it."""
    is_async: bool = False
    """True for an asynchronous collective, from its start to its end."""
    part: str = ""
    """Kind of work that its time counts for, once that is known."""


def profiled(step: Callable[[], object], device: torch.device) -> Document:
    """Return seconds of this rank's step and of its parts, which add up to it; another step before it warms up.

    Args:
        step: function that does an optimizer step and returns when the device has finished; all ranks call it together.
    """
    with profiler(activities=Device.of(device).activities) as trace:
        step()
        dist.barrier()
        with record_function(STEP):
            step()
    return parts_of(_events(trace))


def parts_of(events: Sequence[Event]) -> Document:
    """Return seconds of the step among the events, of its parts, and of the largest operators in them.

    Of nested operators the outermost counts, with all that it calls. On a CPU the thread of the step counts. It
    communicates while it starts a collective, and while it is in no operator until the end of a collective that ends
    meanwhile, for which it has waited. A collective that overlaps with operators is not seen. On a GPU kernels count,
    each for the part of the operator that launched it; time that only NCCL's kernels cover is communication, and in
    the rest the device is idle.
    """
    step = next(event for event in events if event.name == STEP and not event.on_device)
    inside = [event for event in events if event.start < step.end and event.end > step.start]
    spans = _on_device(inside) if any(event.on_device for event in inside) else _on_thread(inside, step)
    clipped = [span._replace(start=max(span.start, step.start), end=min(span.end, step.end)) for span in spans]
    by_name = by_key(((span.part, span.name), span.end - span.start) for span in clipped)
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return {
        "seconds": step.end - step.start,
        "parts": attribute(clipped, step.start, step.end),
        "largest": [
            {"part": part, "name": name, "seconds": sum(seconds), "calls": len(seconds)}
            for (part, name), seconds in largest
        ],
    }


def part_of(name: str) -> str | None:
    """Return the part of a step that an operator belongs to; None if only the operators that it calls count."""
    if name in COVERS or name == STEP:
        return None
    if name in PRODUCTS:
        return "products"
    if name.startswith("Optimizer.step#") or "_fused_adam" in name:
        return "optimizer"
    if name.startswith(COMMUNICATION):
        return "communication"
    if name.startswith("aten::") and any(word in name for word in ATTENTION):
        return "attention"
    return "operators" if name.startswith("aten::") else None


def covered(events: Iterable[Event]) -> Iterator[tuple[Event, bool]]:
    """Yield the operators of one thread that have a part, or are in one that has, in order, with that part.

    The second value is True for operators that are in no other that has a part.
    """
    part, end = "", float("-inf")
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        own = part_of(event.name)
        if is_outermost := event.start >= end and own is not None:
            part, end = own, event.end
        if event.end <= end:
            yield event._replace(part=part), is_outermost


def attribute(spans: Iterable[Event], begin: float, end: float) -> dict[str, float]:
    """Return seconds of each part between two moments."""
    edges = sorted(edge for s in spans if s.end > s.start for edge in ((s.start, 1, s.part), (s.end, -1, s.part)))
    seconds, running, now = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0), begin
    for time, change, part in [*edges, (end, 0, "rest")]:
        seconds[next((p for p in PARTS if running[p]), "rest")] += time - now
        running[part] += change
        now = time
    return seconds


def _on_thread(events: Sequence[Event], step: Event) -> Sequence[Event]:
    """Return the operators of the step's thread, and the waits for collectives between them."""
    own = [event for event in events if event.thread == step.thread and not event.is_async]
    spans = [event for event, is_outermost in covered(own) if is_outermost]
    ended = sorted((e.end, e.name) for e in events if e.is_async and part_of(e.name) == "communication")
    idle, busy = [step.start, *(s.end for s in spans)], [*(s.start for s in spans), step.end]
    for start, stop in zip(idle, busy, strict=True):
        last = bisect_right(ended, stop, key=lambda end: end[0]) - 1
        if last >= 0 and ended[last][0] > start:
            end, name = ended[last]
            spans.append(Event(f"wait for {name}", start, end, part="communication"))
    compiled = [event for event in own if event.name.startswith(COMPILED)]
    return spans + [event._replace(name="compiled", part="operators") for event in compiled]


def _on_device(events: Sequence[Event]) -> Sequence[Event]:
    """Return the kernels, each with the part of the operator that launched it."""
    launched: dict[int, str] = {}
    for thread in {event.thread for event in events if not event.on_device}:
        own = [event for event in events if event.thread == thread and not event.on_device and not event.is_async]
        launched |= {event.id: event.part for event, _ in covered(own)}
    is_nccl = lambda kernel: kernel.name.lower().startswith("nccl")
    part = lambda kernel: "communication" if is_nccl(kernel) else launched.get(kernel.id, "operators")
    return [event._replace(part=part(event)) for event in events if event.on_device]


def _events(trace: profiler) -> list[Event]:
    assert trace.profiler is not None
    assert trace.profiler.kineto_results is not None
    events, found = trace.profiler.kineto_results.events(), []
    zero = min(event.start_ns() for event in events)
    for event in events:
        on_device = event.device_type() != DeviceType.CPU
        if on_device and event.is_user_annotation():
            continue
        found.append(
            Event(
                name=event.name(),
                start=(event.start_ns() - zero) / 1e9,
                end=(event.end_ns() - zero) / 1e9,
                thread=event.start_thread_id(),
                id=event.linked_correlation_id() if on_device else event.correlation_id(),
                on_device=on_device,
                is_async=event.is_async(),
            )
        )
    return found
