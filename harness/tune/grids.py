"""Tensor-parallel ranks that divide hidden features too (`plan.tp3`): plans that the closed form does not know."""

from collections.abc import Iterable, Iterator

from harness.tune.search import Judged
from impl.fields import divisors
from impl.run import Run
from impl.simulator.plans import run_of

SHAPES = 5
"""Fastest plans with tensor parallelism of which grids are judged."""


def in_grids(rows: Iterable[Judged], base: Run, *, splits: bool) -> Iterator[Judged]:
    """Yield rows' first plans with their tensor-parallel ranks as each possible grid; none if tokens are split."""
    for row in [row for row in rows if row["tp"] > 1 and not splits][:SHAPES]:
        z = run_of(row, base).plan.zero if row["zero_stage"] == 3 else 1
        for y in divisors(row["tp"])[1:]:
            changed = {**row, "sequence_parallel": False, "tp3": (row["tp"] // y, y, z)}
            if not run_of(changed, base).problems():
                yield changed
