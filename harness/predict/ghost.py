"""The verb `ghost`: the real engine of every kind of rank of a run, executed alone and held against the others."""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from harness.predict.memory import tokenizer_size
from harness.terminal import Flag, columns, parse_bytes, print_json, shown, shown_progress
from impl.cost.memory import memory_of_ranks
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.own_code import code_of, trust
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.room import fit, taken_of

if TYPE_CHECKING:
    from impl.ghost.checks import Cast
    from impl.ghost.rank import Executed

MOST_RANKS, MOST_PASSES, MOST_LAYERS = 2**14, 2**18, 2**13
"""Ranks of a plan, passes of all pipeline ranks, and passes through a layer that are executed: these take minutes."""
BACKEND = {"cuda": "nccl", "cpu": "gloo"}
WITHOUT_EFFECT = ("lr", "min_lr", "weight_decay", "beta1", "beta2", "eps")
"""Fields of a recipe that do not change what ranks do."""
HOLDS = {
    "uses": "no operation uses the memory of what is under way before it is awaited",
    "orders": "every group's collectives and every pair's transfers are the same on all their ranks, and nothing hangs",
    "equal ranks": "the last ranks of dp, cp and tp do what the first do",
    "traffic": "calls and bytes are those of the formulas",
    "schedule": "the pipeline's transfers are those of the schedule's table",
    "passes": "what is sent within layers is the simulator's list, pass by pass",
}
"""What is true of the ranks if a check finds no problem, by the name of the check."""


def ghost(
    config: Annotated[Run, tyro.conf.arg(name="")] = Run(),  # noqa: B008 - frozen
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    device_memory: str | None = None,
    json: Flag = False,
) -> int:
    """Execute the ranks of a run without devices, check their order: a step of each, without network or memory.

    The exit status is 1 if ranks do not fit together, or differ from the formulas.

    Args:
        config: The run; `--model NAME` starts from a named size.
        device: Whose branches the engine takes.
        device_memory: What one device has, as 80GB or 40GiB: says whether the fullest rank fits.
        json: Print one JSON document on standard output.
    """
    limit = None if device_memory is None else parse_bytes(device_memory)
    require_possible(config, device)
    found = examined(config, device)
    most = max(map(_on_device, found["memory"]), default=0)
    verdict = None if limit is None else fit(most, limit, taken_of(device))
    found |= {"fullest_bytes": most, "fits": verdict and verdict != "does not fit", "fit": verdict}
    if json:
        print_json(found)
    else:
        _print(config, found, device_memory)
    return int(any(found["problems"].values()) or found["fits"] is False)


def all_fit(points: Mapping[str, Run], device: str) -> bool:
    """Print for every point, by its label, what is wrong with its ranks; return whether nothing is.

    Points whose ranks do the same are executed once.
    """
    fits, known = True, dict[Run, dict[str, list[str]]]()
    for label, run in points.items():
        kind = _kind(run)
        try:
            require_possible(run, device)
            found = known[kind] = known[kind] if kind in known else examined(run, device)["problems"]
        except InputError as error:
            print(f"ghost: {label}: not executed: {error}")
            continue
        lines = [f"{name}: {line}" for name, lines in found.items() for line in lines]
        fits = fits and not lines
        print(*(f"ghost: {label}: {line}" for line in lines or ["ranks fit together"]), sep="\n")
    return fits


def _kind(run: Run) -> Run:
    """Return the run of all whose ranks do the same: seeds and rates change none of what is checked."""
    usual = {name: getattr(Recipe(), name) for name in WITHOUT_EFFECT}
    return replace(run, seed=0, repeat=0, train=replace(run.train, **usual))


def require_possible(run: Run, device: str) -> None:
    """Check that the run can be executed so.

    Raises:
        InputError: it cannot be, or not in minutes.
    """
    from impl.ghost.rank import LAST, SAMPLES, refusals

    if lines := refusals(run, device):
        raise InputError(lines[0])
    if run.plan.world_size > MOST_RANKS:
        raise InputError(f"ghost with {run.plan.world_size:,} ranks would take hours; valid: up to {MOST_RANKS:,}")
    plan, microbatches = run.plan, run.microbatches
    if (passes := plan.pp * plan.chunks * microbatches) > MOST_PASSES:
        what = f"plan.pp x plan.chunks x microbatches of {passes:,}"
        raise InputError(f"ghost with {what} would take hours; valid: up to {MOST_PASSES:,}")
    few = min(microbatches, SAMPLES + LAST) if plan.zero_stage < 2 else microbatches
    if (layers := run.model.num_layers * few * (plan.cp if plan.is_ring else 1)) > MOST_LAYERS:
        what = f"{layers:,} passes through layers, of {few:,} microbatches"
        raise InputError(f"ghost with {what}, would take hours; valid: up to {MOST_LAYERS:,}")


def examined(run: Run, device: str) -> dict[str, Any]:
    """Return what the ranks of a run did, and the errors found, by kind of check."""
    from impl.ghost.checks import cast, complaints

    tokens, chosen = tokenizer_size(run), cast(run.plan)
    ranks = [*chosen.first, *chosen.last]
    answers = _executed(run, tokens, device, ranks)
    failed = [answer for answer in answers.values() if isinstance(answer, str)]
    done = {rank: answer for rank, answer in answers.items() if not isinstance(answer, str)}
    wrong = {"ranks": failed} if failed else complaints(run, run.model.vocabulary(tokens), chosen, done)
    return {
        "ranks": run.plan.world_size,
        "executed": ranks,
        "repeated_passes": sum(one.repeated for one in done.values()),
        "passes": sum(len(one.passes) for one in done.values()),
        "events": sum(len(one.log) for one in done.values()),
        "problems": wrong,
        **_sums(run, tokens, device, chosen, done),
    }


def _sums(run: Run, tokens: int, device: str, chosen: "Cast", done: "Mapping[int, Executed]") -> dict[str, Any]:
    """Return memory, traffic and FLOPs: of the first rank of every pipeline rank, and FLOPs of all ranks together."""
    vocab_size, each = run.model.vocabulary(tokens), run.plan.world_size // run.plan.pp
    firsts = [done[rank] for rank in chosen.first if rank % each == 0 and rank in done]
    stands_for = run.plan.world_size // max(len(chosen.first), 1)
    formulas = memory_of_ranks(run, vocab_size, head_positions(run.model), device)
    return {
        "memory": [one.memory for one in firsts],
        "memory_by_formula": [one.as_dict() for one in formulas] if firsts else [],
        "traffic": [
            {axes: {op: vars(count) for op, count in ops.items()} for axes, ops in one.counts.items()} for one in firsts
        ],
        "flops": [one.flops for one in firsts],
        "flops_of_all": sum(done[rank].flops * stands_for for rank in chosen.first if rank in done),
    }


def _executed(run: Run, tokens: int, device: str, ranks: Sequence[int]) -> "dict[int, Executed | str]":
    """Return what every rank did, or why it failed; one rank a core is executed at a time."""
    cores = min(len(os.sched_getaffinity(0)), len(ranks))
    one = partial(_one, run, tokens, device)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["impl.ghost.rank"])  # PyTorch is imported once, not by each process of each run

    def answers() -> "Iterator[Executed | str]":
        with ProcessPoolExecutor(cores, context, _prepare, (code_of(run),)) as pool:
            yield from pool.map(one, ranks)

    # the progress first: what starts the processes waits until PyTorch is imported
    return dict(zip(shown_progress(ranks, "executing ranks"), answers(), strict=False))


def _prepare(code: Sequence[str]) -> None:
    """Let this process execute runs with this code, and end with the command, even where that is killed."""
    trust(*code)
    command = multiprocessing.parent_process()
    assert command is not None
    threading.Thread(target=lambda: (command.join(), os._exit(1)), daemon=True).start()


def _one(run: Run, tokens: int, device: str, rank: int) -> "Executed | str":
    import torch

    from impl.ghost.rank import execute

    torch.set_num_threads(1)
    try:
        return execute(run, rank, tokens, device=device, backend=BACKEND[device])
    except RuntimeError as error:
        return f"rank {rank} fails: {error}"


def _print(run: Run, found: Mapping[str, Any], device_memory: str | None) -> None:
    plan, executed = run.plan, found["executed"]
    repeat = f"{found['repeated_passes']:,} of {found['passes']:,} passes repeat one that was executed"
    print(f"executed: {len(executed)} of {found['ranks']:,} ranks, {found['events']:,} events; {repeat}")
    if len(executed) < found["ranks"]:
        whom = f"the first rank of dp {plan.dp}, cp {plan.cp} and tp {plan.tp} of every pipeline rank"
        print(f"inferred: that the others do as {whom}, in groups of their own")
    if found["memory"]:
        print(columns([["pipeline rank", *found["memory"][0], "total", "by formula", "TFLOP", "sent"], *_rows(found)]))
    print(f"FLOPs of all ranks: {found['flops_of_all']:.4g} of matrix products and attention")
    for name, lines in found["problems"].items():
        for line in lines:
            print(f"problem ({name}): {line}")
        if not lines:
            print(f"{name}: {HOLDS[name]}")
    if device_memory is not None:
        print(f"{found['fit']} {device_memory}: {shown(found['fullest_bytes'])}")


def _rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield what the first rank of every pipeline rank needs, computes, and sends by axes of the mesh."""
    columns = (found[name] for name in ("memory", "memory_by_formula", "traffic", "flops"))
    for i, (sizes, formula, traffic, flops) in enumerate(zip(*columns, strict=True)):
        moved = {axes: sum(count["bytes"] for count in ops.values()) for axes, ops in traffic.items()}
        sent = ", ".join(f"{axes} {shown(size)}" for axes, size in moved.items())
        by_category = map(shown, [*sizes.values(), _on_device(sizes), formula["total"]])
        yield [str(i), *by_category, f"{flops / 1e12:,.3g}", sent]


def _on_device(sizes: Mapping[str, int]) -> int:
    return sum(size for name, size in sizes.items() if name != "host")
