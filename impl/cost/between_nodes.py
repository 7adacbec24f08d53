"""Bytes that leave a node in one training step, by formula, where a node has all ranks that share a layer."""

from functools import cache

from impl.cost.place import Place
from impl.cost.traffic import pipeline_traffic, state_traffic
from impl.run import Run


@cache
def sent_beyond_layers(run: Run, vocab_size: int) -> float:
    """Return the bytes that the busiest rank sends to data-parallel ranks and to other stages in a step."""
    pp, dp = run.plan.pp, run.plan.dp
    places = [Place(run, vocab_size, rank) for rank in sorted({0, pp // 2, pp - 1})]  # stages between these are alike
    passes = lambda op: 2 if op == "all_reduce" else 1  # an all-reduce goes round the ring twice
    of_ranks = [state_traffic(place).get("dp", {}).items() for place in places]
    round_the_ring = max(sum(count.bytes * passes(op) for op, count in of_rank) for of_rank in of_ranks)
    middle = pipeline_traffic(Place(run, vocab_size, pp // 2))  # in both directions
    return round_the_ring * ((dp - 1) / dp) + (middle["send"].bytes if pp > 1 else 0)
