"""Errors planted into the engine's own code, each on some ranks only where a rank would not fail by itself."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import impl.collectives as collectives
import impl.pipeline.engine as engine
import impl.train as train
import impl.zero.gradients as gradients
import impl.zero.parameters as parameters
from impl.ghost.recorder import instead
from impl.plan import Plan
from impl.zero.buckets import Bucket


class Mutant(NamedTuple):
    """An error, the plan that shows it, and words of the line that names it."""

    where: Any
    change: Callable[[Any], dict[str, Any]]
    """Function from where it is planted to what it is there."""
    plan: Plan
    words: str


def on(rank: int, wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """The wrong function on one rank, the right one on others."""
    return lambda *args, **kwargs: (wrong if dist.get_rank() == rank else right)(*args, **kwargs)


def late_send(at: Any) -> dict[str, Any]:
    """Rank 0 sends its first microbatch when all else is done."""
    right = at.lower

    def lower(schedule: Any) -> Any:
        rows = [list(row) for row in right(schedule)]
        if dist.get_rank() == 0:
            rows[0].append(rows[0].pop(next(i for i, action in enumerate(rows[0]) if action.op is engine.Op.SEND_F)))
        return rows

    return {"lower": lower}


def missing_wait(at: Any) -> dict[str, Any]:
    right = at.Pending.wait
    return {
        "Pending": type(
            "Pending", (at.Pending,), {"wait": lambda self: self.tensor if dist.get_rank() else right(self)}
        )
    }


def missing_collective(at: Any) -> dict[str, Any]:
    return {"all_reduce_sum": on(1, lambda tensor, _: tensor, at.all_reduce_sum)}


def wrong_group(at: Any) -> dict[str, Any]:
    start = at.all_reduce_start
    return {"all_reduce_start": on(1, lambda tensor, _: start(tensor, dist.group.WORLD), start)}


def wrong_size(at: Any) -> dict[str, Any]:
    start = at.all_reduce_start
    return {"all_reduce_start": on(1, lambda tensor, group: start(tensor[:-1], group), start)}


def wrong_type(at: Any) -> dict[str, Any]:
    start = at.all_reduce_start
    return {"all_reduce_start": on(1, lambda tensor, group: start(tensor.double(), group), start)}


def one_more(at: Any) -> dict[str, Any]:
    start = at.all_reduce_start

    def twice(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        start(tensor, group).wait()
        return start(tensor, group)

    return {"all_reduce_start": on(1, twice, start)}


def send_without_receive(at: Any) -> dict[str, Any]:
    def start(tensor: torch.Tensor, *to: Any) -> Any:
        collectives.send_start(tensor, *to).wait()
        return collectives.send_start(tensor, *to)

    return {"send_start": on(0, start, at.send_start)}


def wrong_peer(at: Any) -> dict[str, Any]:
    start = at.send_start
    wrong = lambda tensor, peer, group, over: start(tensor, (peer + 1) % group.size(), group)
    return {"send_start": on(0, wrong, start)}


def other_kind(at: Any) -> dict[str, Any]:
    def reduced(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return collectives.all_reduce_start(whole, group)._replace(tensor=own)

    return {"reduce_scatter_into_start": on(1, reduced, at.reduce_scatter_into_start)}


def crossed_groups(at: Any) -> dict[str, Any]:
    """Rank 1 sums over the second group first, and waits each time."""
    right = at.all_reduce_sum

    def norm(self: Any) -> torch.Tensor:
        total = torch.zeros((), device=self.buckets[0].device)
        groups = [self.every_rank, self.buckets[0].reduction.group]
        for group in groups[:: -1 if dist.get_rank() == 1 else 1]:
            right(total, group)
        return total

    return {"Gradients": type("Gradients", (at.Gradients,), {"norm": norm})}


def other_buckets(at: Any) -> dict[str, Any]:
    divide = at.divide
    smaller = lambda *args, bucket_bytes, **kwargs: divide(*args, bucket_bytes=bucket_bytes // 8, **kwargs)
    return {"divide": on(1, smaller, divide)}


def late_wait(at: Any) -> dict[str, Any]:
    """Rank 0 waits for what it has received when it has computed with it."""
    compute = at._compute

    def take(self: Any, step: Any, action: Any) -> Any:
        op, stage, microbatch = action
        key = engine.Action(engine.Op.RECV_F, stage, microbatch)
        if op is not engine.Op.F or key not in step.arrived:
            return right(self, step, action)
        self.pending = step.arrived.pop(key)
        return self.pending.tensor

    def late(self: Any, *args: Any) -> None:
        compute(self, *args)
        if pending := self.__dict__.pop("pending", None):
            pending.wait()

    right = at._take
    return {"_take": take, "_compute": late}


def late_gather(at: Any) -> dict[str, Any]:
    """Rank 0 waits for gathered parameters when it has computed with them."""
    settle, release = at.settle, at.release

    def late(self: Any, buckets: Any) -> None:
        for bucket in buckets:
            settle(self, bucket)
        release(self, buckets)

    return {"settle": on(0, lambda self, bucket: None, settle), "release": on(0, late, release)}


def overwritten(at: Any) -> dict[str, Any]:
    """Rank 0 writes to what it is sending."""
    start = at.send_start

    def wrong(tensor: torch.Tensor, *to: Any) -> Any:
        pending = start(tensor, *to)
        tensor.mul_(1.0)
        return pending

    return {"send_start": on(0, wrong, start)}


def not_awaited(at: Any) -> dict[str, Any]:
    def settle(self: Any, bucket: Bucket) -> None:
        bucket.gathering = None

    return {"settle": on(0, settle, at.settle)}


MUTANTS = {
    "a send too late": Mutant(engine, late_send, Plan(pp=2), "for ever"),
    "no waits": Mutant(collectives, missing_wait, Plan(tp=2), "never waits for"),
    "parameters are not awaited": Mutant(
        parameters.Parameters, not_awaited, Plan(dp=2, zero_stage=1), "rank 0 never waits for all_gather"
    ),
    "a received tensor is used before the wait": Mutant(
        engine.Engine,
        late_wait,
        Plan(pp=2),
        "rank 1: native_layer_norm reads receive of 128 float32 from rank 0 before",
    ),
    "parameters are used before the wait": Mutant(
        parameters.Parameters, late_gather, Plan(dp=2, zero_stage=3), "rank 0: embedding reads all_gather"
    ),
    "what is sent is written to": Mutant(engine, overwritten, Plan(pp=2), "rank 0: mul_ writes to send"),
    "a collective is missing": Mutant(gradients, missing_collective, Plan(dp=2), "none on rank 1"),
    "a collective over another group": Mutant(gradients, wrong_group, Plan(dp=2, tp=2), "over ranks 0, 1, 2, 3 is"),
    "another size": Mutant(gradients, wrong_size, Plan(dp=2), "all_reduce of 9583 float32"),
    "another type": Mutant(gradients, wrong_type, Plan(dp=2), "float64"),
    "one collective more": Mutant(gradients, one_more, Plan(dp=2), "collective 2 over ranks 0, 1"),
    "a send without receive": Mutant(engine, send_without_receive, Plan(pp=2), "no receive on rank 1"),
    "a send to another rank": Mutant(engine, wrong_peer, Plan(pp=3), "transfer 1 from rank 0 to rank 2"),
    "another kind": Mutant(gradients, other_kind, Plan(dp=2, zero_stage=1), "reduce_scatter"),
    "two groups in crossed order": Mutant(train, crossed_groups, Plan(dp=2, tp=2), "wait for ever"),
    "other buckets": Mutant(train, other_buckets, Plan(dp=2, bucket_bytes=10_000), "on rank 1"),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    mutant = MUTANTS[name]
    with ExitStack() as stack:
        stack.enter_context(instead(mutant.where, **mutant.change(mutant.where)))
        yield
