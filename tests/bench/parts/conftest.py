"""One gloo rank in this process, with one thread, on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.plan import Plan
from impl.tensor_parallel.group import TensorParallel


@pytest.fixture(scope="module")
def data(tokens: Path) -> TokenFolder:
    return TokenFolder.open(tokens)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mesh(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield build_mesh(Plan(), "cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(mesh: DeviceMesh) -> TensorParallel:
    """Tensor parallelism of degree 1: serial layers."""
    return TensorParallel(mesh.get_group("tp"), sequence_parallel=False, overlap=True)
