"""Certificates of runs, the hashes of their steps, and what differs between two of them: first where, and then why."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.records.labels import differing, fields
from harness.records.parts import READ, Count, Resolved
from harness.records.store import Document, read_checked
from impl.errors import InputError
from impl.run import Run

Of = Literal["loss", "gradient", "weight"]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Tensors = list[tuple[Digest, float | None, float | None]]
"""Hash, norm and sum of each tensor of a rank."""
FREE = ("threads", "repeat", "keep_end", "start", "evaluation", "data.dataset")
"""Fields of a run in which two that are compared may differ: where its files are, and what happens besides training."""
NODES = "ranks per node"
KNOWN = {
    "libraries choose kernels by it, which sum in another order": ("processor", "device_name"),
    "kernels sum by vectors of its width, with or without fused multiply-add": ("cpu_capability",),
    "kernels, or the order of sums, change between versions": ("torch", "mkl", "onednn", "cuda", "hip", "nccl"),
    "another library sums in another order": ("blas",),
    "sums are divided among threads": (
        "threads", "torch_threads", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "MKL_DYNAMIC", "OMP_DYNAMIC",
    ),
    "it chooses among instruction sets": (
        "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    ),
    "products are rounded otherwise": ("matmul_precision", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"),
    "it orders NCCL's sums": ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
}  # fmt: skip
"""How a part of an environment is known to change the bits of a result."""
WHY = {name: why for why, names in KNOWN.items() for name in names}
NCCL_NODES = "NCCL orders its sums by the nodes"


@dataclass(config=READ)
class Hashes:
    """Hashes of one rank in one step."""

    loss: str
    """Loss in hexadecimal, as written by `float.hex`."""
    gradient: Tensors
    weight: Tensors


@dataclass(config=READ)
class RankParts:
    """Parts of the training state that a rank hashes, and its place in the mesh."""

    numerics: dict[str, str | int | None]
    pieces: list[tuple[str, Count, Count]]
    """Parts of parameters in the order of the hashes: name, first element and end in the rank's parameter."""


@dataclass(config=READ, kw_only=True)
class Certificate:
    """Certificate of a run, as its record has it."""

    run: Annotated[Run, Field(validation_alias="config")]
    resolved: Resolved
    ranks: list[RankParts]
    certificate: list[list[Hashes | Count]]
    """Hashes by step and rank; a number stands for an equal entry of the rank with that number."""

    def hashes(self, step: int, rank: int) -> Hashes:
        """Return the hashes of a rank in a step."""
        found = self.certificate[step][rank]
        found = self.certificate[step][found] if isinstance(found, int) else found
        assert isinstance(found, Hashes)
        return found


_CERTIFICATE = TypeAdapter(Certificate)


class Difference(NamedTuple):
    """First tensor that differs, with the numbers of both on the first rank where it does."""

    step: int
    of: Of
    tensor: str
    """Name of the parameter; empty for the loss."""
    elements: tuple[int, int] | None
    ranks: list[int]
    norms: tuple[float | None, float | None]
    """Norm of the tensor, or absolute value of the loss."""
    sums: tuple[float | None, float | None]
    """Sum of the tensor's elements, or the loss itself."""
    differing: int
    """Number of the step's tensors of this kind that differ, on all ranks."""
    among: int


class Change(NamedTuple):
    """Part of the environment that differs."""

    what: str
    values: tuple[str, str]
    why: str
    """Reason why it is known to change bits; empty if it is not."""


class Compared(NamedTuple):
    """Comparison of two certificates."""

    equal_steps: int
    """Number of steps, from the first on, that are equal bit for bit."""
    steps: tuple[int, int]
    first: Difference | None
    changes: list[Change]


def read(path: Path) -> Certificate:
    """Return the certificate in a record's file.

    Raises:
        InputError: it has none, or cannot be read.
    """
    try:
        return of_document(read_checked(path))
    except ValueError as error:
        raise InputError(f"{path}: {error}; valid: a record that `run --certify` has made") from None


def of_document(document: Document) -> Certificate:
    """Return the certificate in a record.

    Raises:
        ValueError: it has none, or another one than its run makes.
    """
    if not document.get("certificate"):
        raise ValueError("it has no certificate")
    try:
        found = _CERTIFICATE.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'][:4]))}: {first['msg']:.200}") from None
    if why := _why_inconsistent(found):
        raise ValueError(why)
    return found


def _why_inconsistent(found: Certificate) -> str | None:
    world_size = found.run.plan.world_size
    if len(found.ranks) != world_size:
        return f"ranks: {len(found.ranks)} of {world_size}"
    for step, of_ranks in enumerate(found.certificate):
        if len(of_ranks) != world_size:
            return f"certificate.{step}: {len(of_ranks)} of {world_size} ranks"
        for rank, one in enumerate(of_ranks):
            if isinstance(one, int) and not (one < rank and isinstance(of_ranks[one], Hashes)):
                return f"certificate.{step}.{rank}: no earlier rank {one}"
            hashes, count = found.hashes(step, rank), len(found.ranks[rank].pieces)
            if not len(hashes.gradient) == len(hashes.weight) == count:
                return f"certificate.{step}.{rank}: not of {count} tensors"
            if _loss(hashes) is None:
                return f"certificate.{step}.{rank}.loss: {hashes.loss!r:.40} is no number"
    return None


def compared(a: Certificate, b: Certificate) -> Compared:
    """Compare two certificates, step by step.

    Raises:
        InputError: they are of runs that agree to rounding at most.
    """
    of_a, of_b, names = fields(a.run), fields(b.run), differing([a.run, b.run])
    if others := [name for name in names if not name.startswith(FREE)]:
        what = ", ".join(f"{name} {of_a[name]!r:.40} and {of_b[name]!r:.40}" for name in others[:3])
        plan = "; other plans sum in another order, and agree to rounding only" if others[0].startswith("plan.") else ""
        raise InputError(f"not comparable bit for bit: {what}{plan}; valid: two certificates of one configuration")
    texts = [one.resolved.data.sha256 if one.resolved.data else None for one in (a, b)]
    if texts[0] != texts[1]:
        raise InputError(
            "not comparable: they were trained on other data; valid: two certificates of one configuration"
        )
    if any(x.pieces != y.pieces for x, y in zip(a.ranks, b.ranks, strict=True)):
        raise InputError("not comparable: their ranks hash other parts of parameters; valid: those of one version")
    both = min(len(a.certificate), len(b.certificate))
    first = next(filter(None, (_first(a, b, step) for step in range(both))), None)
    free = [Change(name, (str(of_a[name]), str(of_b[name])), WHY.get(name, "")) for name in names]
    steps = len(a.certificate), len(b.certificate)
    return Compared(both if first is None else first.step, steps, first, [*_changes(a, b), *free])


def _first(a: Certificate, b: Certificate, step: int) -> Difference | None:
    """Return the first difference in a step: of the loss, then of gradients as they are listed, then of weights."""
    ranks = [(a.hashes(step, rank), b.hashes(step, rank)) for rank in range(len(a.ranks))]
    if losses := [rank for rank, (x, y) in enumerate(ranks) if x.loss != y.loss]:
        sums = _loss(ranks[losses[0]][0]), _loss(ranks[losses[0]][1])
        norms = tuple(None if value is None else abs(value) for value in sums)
        return Difference(step, "loss", "", None, losses, (norms[0], norms[1]), sums, len(losses), len(ranks))
    for of in ("gradient", "weight"):
        pairs = [
            (rank, i, x, y)
            for rank, (one, other) in enumerate(ranks)
            for i, (x, y) in enumerate(zip(getattr(one, of), getattr(other, of), strict=True))
        ]
        if wrong := [pair for pair in pairs if pair[2][0] != pair[3][0]]:
            rank, i, x, y = min(wrong, key=lambda pair: (pair[1], pair[0]))
            piece = a.ranks[rank].pieces[i]
            where = [other for other, j, *_ in wrong if a.ranks[other].pieces[j] == piece]
            return Difference(step, of, piece[0], piece[1:], where, (x[1], y[1]), (x[2], y[2]), len(wrong), len(pairs))
    return None


def _loss(hashes: Hashes) -> float | None:
    try:
        return float.fromhex(hashes.loss)
    except (ValueError, OverflowError):
        return None


def _changes(a: Certificate, b: Certificate) -> Iterator[Change]:
    """Yield what differs between the environments, rank by rank; first what is known to change bits."""
    found = []
    for name in dict.fromkeys(name for one in (a, b) for rank in one.ranks for name in rank.numerics):
        values = [[rank.numerics.get(name) for rank in one.ranks] for one in (a, b)]
        if values[0] != values[1]:
            found.append(Change(name, (_shown(values[0]), _shown(values[1])), WHY.get(name, "")))
    nodes = [sorted(Counter(rank.numerics.get("host") for rank in one.ranks).values()) for one in (a, b)]
    if nodes[0] != nodes[1]:
        is_nccl = any(rank.numerics.get("backend") == "nccl" for rank in a.ranks)
        found.append(Change(NODES, (_shown(nodes[0]), _shown(nodes[1])), NCCL_NODES if is_nccl else ""))
    yield from sorted(found, key=lambda change: not change.why)


def _shown(values: Sequence[object]) -> str:
    """Return values in words, each once."""
    return ", ".join(dict.fromkeys("not set" if value is None else str(value) for value in values))
