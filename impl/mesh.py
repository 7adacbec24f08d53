"""The mesh of ranks: pipeline, data, context and tensor axes."""

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from impl.errors import InputError
from impl.plan import AXES, Plan


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Return the mesh of AXES over all ranks: tensor-parallel neighbours are adjacent (PTD-P, section 3).

    Raises:
        InputError: the number of ranks is not the plan's.
    """
    if dist.get_world_size() != plan.world_size:
        raise InputError(f"{dist.get_world_size()} ranks were started, the plan needs {plan.world_size}")
    mesh = init_device_mesh(device_type, (plan.pp, plan.dp, plan.cp, plan.tp), mesh_dim_names=AXES)
    for axis in AXES:
        _patient(mesh.get_group(axis))
    return mesh


def ends_group(mesh: DeviceMesh, ends: Collection[int]) -> dist.ProcessGroup | None:
    """Return the group of ranks in the pipeline ranks `ends` that share this rank's other indices; None if not in it.

    Every rank of the mesh has to call it, in the same order.
    """
    return _own_group(mesh.mesh[sorted(ends)].flatten(1).t())


def neighbours(mesh: DeviceMesh, count: int, apart: int = 1) -> dist.ProcessGroup | None:
    """Return the group of `count` ranks, `apart` from each other, that this rank is in; every rank has to call it."""
    return _own_group(mesh.mesh.view(-1, count, apart).transpose(1, 2).flatten(0, 1))


def zero_groups(mesh: DeviceMesh, plan: Plan) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return this rank's groups where each `plan.zero` neighbours along dp and cp divide parameters; all call it.

    They are these neighbours, they with the tensor-parallel ranks of other heads, and the ranks that own the same, if
    there are any.
    """
    every = mesh.mesh.flatten(1, 2).unflatten(2, (plan.y, plan.x)).transpose(1, 2).flatten(0, 1)  # [pp y, dp cp, x]
    if plan.zero == plan.dp_cp and plan.y == 1:
        return joint_group(mesh, "dp", "cp"), joint_group(mesh, "dp", "cp", "tp"), None
    ranks = every.unflatten(1, (-1, plan.zero))  # [pp y, replicas, zero, x]
    parts = ranks.transpose(2, 3).flatten(0, 2), ranks.flatten(2).flatten(0, 1), ranks.movedim(1, 3).flatten(0, 2)
    divided, every_token, replicas = map(_own_group, parts)
    assert divided is not None
    assert every_token is not None
    return divided, every_token, replicas if plan.replicas > 1 else None


def expert_groups(
    mesh: DeviceMesh, ep: int, count: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the groups of this rank where each `ep` neighbours along dp and cp share experts; every rank calls it.

    They are these neighbours, those with the same experts among the `count` that divide parameters, and the ranks that
    own the same, if there are any.
    """
    ranks = mesh.mesh.flatten(1, 2).unflatten(1, (-1, count // ep, ep))  # [pp, replicas, owners, ep, tp]
    replicas, owners, sharing = (ranks.movedim(dim, -1).flatten(0, 3) for dim in (1, 2, 3))
    groups = _own_group(sharing), _own_group(owners)
    assert groups[0] is not None
    assert groups[1] is not None
    return groups[0], groups[1], _own_group(replicas) if replicas.shape[1] > 1 else None


def transfer_groups(mesh: DeviceMesh, ways: Collection[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return this rank's groups for each (sender, receiver) of pipeline ranks that share its other indices.

    Transfers of one group run one after another on a GPU: between a pair of ranks in one direction they have to, others
    would wait for what they do not need. Every rank of the mesh has to call it, with the same ways.
    """
    found: dict[tuple[int, int], dist.ProcessGroup] = {}
    left = sorted(ways)
    while left:
        together: list[tuple[int, int]] = []  # which share no rank, and are made at once
        for way in left:
            if not set(way) & {rank for other in together for rank in other}:
                together.append(way)
        left = [way for way in left if way not in together]
        group = _own_group(torch.cat([mesh.mesh[list(way)].flatten(1).t() for way in together]))
        if group is not None:
            rank = mesh.get_local_rank("pp")
            found[next(way for way in together if rank in way)] = group
    return found


def _own_group(every: Tensor) -> dist.ProcessGroup | None:
    """Return the group of this rank, of those that are the rows of a matrix and share no rank; None: it is in no row.

    As `init_device_mesh` does, all are made by one split of the communicator of all ranks, where there is one already.
    """
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        return dist.split_group(split_ranks=every.tolist(), timeout=_patience())
    mine: dist.ProcessGroup | None = None
    for ranks in every.tolist():
        group = dist.new_group(ranks, timeout=_patience())
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = group
    return mine


def joint_group(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """Return the group of ranks that differ in these axes only; every rank has to call it, in the same order."""
    long = [axis for axis in axes if mesh.size(AXES.index(axis)) > 1] or [axes[0]]
    if len(long) == 1:
        return mesh.get_group(long[0])
    return _patient(mesh[tuple(long)]._flatten().get_group())


def _patient(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group with the time-out of the group of all ranks in place of the backend's own."""
    if (timeout := _patience()) is not None:
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
    return group


def _patience() -> timedelta | None:
    """Return the longest time that a collective of all ranks may take; None: the backend has none."""
    every = dist.group.WORLD
    backend = None if every is None else every._get_backend(every._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)
