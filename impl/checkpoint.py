"""Checkpoints that any layout can load: every tensor is whole, under a name that is the same in every layout."""

import dataclasses
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from impl.checkpoint_reader import CheckpointReader, add_digest
from impl.chunks import Chunk, LoadChunks, SaveChunks, State, chunks
from impl.device import Device
from impl.errors import InputError
from impl.files import rename, sync
from impl.model.config import ModelConfig
from impl.optim import Owned
from impl.tensor_parallel.shards import shards_of
from impl.train import Trainer

NAME = re.compile(r"step-(\d{8,})")
"""Name of a finished checkpoint's folder; other names with this prefix are being written or removed."""
WEIGHT = "weight"
"""Key of a master weight in `Owned.tensors`."""
SCALE = {"scale": float, "good_steps": int, "skipped": int}
"""Attributes of `LossScale` that a checkpoint holds, and their types."""
STATE = {"updates": int, "precision": str, "loss_scale": SCALE, "identity": {"seed": int, "data": str}}
"""Entries of a checkpoint's `State` that are used, and their types."""
LOOK_SECONDS = 1.0
"""Time between two looks at a save that is waited for."""
T = TypeVar("T")


class UnloadableError(InputError):
    """The tensors of a checkpoint cannot be loaded, since its files are damaged."""


class Saved(NamedTuple):
    """Complete checkpoint on disk."""

    path: Path
    step: int
    """Training steps completed before the checkpoint."""
    state: State


def latest(folder: Path) -> tuple[Saved | None, list[str]]:
    """Return the newest complete checkpoint in a folder, and what is wrong with each newer one.

    Complete means that the metadata match their digest and the files have the lengths that the metadata give; tensors
    are checked when they are loaded.
    """
    damaged: list[str] = []
    for step, path in sorted(_finished(folder).items(), reverse=True):
        try:
            return Saved(path, step, _whole_state(path)), damaged
        except Exception as error:  # whatever reading a damaged file raises
            damaged.append(f"{path} is damaged ({_reason(error)})")
    return None, damaged


def _whole_state(path: Path) -> State:
    metadata = CheckpointReader(path).read_metadata()
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, size in ends.items():
        if (found := (path / name).stat().st_size) < size:
            raise ValueError(f"{name} has {found} bytes of {size}")
    _require_types(metadata.planner_data, STATE, "state")
    return metadata.planner_data


def _require_types(value: Any, kind: Any, name: str) -> None:
    """Check a value's type, or that a dictionary has at least these entries of these types."""
    if isinstance(kind, dict) and isinstance(value, dict):
        for entry, inner in kind.items():
            _require_types(value.get(entry), inner, f"{name}.{entry}")
    elif type(value) is not kind:
        raise InputError(f"{name} is {value!r:.100}")


def _finished(folder: Path) -> dict[int, Path]:
    """Return the folders of completely written checkpoints, by step."""
    found = {path: NAME.fullmatch(path.name) for path in folder.glob("step-*")}
    return {int(match[1]): path for path, match in found.items() if match}


class _Writer(dcp.FileSystemWriter):
    """Writer that raises a disk's error, where PyTorch's own says only that its position in a file is another one."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, OSError):
                found = found.__context__
            raise found or error from None


class Loaded(NamedTuple):
    """Checkpoint from which training continues."""

    step: int
    warnings: list[str]
    """Reasons why newer checkpoints are damaged."""


class Checkpoints:
    """The checkpoints of one training run, in a folder that all ranks see.

    Holds master weights, moments, the count of updates, the loss scale and the step. Position in the data, learning
    rate and random numbers are functions of step and seed. Loaded in another layout or precision, training continues
    as it would have there.

    A save copies what this rank owns to host memory, each element once over all ranks, and a thread writes it while
    training continues. It is written into a temporary folder, renamed when every rank has finished, so that a process
    killed at any moment leaves the last one intact.

    Memory: 12 bytes of host memory per parameter that is owned, kept between saves.
    Communication: of plans only, and over `group`, which contains all ranks of the run and has no other use.

    Args:
        group: can communicate from host memory (gloo).
        keep: how many of the newest stay.
        on_wait: called about once a second while a save is waited for.
        on_read: called before each tensor that is loaded.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        group: dist.ProcessGroup,
        *,
        keep: int = 2,
        on_wait: Callable[[], None] = lambda: None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.trainer, self.group, self.keep = folder, trainer, group, keep
        self.on_wait, self.on_read = on_wait, on_read
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._copies: list[Tensor] = []

    def save(self, step: int) -> None:
        """Begin to write a checkpoint after `step` steps, once the previous save is done.

        Raises:
            RuntimeError: the previous checkpoint could not be written; gives the reason.
        """
        self.wait()
        planner = SaveChunks(chunks_of(self.trainer, self._to_host()), self._state(step))
        self._under_way = self._thread.submit(self._write, step, planner)

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            RuntimeError: the last checkpoint could not be written; gives the reason.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        while not wait([under_way], LOOK_SECONDS).done:
            self.on_wait()
        try:
            under_way.result()
        except (Exception, CheckpointException) as error:
            raise RuntimeError(f"no checkpoint was written to {self.folder}: {_reason(error)}") from error

    def load(self) -> Loaded | None:
        """Load the newest complete checkpoint; return None if there is none.

        Memory: values are read into the existing tensors; the host needs three times the largest piece that was written
        (what one rank owned of one tensor).

        Raises:
            InputError: it belongs to another model, vocabulary, seed or data, or all checkpoints are damaged.
        """
        self.wait()
        saved, damaged = self.on_first(lambda: latest(self.folder))
        if saved is None:
            if damaged:
                raise InputError(f"no whole checkpoint: {'; '.join(damaged)}; remove {self.folder} to start at step 0")
            return None
        if why := why_another(with_defaults(saved.state["identity"]), identity(self.trainer)):
            raise InputError(f"{saved.path} is a checkpoint of another run: {why}")
        reader = CheckpointReader(saved.path)
        reader.on_read = self.on_read
        read(reader, chunks_of(self.trainer, self.trainer.optimizer.owned()), self.group)
        self.trainer.optimizer.publish()
        self.trainer.optimizer.updates = saved.state["updates"]
        if saved.state["precision"] == self.trainer.run.precision:  # a loss scale holds for one precision only
            for name in SCALE:
                setattr(self.trainer.loss_scale, name, saved.state["loss_scale"][name])
        return Loaded(saved.step, damaged)

    def _state(self, step: int) -> State:
        scale = self.trainer.loss_scale
        return {
            "step": step,
            "updates": self.trainer.optimizer.updates,
            "precision": self.trainer.run.precision,
            "loss_scale": {name: getattr(scale, name) for name in SCALE},
            "identity": identity(self.trainer),
        }

    def _to_host(self) -> list[Owned]:
        """Return copies of the tensors that this rank writes, in host memory that every save reuses."""
        own = [owned for owned in self.trainer.optimizer.owned() if owned.is_writer]
        device = Device.of(self.trainer.device)
        if not self._copies:
            self._copies = [device.host_like(t) for o in own for t in o.tensors.values()]
        free = iter(self._copies)
        copies = [o._replace(tensors={k: device.fetch(t, next(free)) for k, t in o.tensors.items()}) for o in own]
        device.wait()
        return copies

    def _write(self, step: int, planner: SaveChunks) -> None:
        part = self.folder / f"step-{step:08}.part"
        self.on_first(lambda: _clear(self.folder))
        dcp.save({}, storage_writer=_Writer(part), planner=planner, process_group=self.group)
        self.on_first(lambda: self._publish(part, step))

    def _publish(self, part: Path, step: int) -> None:
        """Rename what all ranks have written; remove checkpoints that are too old or later than this step."""
        path = part.with_suffix("")
        add_digest(part)
        sync(part)
        if path.exists():
            rename(path, path.with_suffix(".old"))
        rename(part, path)
        sync(self.folder)
        finished = _finished(self.folder)
        kept = sorted(s for s in finished if s <= step)[-self.keep :]
        for other in finished.keys() - set(kept):
            rename(finished[other], finished[other].with_suffix(".old"))
        _clear(self.folder)

    def on_first(self, action: Callable[[], T]) -> T:
        """Run an action on the first rank, and return its result or raise its error on every rank."""
        outcome: list[Any] = [None, None]
        if self.group.rank() == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # the other ranks wait for the broadcast
                outcome[1] = error
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def write_weights(folder: Path, weights: Mapping[str, Tensor], identity: State) -> None:
    """Write whole weights as a checkpoint after 0 steps, that training may start from.

    Args:
        identity: what `identity` says of a training: the model's fields, the seed and the data.
    """
    loss_scale = {"scale": 1.0, "good_steps": 0, "skipped": 0}
    state = {"step": 0, "updates": 0, "precision": "fp32", "loss_scale": loss_scale, "identity": identity}
    own = [Chunk(f"{WEIGHT}.{name}", w.shape, torch.Size([0] * w.dim()), w) for name, w in weights.items()]
    _clear(folder)
    part = folder / "step-00000000.part"
    with _alone():
        dcp.save({}, storage_writer=_Writer(part), planner=SaveChunks(own, state), no_dist=True)
    add_digest(part)
    sync(part)
    rename(part, part.with_suffix(""))
    sync(folder)


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress PyTorch's warning that one process reads or writes, as is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def read_weights(saved: Saved) -> dict[str, Tensor]:
    """Return the whole weights of a checkpoint, by name.

    Raises:
        UnloadableError: the checkpoint cannot be read.
    """
    reader, prefix = CheckpointReader(saved.path), f"{WEIGHT}."
    there = reader.read_metadata().state_dict_metadata
    sizes = {name: saved.size for name, saved in there.items() if isinstance(saved, TensorStorageMetadata)}
    own = [
        Chunk(name, size, torch.Size([0] * len(size)), torch.empty(size))
        for name, size in sizes.items()
        if name.startswith(prefix)
    ]
    try:
        with _alone():
            dcp.load({}, storage_reader=reader, planner=LoadChunks(own), no_dist=True)
    except CheckpointException as error:
        raise UnloadableError(f"{reader.path} cannot be loaded: {_reason(error)}") from None
    return {chunk.name.removeprefix(prefix): chunk.values for chunk in own}


def chunks_of(trainer: Trainer, owned: Iterable[Owned]) -> list[Chunk]:
    """Return this rank's training state as boxes of whole tensors."""
    shapes = {name: parameter.shape for name, parameter in trainer.model.named_parameters()}
    shards, part = shards_of(trainer.model), trainer.tp.part
    return [chunk for one in owned for chunk in chunks(one, shapes[one.name], shards.get(one.name), part)]


def read(
    reader: CheckpointReader,
    own: Sequence[Chunk],
    group: dist.ProcessGroup,
    *,
    prefix: str = "",
    origin: Callable[[str], str] = lambda name: name,
) -> None:
    """Fill the chunks from a checkpoint, where the `origin` of a tensor's name is its name.

    Raises:
        UnloadableError: the checkpoint cannot be read; the message begins with `prefix`.
    """
    try:
        dcp.load({}, storage_reader=reader, planner=LoadChunks(own, origin), process_group=group)
    except CheckpointException as error:
        raise UnloadableError(f"{prefix}{reader.path} cannot be loaded: {_reason(error)}") from None


def identity(trainer: Trainer) -> State:
    """Return the properties that a checkpoint must share with the training that loads it."""
    run = trainer.run
    model = {f"model.{name}": value for name, value in dataclasses.asdict(run.model).items()}
    return resolved({**model, "model.vocab_size": trainer.vocab_size, "seed": run.seed, "data": trainer.data.sha256})


def resolved(identity: State) -> State:
    """Return an identity with sizes in place of None, which stands for a size that follows from others."""
    mlp = identity["model.mlp_size"] or 4 * identity["model.hidden_size"]
    expert = identity["model.expert_size"] or mlp if identity["model.experts"] else None
    heads = identity["model.kv_heads"] or identity["model.num_heads"]
    return identity | {"model.mlp_size": mlp, "model.expert_size": expert, "model.kv_heads": heads}


def with_defaults(saved: State) -> State:
    """Return a checkpoint's identity with defaults for the model's fields that are missing from it."""
    return resolved({f"model.{field.name}": field.default for field in dataclasses.fields(ModelConfig)} | saved)


def why_another(there: State, own: State) -> str:
    """Return the first difference between two identities."""
    return next((f"{name} {there[name]!r}, here {value!r}" for name, value in own.items() if there[name] != value), "")


def _reason(error: BaseException) -> str:
    """Return an error as one line; for errors of several ranks, that of the lowest rank."""
    where = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        where = f"rank {rank}: "
    lines = str(error).strip().splitlines() or [""]
    return f"{where}{lines[0] if isinstance(error, InputError) else f'{type(error).__name__}: {lines[0]}'}"


def _clear(folder: Path) -> None:
    """Create the folder, and remove leftovers of interrupted saves from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("step-*"):
        if not NAME.fullmatch(path.name):
            shutil.rmtree(path)
