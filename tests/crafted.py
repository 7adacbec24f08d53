"""Checkpoints that would execute code, read other files or exhaust memory if they were unpickled as they are."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

STEP = "step-00000002"
DATA = "__0_0.distcp"


def old_checkpoint(folder: Path) -> Path:
    """Unpack `checkpoints` and `tokens` of a run that was saved before metadata were read by a restricted unpickler."""
    with tarfile.open(Path(__file__).with_name("old_checkpoint.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Call:
    """Unpickled, it is what a function returns."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def system(marker: Path) -> Call:
    return Call(os.system, f"touch '{marker}'")


def evaluated(marker: Path) -> Call:
    return Call(eval, f"open({str(marker)!r}, 'w')")


def found_by_name(marker: Path) -> Call:
    return Call(getattr, Call(__import__, "os"), "system")


PAYLOADS: dict[str, tuple[Callable[[Path], Call], str]] = {
    "os.system": (system, "posix.system"),
    "eval": (evaluated, "builtins.eval"),
    "getattr": (found_by_name, "builtins.getattr"),
}


def changed(step: Path, change: Callable[[Any], Any]) -> None:
    """Replace a checkpoint's metadata by what `change` returns for it, or has made of it if it returns None."""
    file = step / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    other = change(metadata)
    file.write_bytes(pickle.dumps(metadata if other is None else other, 4))


def first(mapping: dict[Any, Any]) -> Any:
    return next(iter(mapping.values()))


def state_of(metadata: Any) -> dict[str, Any]:
    return metadata.planner_data


def nest(metadata: Any, call: Call) -> None:
    state_of(metadata)["identity"]["model.family"] = [{"a": ("gpt", call)}]


PLACES: dict[str, Callable[[Any, Call], Any]] = {
    "all": lambda metadata, call: call,
    "state": lambda metadata, call: setattr(metadata, "planner_data", call),
    "state, nested": nest,
    "tensor": lambda metadata, call: metadata.state_dict_metadata.update({"weight.more": call}),
    "size": lambda metadata, call: setattr(first(metadata.state_dict_metadata), "size", call),
    "boxes": lambda metadata, call: first(metadata.state_dict_metadata).chunks.append(call),
    "file": lambda metadata, call: setattr(first(metadata.storage_data), "relative_path", call),
    "save": lambda metadata, call: setattr(metadata.storage_meta, "modules", [call]),
}


def in_metadata(step: Path, place: str, call: Call) -> None:
    changed(step, lambda metadata: PLACES[place](metadata, call))


def as_byte_entry(step: Path, call: Call) -> None:
    """Make the first entry one of bytes, which PyTorch unpickles without restrictions."""

    def change(metadata: Any) -> None:
        name = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
        metadata.storage_data[MetadataIndex(name)] = place
        place.offset, place.length = _append(step, call)

    changed(step, change)


def as_tensor(step: Path, call: Call) -> None:
    """Put a pickle in place of every tensor in the data file."""

    def change(metadata: Any) -> None:
        offset, length = _append(step, call)
        for place in metadata.storage_data.values():
            place.offset, place.length = offset, length

    changed(step, change)


def _append(step: Path, call: Call) -> tuple[int, int]:
    written = io.BytesIO()
    torch.save(call, written)
    with (step / DATA).open("ab") as file:
        return file.tell(), file.write(written.getvalue())


def huge(step: Path) -> None:
    with (step / ".metadata").open("rb+") as file:
        file.truncate(2**40)


def pipe(step: Path) -> None:
    (step / ".metadata").unlink()
    os.mkfifo(step / ".metadata")


def nested_key() -> bytes:
    """A dictionary whose key is 2 ** 100 references to an empty tuple."""
    return b"\x80\x04})" + b"2\x86" * 100 + b"Ns."


def doubled_key() -> bytes:
    """The same without the opcode DUP: each tuple is memoised and used twice."""
    twice = b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(100))
    return b"\x80\x04})" + twice + b"Ns."


def class_attribute() -> bytes:
    """Sets an attribute of a class by the state that it gives the class itself."""
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x05crackK\x01s\x86b."


BYTES: dict[str, tuple[bytes, str]] = {
    "a memo of 64 GB": (b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".", "pickle opcode 0x72"),
    "a frame of 2 ** 62 bytes": (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.", "NoneType in place of Metadata"),
    "text of 2 ** 32 bytes": (b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"a.", "EOFError"),
    "a number of 2 ** 31 bytes": (b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b".", "pickle opcode 0x8b"),
    "bytes of 2 ** 60": (b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".", "pickle opcode 0x96"),
    "a key of nested tuples": (nested_key(), "pickle opcode 0x32"),
    "a key of tuples that share": (doubled_key(), "a key that is not a name"),
    "an attribute of a class": (class_attribute(), "__setstate__"),
    "a persistent object": (b"\x80\x04NQ.", "pickle opcode 0x51"),
    "an extension": (b"\x80\x04\x82\x01.", "pickle opcode 0x82"),
    "an instance": (b"\x80\x02(S'true'\nios\nsystem\n.", "pickle opcode 0x53"),
    "nothing": (b"", "EOFError"),
}
OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path out of the folder": (
        lambda step: changed(step, lambda m: setattr(first(m.storage_data), "relative_path", "../../x")),
        "the path ../../x",
    ),
    "an absolute path": (
        lambda step: changed(step, lambda m: setattr(first(m.storage_data), "relative_path", "/etc/passwd")),
        "the path /etc/passwd",
    ),
    "a negative size": (
        lambda step: changed(step, lambda m: setattr(first(m.storage_data), "offset", -1)),
        "the size or place -1",
    ),
    "a transformed tensor": (
        lambda step: changed(step, lambda m: setattr(first(m.storage_data), "transform_descriptors", ["zstd"])),
        "a transformed tensor",
    ),
    "no seed": (
        lambda step: changed(step, lambda m: state_of(m)["identity"].update(seed=None)),
        "(state.identity.seed is None)",
    ),
    "no identity": (lambda step: changed(step, lambda m: state_of(m).update(identity=3)), "(state.identity is 3)"),
    "no state": (lambda step: changed(step, lambda m: setattr(m, "planner_data", None)), "(state is None)"),
    "a loss scale of its own": (
        lambda step: changed(step, lambda m: state_of(m)["loss_scale"].update(scale="x")),
        "(state.loss_scale.scale is 'x')",
    ),
    "metadata of 1 TiB": (huge, "larger than 256 MiB"),
    "a pipe": (pipe, "no .metadata"),
}
