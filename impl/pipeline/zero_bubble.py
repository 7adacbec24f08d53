"""Schedules with less bubble, memory or waiting for transfers than those that `impl.pipeline.schedules` starts with.

All but ZB-H1, ZB-H2 and eager 1F1B run the model down the ranks and back up, a V: of two chunks a rank, chunk a of
rank r is stage r and chunk b is stage 2p - 1 - r, so that the loss is on rank 0, and the last rank hands a microbatch
to itself. T_F, T_B and T_W are the seconds of a forward pass, of the gradient of its input and of that of its weights,
of one chunk.
"""

from collections import Counter, deque
from collections.abc import Iterable

from impl.errors import InputError
from impl.pipeline.schedule import Action, Op, Rows
from impl.pipeline.schedules import row_of


def zb_h1(p: int, m: int) -> Rows:
    """Return 1F1B with deferred weight gradients: idle (p-1)(T_F + T_B - T_W), p microbatches in flight.

    T_F, T_B and T_W are the paper's: forward pass, gradient of the input, gradient of the weights. Rank r defers up to
    r weight gradients, so that every rank has as many microbatches in flight as 1F1B has on rank 0. The last rank has
    min(p, m) - 1 deferred when it sends its last gradient, and rank 0 has one left when that arrives: with fewer
    microbatches than ranks the idle time is (p-1)(T_F + T_B) - (min(p, m) - 1) T_W. Both hold for T_W up to T_F and
    T_B; beyond, rank 0 still waits (p-1) T_B for its first gradient, and the last rank (p-1) T_F for its input.

    Source: Zero Bubble Pipeline Parallelism, Qi et al. 2023 (2401.10241), sections 2.1 and 2.3, tables 1 and 2.
    """
    return [row_of(rank, p, m, 1, warmup=p - rank - 1, owed=rank) for rank in range(p)]


def eager_one_f_one_b(p: int, m: int) -> Rows:
    """Return 1F1B with twice its forward passes ahead: its bubble (p-1)/m, and transfers behind the computation.

    2 (p - rank) - 1 microbatches in flight at most. Transfers of up to half of a forward and a backward pass each add
    2 (p-1) transfers to a step, whatever m is; 1F1B waits for some at every microbatch.

    Source: Zhuang et al. 2023 (2211.05322); passes ahead as in github.com/alpa-projects/alpa, `1f1b_overlap_friendly`.
    """
    return [row_of(rank, p, m, 1, warmup=2 * (p - rank - 1)) for rank in range(p)]


def zb_h2(p: int, m: int) -> Rows:
    """Return ZB-H1 with so many more forward passes at its start that no rank waits between its first and last action.

    2p - 1 microbatches in flight on every rank, where m is as many, and with T_F = T_B = T_W each rank is idle only
    before its first action and after its last: a step is p - 1 forward passes longer than a rank's work. Where all
    ranks wait for the last one, as before our optimizer's step, that is ZB-H1's step; the paper's ranks do not wait.

    Source: Zero Bubble Pipeline Parallelism, Qi et al. 2023 (2401.10241), section 2.2.
    """
    return [row_of(rank, p, m, 1, warmup=2 * (p - rank - 1), owed=2 * rank) for rank in range(p)]


def zbv(p: int, m: int, v: int) -> Rows:
    """Return ZB-V: p microbatches in flight; idle as ZB-H2 is, half as long, where T_F = T_B = T_W.

    A rank's first passes are as many as bring microbatch 0 back to it; then backward passes and their weight gradients
    alternate with forward passes; the last weight gradients are put off. PyTorch's `ScheduleZBVZeroBubble` is the same
    table, which tests hold.

    Source: Qi et al. 2024 (2405.15362), which calls it V-ZB.

    Raises:
        InputError: v is not 2.
    """
    require_two("zbv", v)
    rounds = max(m, 2 * p - 1) - p

    def row(r: int) -> list[Action]:
        first = ["Fa"] * (2 * (p - r) - 1) + ["Fb", "Fa"] * r + ["Fb", "Ib", "Wb"] * (p - r)
        steady = ["Fa", "Ia", "Wa", "Fb", "Ib", "Wb"] * rounds
        last = ["Ia", "Ib"] * r + ["Ia", "Wa"] * (p - r) + ["Wb"] * r + ["Wa"] * r
        return _counted(r, p, m, [*first, *steady, *last])

    return [row(rank) for rank in range(p)]


def dualpipe_v(p: int, m: int, v: int) -> Rows:
    """Return DualPipeV: a forward pass of one chunk and a backward pass of the other in turn, most of these not split.

    DeepSeek's engine overlaps the two, and with them their communication; here a rank does one after the other. The
    table is that of PyTorch's `ScheduleDualPipeV`, which tests hold.

    Source: DeepSeek-V3 (2412.19437) and github.com/deepseek-ai/DualPipe.

    Raises:
        InputError: v is not 2, or m is below 2p.
    """
    require_two("dualpipe_v", v)
    if m < 2 * p:
        raise InputError(f"plan.schedule dualpipe_v takes {2 * p} microbatches or more with plan.pp {p}, not {m}")

    def row(r: int) -> list[Action]:
        below = p - r - 1
        first = ["Fa"] * 2 * below + ["Fa", "Fb"] * (r + 1) + ["Ib", "W", "Fb"] * below
        steady = ["Fa", "Bb", "Fb", "Ba"] * (m - 2 * p + r + 1) + ["Bb", "Fb", "Ba"] * below
        ends = [("B" if i <= r else "I") + chunk for i, chunk in enumerate("ba" * (r + 1))]
        return _counted(r, p, m, [*first, *steady, *ends, *["W", "Ia"] * below, *["W"] * (r + 1)])

    return [row(rank) for rank in range(p)]


def v_half(p: int, m: int, v: int) -> Rows:
    """Return V-Half: half of 1F1B's activations, (p + 2) // 2 microbatches, at half of its bubble or less.

    With T_F = T_B = T_W and m of p or more, a step is 3 (p - 1) passes of a chunk longer than a rank's work, for odd p
    one less; 1F1B's is 6 (p - 1) of them longer.

    Source: Qi et al. 2024 (2405.15362); offsets as in github.com/sail-sg/zero-bubble-pipeline-parallelism.

    Raises:
        InputError: v is not 2.
    """
    require_two("v_half", v)
    gap = 0 if p % 2 else 3
    starts = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r) for r in range(p)]
    return _repeated(p, m, starts, most=(p + 2) // 2)


def v_min(p: int, m: int, v: int) -> Rows:
    """Return V-Min: a third of 1F1B's activations, (p + 4) // 3 microbatches, at two thirds of its bubble.

    With T_F = T_B = T_W and m of p or more, a step is 4p - 5 passes of a chunk longer than a rank's work, 4p - 3 where
    p is a multiple of 3; 1F1B's is 6 (p - 1) of them longer.

    Source: Qi et al. 2024 (2405.15362); offsets as in github.com/sail-sg/zero-bubble-pipeline-parallelism.

    Raises:
        InputError: v is not 2.
    """
    require_two("v_min", v)
    gap = 0 if p % 3 else 2
    starts = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r) for r in range(p)]
    return _repeated(p, m, starts, most=(p + 4) // 3)


def require_two(name: str, v: int) -> None:
    """Raise InputError unless a schedule of two chunks a rank is asked for as many."""
    if v != 2:
        raise InputError(f"plan.schedule {name} has 2 chunks a rank, not plan.chunks {v}; valid: --plan.chunks 2")


def _counted(r: int, p: int, m: int, kinds: Iterable[str]) -> list[Action]:
    """Return a rank's actions: the k-th forward, or backward, pass of a chunk is microbatch k, those beyond m left out.

    Args:
        kinds: operation and chunk; W without a chunk is the oldest weight gradient that was put off.
    """
    stages, seen, owed = {"a": r, "b": 2 * p - 1 - r}, Counter[str](), deque[Action]()
    row = []
    for op, *chunk in kinds:
        if not chunk:
            row.append(owed.popleft()._replace(op=Op.W))
            continue
        kind = ("I" if op == "B" else op) + chunk[0]
        action = Action(Op(op), stages[chunk[0]], seen[kind])
        seen[kind] += 1
        if op == "I":
            owed.append(action)
        row.append(action)
    return [action for action in row if action.microbatch < m]


def _repeated(p: int, m: int, starts: list[tuple[int, int, int, int]], most: int) -> Rows:
    """Return a building block repeated for every microbatch, every pass as early as its order on a rank lets it be.

    Every pass takes one unit of time, and a microbatch has six on a rank, which is the period. Weight gradients, the
    oldest first, are computed where a rank would wait, or has no room for another forward pass.

    Args:
        starts: of a microbatch on each rank: forward passes of chunks a and b, then gradients of the inputs of b and a.
        most: microbatches of both chunks that a rank may hold.
    """
    order = [deque(_block_order(r, p, m, at)) for r, at in enumerate(starts)]
    rows: list[list[Action]] = [[] for _ in range(p)]
    owed, held, done = [deque[Action]() for _ in range(p)], [0] * p, set[Action]()

    def is_ready(r: int, action: Action) -> bool:
        op, stage, microbatch = action
        if op is Op.F:
            return held[r] < 2 * most and (stage == 0 or Action(op, stage - 1, microbatch) in done)
        return stage == 2 * p - 1 or Action(op, stage + 1, microbatch) in done

    while any(order) or any(owed):
        now = {}
        for r in range(p):
            if order[r] and is_ready(r, order[r][0]):
                now[r] = order[r].popleft()
            elif owed[r]:
                now[r] = owed[r].popleft()
        for r, action in now.items():
            rows[r].append(action)
            held[r] += {Op.F: 1, Op.W: -1}.get(action.op, 0)
            if action.op is Op.I:
                owed[r].append(action._replace(op=Op.W))
        done.update(now.values())
    return rows


def _block_order(r: int, p: int, m: int, starts: tuple[int, int, int, int]) -> list[Action]:
    kinds = [(Op.F, r), (Op.F, 2 * p - 1 - r), (Op.I, 2 * p - 1 - r), (Op.I, r)]
    passes = [(at + 6 * i, Action(*kind, i)) for at, kind in zip(starts, kinds, strict=True) for i in range(m)]
    return [action for _, action in sorted(passes)]
