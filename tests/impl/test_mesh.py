"""Groups of a mesh's ranks are as patient as the group of all ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist

from impl.mesh import build_mesh, joint_group, neighbours
from impl.plan import AXES, Plan
from tests.ranks import COLLECTIVE, run_ranks


def patience(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def of_every_group() -> list[timedelta]:
    """The timeouts of a rank's groups."""
    mesh = build_mesh(Plan(dp=2), "cpu")
    own = neighbours(mesh, 2)
    assert own is not None
    return [patience(group) for group in (*map(mesh.get_group, AXES), joint_group(mesh, "dp", "cp"), own)]


def test_a_collective_of_any_group_may_take_as_long_as_one_of_all_ranks() -> None:
    """Not only as long as the backend's own time, by which a rank that compiles could be missed."""
    for found in run_ranks(2, of_every_group):
        assert found == [COLLECTIVE] * (len(AXES) + 2)
