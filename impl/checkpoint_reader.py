"""Reader of checkpoints as data: nothing that their files contain is executed."""

import hashlib
import io
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from impl.errors import InputError

METADATA_FILE = ".metadata"
LARGEST_METADATA = 2**28
"""Most bytes of metadata that are read: about two million boxes of tensors."""
DIGEST = re.compile(rb"\nsha256 ([0-9a-f]{64})\n\Z")
"""Pattern at the end of the metadata file, after the pickle, where PyTorch's own reader does not look."""
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


def add_digest(checkpoint: Path) -> None:
    """Append the SHA-256 of a new checkpoint's metadata to their file."""
    with (checkpoint / METADATA_FILE).open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.write(f"\nsha256 {digest}\n".encode())
        file.flush()
        os.fsync(file.fileno())


class CheckpointReader(dcp.FileSystemReader):
    """`FileSystemReader` for checkpoints of unknown origin: nothing in them is executed, and damage is detected.

    Metadata come from a restricted unpickler and carry a SHA-256. Every entry is a tensor, which PyTorch reads with
    `weights_only=True`, from a file in the checkpoint's own folder. `torch.save` stores tensors as zip archives that
    hold a CRC-32 of each member; `torch.load` does not check it, this reader does.

    Memory: three times the largest tensor that was written.

    Raises:
        InputError: a file is damaged, or holds something that a checkpoint does not have.
    """

    on_read: Callable[[], None] = staticmethod(lambda: None)
    """Called before each tensor that is read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / METADATA_FILE
        if not file.is_file():  # opening a named pipe would wait for a writer
            raise InputError(f"no {METADATA_FILE}")
        if file.stat().st_size > LARGEST_METADATA:
            raise InputError(f"{METADATA_FILE} is larger than {LARGEST_METADATA >> 20} MiB")
        content = file.read_bytes()
        if digest := DIGEST.search(content):  # files of earlier versions have none, and nothing after the pickle
            content = content[: digest.start()]
            if hashlib.sha256(content).hexdigest() != digest[1].decode():
                raise InputError(f"{METADATA_FILE} is not as it was written: its SHA-256 differs")
        pickled = io.BytesIO(content)
        metadata = _metadata(_Unpickler(pickled).load())
        if pickled.read(1):  # a damaged digest is none
            raise InputError(f"{METADATA_FILE} has more than its end")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[item.storage_index].append(item)
        for index, items in wanted.items():
            self.on_read()
            tensor = self.read_tensor(self.storage_data[index])
            for item in items:
                box = [slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True)]
                target = planner.resolve_tensor(item)
                target.detach().copy_(tensor[tuple(box)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_tensor(self, place: _StorageInfo) -> torch.Tensor:
        """Return the tensor at a place of a data file.

        Raises:
            InputError: the data are damaged, or not a tensor.
        """
        name = place.relative_path
        with (Path(self.path) / name).open("rb") as file:
            file.seek(place.offset)
            archive = _checked_archive(file.read(place.length), name)
        try:
            found = torch.load(archive, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # PyTorch's own message advises turning the check off
            named = re.search(r"(?:GLOBAL|class|function) ([\w.]+) ", str(error))
            raise _foreign(name, named[1]) if named else InputError(f"{name}: a tensor is damaged") from None
        return _of(torch.Tensor, found, name)


def _checked_archive(stored: bytes, name: str) -> io.BytesIO:
    """Return a new archive of the members of a stored one, each checked against its CRC-32.

    PyTorch reads no byte that was not checked: its own parser takes values from headers that have no checksum.
    """
    checked = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(stored)) as archive, zipfile.ZipFile(checked, "w") as copy:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise zipfile.BadZipFile("a member is compressed")
            if sum(one.file_size for one in members) > len(stored):
                raise zipfile.BadZipFile("members overlap")
            for one in members:
                copy.writestr(one.filename, archive.read(one))
    except Exception as error:  # zipfile raises many kinds for a damaged archive
        raise InputError(f"{name}: a tensor is damaged ({error})") from None
    checked.seek(0)
    return checked


class _Record:
    """Stand-in for an object in the metadata, with its arguments and state: no constructor is called."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_MODULES = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
"""Names that metadata may hold, by the modules that they are from."""
_RECORDS = {name: type(name, (_Record,), {}) for names in _MODULES.values() for name in names}
_OPCODES = (
    "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD EMPTY_DICT "
    "EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SHORT_BINUNICODE BINUNICODE BININT BININT1 "
    "BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE"
)


def _with_names_as_keys(code: bytes, keys: slice) -> Callable[[Any], None]:
    """Return the handler of an opcode that fills a dictionary, for keys that hash fast, unlike nested tuples."""

    def load(unpickler: Any) -> None:
        if not all(isinstance(key, str | _Record) for key in unpickler.stack[keys]):
            raise _foreign(METADATA_FILE, "a key that is not a name")
        pickle._Unpickler.dispatch[code[0]](unpickler)  # pyright: ignore[reportPrivateUsage]

    return load


class _Handlers(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise _foreign(METADATA_FILE, f"pickle opcode {code:#04x}")


class _Unpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """Unpickler of plain values and records only.

    It is in Python: the C implementation allocates 16 bytes times any memo index that a file names.
    """

    dispatch = _Handlers(
        {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES.split()}
        | {pickle.SETITEM[0]: _with_names_as_keys(pickle.SETITEM, slice(-2, -1))}
        | {pickle.SETITEMS[0]: _with_names_as_keys(pickle.SETITEMS, slice(None, None, 2))}
    )

    def find_class(self, module: str, name: str) -> Any:
        if name in _MODULES.get(module, ()):
            return _RECORDS[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise _foreign(METADATA_FILE, f"{module}.{name}")


def _metadata(found: Any) -> Metadata:
    """Build real metadata from records, checking the type of everything that is used."""
    top = _state(found, "Metadata")
    tensors: dict[str, Any] = {
        _of(str, name): _tensor(saved) for name, saved in _of(dict, top["state_dict_metadata"]).items()
    }
    places = {_index(index): _place(place) for index, place in _of(dict, top["storage_data"]).items()}
    _require_plain(planner_data := top["planner_data"], set())
    return Metadata(tensors, planner_data, places)


def _tensor(record: Any) -> TensorStorageMetadata:
    found = _state(record, "TensorStorageMetadata")
    dtype, *_ = _state(found["properties"], "TensorProperties", tuple)
    boxes = [_state(box, "ChunkStorageMetadata") for box in _of(list, found["chunks"])]
    chunks = [ChunkStorageMetadata(_size(box["offsets"]), _size(box["sizes"])) for box in boxes]
    return TensorStorageMetadata(TensorProperties(_of(torch.dtype, dtype)), _size(found["size"]), chunks)


def _index(record: Any) -> MetadataIndex:
    found = _state(record, "MetadataIndex")
    return MetadataIndex(_of(str, found["fqn"]), _size(found["offset"]))


def _place(record: Any) -> _StorageInfo:
    found = _state(record, "_StorageInfo")
    name = _of(str, found["relative_path"])
    if not DATA_FILE.fullmatch(name):
        raise _foreign(METADATA_FILE, f"the path {name}")
    if "transform_descriptors" in found:
        raise _foreign(METADATA_FILE, "a transformed tensor")
    return _StorageInfo(name, _count(found["offset"]), _count(found["length"]))


def _size(record: Any) -> torch.Size:
    [sizes] = _of(_RECORDS["Size"], record).args
    return torch.Size([_count(size) for size in _of(tuple, sizes)])


def _state(record: Any, name: str, kind: type = dict) -> Any:
    return _of(kind, _of(_RECORDS[name], record).state)


def _count(value: Any) -> int:
    if not 0 <= _of(int, value) < 2**63:
        raise _foreign(METADATA_FILE, f"the size or place {value}")
    return value


def _of(kind: type, value: Any, file: str = METADATA_FILE) -> Any:
    if type(value) is not kind:
        raise _foreign(file, f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _require_plain(value: Any, seen: set[int]) -> None:
    """Check that a value consists of dictionaries, lists, tuples, text, numbers and None."""
    if id(value) in seen or value is None or type(value) in (str, int, float, bool):
        return
    seen.add(id(value))
    if type(value) is dict:
        for key, inner in value.items():
            _require_plain(_of(str, key), seen)
            _require_plain(inner, seen)
    elif type(value) in (list, tuple):
        for inner in value:
            _require_plain(inner, seen)
    else:
        raise _foreign(METADATA_FILE, f"{type(value).__name__} in its state")


def _foreign(file: str, what: str) -> InputError:
    return InputError(f"{file} holds {what[:100]!r}, which a checkpoint does not have")
