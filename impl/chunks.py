"""What a rank owns of every parameter as boxes of whole tensors, and plans to write and read these in parallel."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from impl.errors import InputError
from impl.grid import GridShard
from impl.optim import Owned
from impl.tensor_parallel.group import Part
from impl.tensor_parallel.shards import Shard

State = dict[str, Any]
"""What a checkpoint holds besides tensors."""


class Chunk(NamedTuple):
    """A box of a whole tensor, in memory of this rank."""

    name: str
    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: torch.Size
    values: Tensor
    """Elements of the chunk. Shapes: the box's."""

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, self.offsets)

    @property
    def box(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.values.shape)


def chunks(owned: Owned, shape: Sequence[int], shard: Shard | GridShard | None, part: Part) -> Iterator[Chunk]:
    """Yield what a rank owns of a parameter, as boxes of its whole tensors, without padding of the vocabulary.

    Args:
        shape: of this rank's tensor-parallel part of the parameter, which is all of it without a shard.
    """
    whole = torch.Size(shard.whole_shape(shape) if shard else shape)
    splits = shard.splits if isinstance(shard, GridShard) else [(shard, part)] if shard else []
    for kind, values in owned.tensors.items():
        first = 0
        for offsets, sizes in rectangles(shape, owned.start, owned.stop):
            boxes: list[Placed] = [(offsets, values[first : first + math.prod(sizes)].view(sizes))]
            first += math.prod(sizes)
            for split, own in splits:
                boxes = [there for box in boxes for there in _in_whole(box, split, own)]
            yield from (Chunk(f"{kind}.{owned.name}", whole, torch.Size(at), box) for at, box in boxes)


Placed = tuple[Sequence[int], Tensor]
"""Offsets of a box, and its values."""


def _in_whole(box: Placed, shard: Shard, part: Part) -> Iterator[Placed]:
    """Yield the places in the whole of a box of a rank's part."""
    (offsets, values), dim = box, shard.dim
    for at, there, count in shard.runs(offsets[dim], offsets[dim] + values.shape[dim], part):
        yield [*offsets[:dim], there, *offsets[dim + 1 :]], values.narrow(dim, at - offsets[dim], count)


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements `start` to `stop` of a flat vector or matrix as at most 3 boxes (offsets, sizes), in order."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    _, columns = shape
    while start < stop:
        row, column = divmod(start, columns)
        rows = (stop - start) // columns if column == 0 else 0
        size = (rows, columns) if rows else (1, min(columns - column, stop - start))
        yield (row, column), size
        start += size[0] * size[1]


class SaveChunks(dcp.DefaultSavePlanner):
    """Writes each rank's chunks; `state` goes into the metadata, where it is read before any tensor is."""

    def __init__(self, own: Sequence[Chunk], state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.own, self.state = {chunk.index: chunk for chunk in own}, state

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(chunk) for chunk in self.own.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = replace(metadata, planner_data=self.state)
        return plans, self.metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.own[write_item.index].values


def _write_item(chunk: Chunk) -> WriteItem:
    data = TensorWriteData(chunk.box, TensorProperties(chunk.values.dtype), chunk.shape)
    return WriteItem(chunk.index, WriteItemType.SHARD, tensor_data=data)


class LoadChunks(dcp.DefaultLoadPlanner):
    """Fills chunks from whatever boxes were written, converting their type.

    Args:
        origin: from a tensor's name to that in the checkpoint, which several may have.

    Raises:
        InputError: not all of them are there.
    """

    def __init__(self, own: Sequence[Chunk], origin: Callable[[str], str] = lambda name: name) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.own, self.origin = {chunk.index: chunk for chunk in own}, origin

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        name = lambda chunk: chunk.name
        for here, some in groupby(sorted(self.own.values(), key=name), name):
            wanted, fqn = list(some), self.origin(here)
            saved = self.metadata.state_dict_metadata.get(fqn)
            if not isinstance(saved, TensorStorageMetadata):
                raise InputError(f"no {fqn} in the checkpoint")
            if saved.size != wanted[0].shape:
                raise InputError(f"{fqn} is {list(saved.size)} in the checkpoint, {list(wanted[0].shape)} here")
            found = create_read_items_for_chunk_list(fqn, saved, [chunk.box for chunk in wanted])
            if sum(math.prod(item.lengths) for item in found) != sum(chunk.values.numel() for chunk in wanted):
                raise InputError(f"{fqn} is not whole in the checkpoint")
            items += [replace(item, dest_index=replace(item.dest_index, fqn=here)) for item in found]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        box = [slice(at, at + n) for at, n in zip(read_item.dest_offsets, read_item.lengths, strict=True)]
        return self.own[read_item.dest_index].values[tuple(box)]
