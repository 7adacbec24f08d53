"""A process that trains and saves without end; it imports little, since many of them are started."""

from pathlib import Path

import torch
import torch.distributed as dist

from impl.checkpoint import Checkpoints
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.run import Run
from impl.train import Trainer


def build(run: Run) -> Trainer:
    return Trainer(run, TokenFolder.open(run.data.dataset), build_mesh(run.plan, "cpu"), torch.device("cpu"))


def train_and_save(run: Run, folder: Path, rank: int, rendezvous: str) -> None:
    """Goes on from the last checkpoint and saves after every step, until it is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=run.plan.world_size)
    one = build(run)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    checkpoints = Checkpoints(folder / "checkpoints", one, group)
    loaded = checkpoints.load()
    step = loaded.step if loaded else 0
    while True:
        one.step(step)
        step += 1
        checkpoints.save(step)  # the one before is there now
        if rank == 0 and step > 1:
            (folder / "promised.new").write_text(str(step - 1))
            (folder / "promised.new").replace(folder / "promised")


def promised(folder: Path) -> int:
    """The last step whose checkpoint was said to be there."""
    path = folder / "promised"
    return int(path.read_text()) if path.exists() else 0
