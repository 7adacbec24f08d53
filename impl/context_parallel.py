"""Context parallelism: every rank of a group has a part of each sequence; what attention then needs of the others.

All but attention works on one token at a time, and goes on as before. Letters: b sequences of s tokens over c ranks, of
which a rank has l = s / c; a query heads and g heads of keys and values, of d features, on a tensor-parallel rank.
Imported by runs with `plan.cp` above 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from impl.collectives import Pending, count
from impl.data.batches import Batch
from impl.plan import Plan
from impl.tensor_parallel.conjugates import F_SEQUENCE
from impl.tensor_parallel.group import Part
from impl.untraced import untraced

Core = Callable[[Tensor, int, int, int], Tensor]
"""Attention of whole sequences: queries, keys and values, their length, query heads, heads of keys and values."""


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share every sequence, in chunks: rank r has the r-th, of a ring's 2 c also the r-th from the end.

    With two such chunks all ranks of a ring have as much to do behind a causal mask.

    Source: Liu et al. 2023 (2310.01889), ring; Jacobs et al. 2023 (2309.14509), Ulysses.
    """

    group: dist.ProcessGroup
    chunks: int
    """Chunks of a sequence, c or 2 c."""
    is_ring: bool
    seq_len: int
    """Tokens of a training sequence, s."""

    @classmethod
    def of(cls, plan: Plan, group: dist.ProcessGroup, seq_len: int) -> "ContextParallel":
        return cls(group, plan.cp_chunks, plan.is_ring, seq_len)

    @property
    def own_chunks(self) -> list[int]:
        """Chunks that this rank has, in their order."""
        return self.chunks_of(self.group.rank())

    def chunks_of(self, rank: int) -> list[int]:
        return [rank] if self.chunks == self.group.size() else [rank, self.chunks - 1 - rank]

    def places(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions, in whole sequences, of this rank's `length` tokens of each. Shapes: [l]."""
        own, size = self.own_chunks, length * self.group.size() // self.chunks
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in own])

    def part_of(self, batch: Batch) -> Batch:
        """Return this rank's tokens of every sequence, with their targets; goals of whole sequences stay."""
        own = self.places(batch.inputs.shape[1] // self.group.size()).numpy()
        types = batch.token_types
        return replace(
            batch,
            inputs=batch.inputs[:, own],
            targets=batch.targets[:, own] if batch.targets.shape == batch.inputs.shape else batch.targets,
            token_types=None if types is None else types[:, own],
        )

    def whole(self, x: Tensor) -> Tensor:
        """Return whole sequences of the ranks' tokens; every rank then does the same, for a share of the loss.

        Communication: an all-gather forward and a reduce-scatter backward. Shapes: [b, l, ...] -> [b, s, ...].
        """
        gathered = F_SEQUENCE(x.transpose(0, 1).contiguous(), self.group).chunk(self.chunks)
        order = [chunk for rank in range(self.group.size()) for chunk in self.chunks_of(rank)]
        return torch.cat([gathered[order.index(chunk)] for chunk in range(self.chunks)]).transpose(0, 1)

    def rows(self, part: Part) -> "Rows":
        """Return the rows, in [b s, ...], of a part of this rank's [b l, ...]."""
        return Rows(*part, self.seq_len // self.chunks, self.chunks, self.own_chunks)

    def heads(self, part: Part) -> Part:
        """Return the part of all heads whose whole sequences this rank attends to, given its tensor-parallel part."""
        return Part(part.index * self.group.size() + self.group.rank(), part.of * self.group.size())

    @untraced  # collectives are not traced
    def attend(self, qkv: Tensor, length: int, heads: int, groups: int, core: Core, *, causal: bool) -> Tensor:
        """Return softmax(q k^T / sqrt(d)) v of this rank's queries over all keys of their sequences.

        Communication: a ring passes on keys and values, 2 b l g d elements, c - 1 times forward and c - 1 backward, and
        c times their gradients, in fp32 at least. Ulysses: all-to-alls of [b l, (a + 2 g) d] and of [b l, a d], forward
        and backward.

        Shapes: [b l, (a + 2 g) d] -> [b l, a d].
        """
        if self.is_ring:
            return cast(Tensor, _Ring.apply(qkv, length, heads, groups, causal, self))
        ranks, width = self.group.size(), qkv.shape[1] // (heads + 2 * groups)
        by_rank = [x.unflatten(1, (ranks, -1)) for x in qkv.split([heads * width, groups * width, groups * width], 1)]
        sent = torch.cat(by_rank, 2).transpose(0, 1)
        received = self._exchanged(sent).unflatten(1, (-1, length)).transpose(0, 1).flatten(0, 2)
        context = core(received, length * ranks, heads // ranks, groups // ranks)
        back = context.unflatten(0, (-1, ranks, length)).transpose(0, 1).flatten(1, 2)
        return self._exchanged(back).transpose(0, 1).flatten(1)

    def _exchanged(self, x: Tensor) -> Tensor:
        """Return the i-th rank's part for this rank as the i-th. Shapes: [c, ...] -> [c, ...]."""
        return cast(Tensor, _AllToAll.apply(x.contiguous(), self.group))

    def _visits(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank with its keys and values, this one first, while the next are on their way."""
        ranks = self.group.size()
        for step in range(ranks):
            coming = pass_on(kv, self.group) if step + 1 < ranks else None
            yield (self.group.rank() - step) % ranks, kv
            if coming is not None:
                kv = coming.wait()

    def _meet(self, source: int, length: int, *, causal: bool) -> tuple[slice, slice, bool]:
        """Return which of its queries meet which of a rank's keys, and whether a causal mask is between them.

        Behind a causal mask both chunks see a rank's first chunk if it is before theirs, and its second if they are the
        last; a rank with a later first chunk is seen by the second chunk only, as a whole.
        """
        every, half = slice(None), length // 2
        if not causal or source == self.group.rank():
            return every, every, causal
        return (every, slice(half), False) if source < self.group.rank() else (slice(half, None), every, False)


class Rows(NamedTuple):
    """Rows of a rank in what its sequences would be as a whole, as `impl.tensor_parallel.group.Part`."""

    index: int
    parts: int
    chunk: int
    """Tokens of a chunk."""
    chunks: int
    own: list[int]

    @property
    def of(self) -> int:
        return self.parts * self.chunks // len(self.own)

    def rows(self, own: int) -> list[range]:
        """Return the ranges of rows of a rank that has `own` rows."""
        first, stop = self.index * own, (self.index + 1) * own
        cuts = [first, *range(first - first % self.chunk + self.chunk, stop, self.chunk), stop]
        found = []
        for start, end in pairwise(cuts):
            sequence, nth = divmod(start // self.chunk, len(self.own))
            at = (sequence * self.chunks + self.own[nth]) * self.chunk + start % self.chunk
            found.append(range(at, at + end - start))
        return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grads[0].contiguous(), ctx.group), None


class _Ring(torch.autograd.Function):
    """Attention over the keys and values that come by; parts are added up by the logarithms of their sums.

    The backward pass of a part needs no more than the whole's result and logarithms, so that only these are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, length: int, heads: int, groups: int, causal: bool, context: ContextParallel
    ) -> Tensor:
        q, kv = _queries_and_others(qkv, length, heads, groups)
        out, logs = torch.empty(0), torch.empty(0)
        for source, others in context._visits(kv.contiguous()):
            queries, keys, is_masked = context._meet(source, length, causal=causal)
            k, v = _parts(others[:, keys])
            more, more_logs = attention(_by_head(q[:, queries]), k, v, causal=is_masked)
            if source == context.group.rank():
                out, logs = more.to(more_logs.dtype), more_logs
            else:
                _add(out[:, :, queries], logs[:, :, queries], more, more_logs)
        out = out.transpose(1, 2).reshape(len(qkv), -1).type_as(qkv)
        ctx.save_for_backward(qkv, out, logs)
        ctx.how = length, heads, groups, causal, context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, out, logs), (*shape, causal, context) = ctx.saved_tensors, ctx.how
        q, kv = _queries_and_others(qkv, *shape)
        length = shape[0]
        out, grad = (_by_head(x.view(q.shape)) for x in (out, grads[0]))
        q_grad = torch.zeros(q.shape, dtype=logs.dtype, device=q.device)
        coming: Pending | None = None
        for source, others in context._visits(kv.contiguous()):
            queries, keys, is_masked = context._meet(source, length, causal=causal)
            (k, v), of = _parts(others[:, keys]), _by_head(q[:, queries])
            results = out[:, :, queries], logs[:, :, queries]
            found = attention_grad(grad[:, :, queries], of, k, v, *results, causal=is_masked)
            q_grad[:, queries] += found[0].transpose(1, 2)
            kv_grad = torch.zeros_like(others, dtype=logs.dtype) if coming is None else coming.wait()
            for of_all, more in zip(kv_grad[:, keys].chunk(2, 2), found[1:], strict=True):
                of_all += more.transpose(1, 2)
            coming = found = more = None  # their memory is free, and what was sent before
            coming = pass_on(kv_grad, context.group)
        assert coming is not None
        qkv_grad = torch.empty_like(qkv)
        for of_all, found in zip(_queries_and_others(qkv_grad, *shape), (q_grad, coming.wait()), strict=True):
            of_all.copy_(found)
        return qkv_grad, None, None, None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(d)) v, and the logarithm of each row's sum of exponentials, in fp32 at least.

    Shapes: [b, a, s, d], two of [b, g, k, d] -> [b, a, s, d], [b, a, s].
    """
    if not has_flash(q):
        return attention_by_products(q, k, v, causal=causal)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def attention_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from what these keys are a part of: its result and logarithms.

    Shapes: as `attention`; grad as out.
    """
    if q.device.type == "cpu":
        tensors = {"grad_out": grad, "query": q, "key": k, "value": v, "out": out, "logsumexp": logs}
        return attention_grad_on_cpu(**tensors, dropout_p=0.0, is_causal=causal)
    if has_flash(q):
        none = torch.zeros(2, dtype=torch.int64, device=q.device)  # the kernel's random numbers, of no dropout
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        sizes = q.shape[2], k.shape[2], 0.0, causal
        return flash(grad, q, k, v, out, logs.contiguous(), None, None, *sizes, none, none)
    return attention_grad_by_products(grad, q, k, v, out, logs, causal=causal)


def attention_grad_on_cpu(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of PyTorch's CPU kernel, in fp32 at least: without units for bf16 it is six times as fast."""
    wide, named = (
        torch.promote_types(query.dtype, torch.float32),
        {"query": query, "key": key, "value": value, **others},
    )
    named = {name: x.to(wide) if isinstance(x, Tensor) else x for name, x in named.items()}
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(**named)


def has_flash(q: Tensor) -> bool:
    """Return True if the device has a fused kernel that returns logarithms, as GPUs before Ampere have not."""
    if q.device.type == "cpu":
        return True
    fits = q.element_size() == 2 and q.shape[-1] in range(8, 257, 8)  # features of a head
    # where tensors have no memory there is no GPU to ask
    return fits and (not q.is_cuda or can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, False, False)))


def attention_by_products(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result of `attention` by matrix products: for types and heads without a fused kernel."""
    scores = _scores(q, k, causal)
    logs = scores.logsumexp(-1)
    probabilities = (scores - logs[..., None]).exp().type_as(q)
    return (_grouped(probabilities, v) @ v[:, :, None]).flatten(1, 2), logs


def attention_grad_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `attention_grad` by matrix products."""
    p = (_scores(q, k, causal) - logs[..., None]).exp()
    p_grad = (_grouped(grad, v) @ v[:, :, None].transpose(-2, -1)).flatten(1, 2)
    scores_grad = (p * (p_grad - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5).type_as(q)
    of_groups = _grouped(scores_grad, k)
    q_grad = (of_groups @ k[:, :, None]).flatten(1, 2)
    k_grad = (of_groups.transpose(-2, -1) @ _grouped(q, k)).sum(2)
    return q_grad, k_grad, (_grouped(p.type_as(q), v).transpose(-2, -1) @ _grouped(grad, v)).sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Shapes: [b, a, s, d], [b, g, k, d] -> [b, a, s, k], in fp32 at least."""
    scores = (_grouped(q * q.shape[-1] ** -0.5, k) @ k[:, :, None].transpose(-2, -1)).flatten(1, 2)
    scores = scores if scores.element_size() >= 4 else scores.float()
    return scores + torch.full_like(scores[0, 0], -torch.inf).triu(1) if causal else scores


def _grouped(x: Tensor, of: Tensor) -> Tensor:
    """Return heads by the head of keys and values that they share. Shapes: [b, a, ...] -> [b, g, a / g, ...]."""
    return x.unflatten(1, (of.shape[1], -1))


def _add(out: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor) -> None:
    """Add to the attention over some keys, in place, that over others."""
    total = torch.logaddexp(logs, more_logs)
    out.mul_((logs - total).exp()[..., None]).add_(more * (more_logs - total).exp()[..., None])
    logs.copy_(total)


def _queries_and_others(qkv: Tensor, length: int, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Return views. Shapes: [b l, (a + 2 g) d] -> [b, l, a, d], [b, l, 2 g, d]."""
    return qkv.view(-1, length, heads + 2 * groups, qkv.shape[1] // (heads + 2 * groups)).split((heads, 2 * groups), 2)


def _parts(kv: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values. Shapes: [b, l, 2 g, d] -> two of [b, g, l, d]."""
    return _by_head(kv).chunk(2, 1)


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to send to the next rank and to receive from the previous one; x must not be written to meanwhile."""
    count("send", x, group)
    into, rank, ranks = torch.empty_like(x), group.rank(), group.size()
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % ranks)
    works = dist.batch_isend_irecv([send, receive])
    return Pending(into, None, lambda: [work.wait() for work in works])


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the i-th rank's part for this rank as the i-th. Communication: of x. Shapes: [c, ...] -> [c, ...]."""
    count("all_to_all", x, group)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
