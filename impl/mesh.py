"""The mesh of ranks: pipeline, data and tensor axes."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from impl.errors import InputError
from impl.plan import Plan

AXES = ("pp", "dp", "tp")


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh ("pp", "dp", "tp") over all ranks: tensor-parallel neighbours are adjacent ranks (PTD-P, section 3).

    Raises:
        InputError: the number of ranks is not the plan's.
    """
    if dist.get_world_size() != plan.world_size:
        raise InputError(f"{dist.get_world_size()} ranks were started, the plan needs {plan.world_size}")
    return init_device_mesh(device_type, (1, plan.dp, 1), mesh_dim_names=AXES)
