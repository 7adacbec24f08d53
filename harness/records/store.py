"""Storage of records: paths, atomic writing, digests, and whether a file is the record that its place says."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from impl.errors import InputError
from impl.files import naming, open_regular, rename, sync

if TYPE_CHECKING:
    from harness.records.parts import Head
    from harness.records.record import Record  # ranks and supervisors start faster without them

_Head = TypeVar("_Head", bound="Head")
SCHEMA = 2
"""Version of records that are written; version 1, without digest, can be read too."""
SIMULATED = "simulated"
"""Source of a simulated record, and the folder of such records, with one folder for each system."""
FINISHED = ("ok", "nan")
"""Statuses that a new run of the sweep leaves alone: training again would give the same."""
HEAD = (
    *("schema", "id", "experiment", "tier", "source", "config"),
    *("status", "reason", "cause", "attempt", "tries", "times"),
)
"""Fields that a record is written with first."""
DIGEST = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",\n')
"""Beginning of a document with the SHA-256 of all bytes behind it."""
NO_DIGEST, NO_JSON = "it has no SHA-256", "not a whole JSON document of a record"
NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)

DECODER = json.JSONDecoder(parse_constant=lambda _: None)

Document = dict[str, Any]
"""JSON object of a record, before it is written; one that is read is a `Record`."""


def write_atomically(path: Path, content: str | bytes, by_way_of: Path | None = None, is_lasting: bool = True) -> None:
    """Write a file so that it has all of `content` or its earlier content, even if the process is killed.

    It is made in the existing folder `by_way_of`, if given. Only an `is_lasting` one outlives a machine's failure.

    Raises:
        OSError: the folder cannot be written.
    """
    if by_way_of is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        handle, name = tempfile.mkstemp(dir=by_way_of or path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if is_lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        rename(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if is_lasting:
        sync(path.parent)


def loads(text: str) -> Any:
    """Return the document in a text; NaN and infinity, which are not JSON but written by Python, become None."""
    return DECODER.decode(text)


def read_json(path: Path) -> Any | None:
    """Return the document in a file; None if the file is missing or not a whole JSON document."""
    try:
        with open_regular(path) as file:
            return loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None


def with_digest(document: str) -> str:
    """Insert the SHA-256 of a JSON object's text before its fields."""
    rest = document.removeprefix("{").removeprefix("\n")
    return f'{{\n "sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}'


def read_checked(path: Path) -> Document:
    """Return the object in a file without its digest, which is checked; only documents of schema 1 may have none.

    Raises:
        ValueError: the file is missing, is not a JSON object, or was changed after it was written.
    """
    text, has_digest = _text_of(path)
    try:
        found = loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(NO_JSON) from error
    if not isinstance(found, dict):
        raise ValueError(NO_JSON)
    if found.get("schema") == SCHEMA and not has_digest:
        raise ValueError(NO_DIGEST)
    return found


def read_record(path: Path) -> "Record":
    """Return the record in a file.

    Raises:
        ValueError: the file is missing, is not a valid record, or was changed after it was written.
    """
    from harness.records.parse import parse

    return _parsed(path, parse)


def _parsed(path: Path, parse: Callable[[bytes], _Head]) -> _Head:
    """Return what a function makes of a record's text; raises as `read_record`."""
    text, has_digest = _text_of(path)
    try:
        found = parse(text)
    except ValueError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        found = parse(json.dumps(loads(text.decode())).encode())  # neither is JSON; `loads` makes them None
    if found.schema == SCHEMA and not has_digest:
        raise ValueError(NO_DIGEST)
    return found


def _text_of(path: Path) -> tuple[bytes, bool]:
    """Return the text of a document without its digest, which is checked, and whether it had one."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    return without_digest(content), bool(DIGEST.match(content))


def without_digest(content: bytes) -> bytes:
    """Return a document without its digest, or as it is if it has none.

    Raises:
        ValueError: the digest is not that of the rest.
    """
    if (digest := DIGEST.match(content)) is None:
        return content
    if hashlib.sha256(memoryview(content)[digest.end() :]).hexdigest().encode() != digest[1]:
        raise ValueError("it was changed after it was written: its SHA-256 differs")
    return b"{\n" + content[digest.end() :]


class Store:
    """Store of the records, tables, figures and attempts of one experiment at one tier.

    Args:
        system: system whose simulated records these are, in a folder of their own; None for measured records.

    Raises:
        InputError: the name of the experiment, tier or system leads out of the folder.
    """

    def __init__(self, out: Path, experiment: str, tier: str, system: str | None = None) -> None:
        for name in (*experiment.split("/"), tier, *([] if system is None else [system])):
            require_name(name)
        self.out, self.experiment, self.tier, self.system = out, experiment, tier, system
        self.folder = out / experiment / tier
        self.recorded = self.folder / "records" if system is None else self.folder / SIMULATED / system
        self.tables, self.figures = self.folder / "tables", self.folder / "figures"
        self.changes = self.folder / "changes"
        """Folder of the code's uncommitted changes, in files named by their hash."""
        self.ignored: dict[Path, str] = {}
        """Files in place of records that are invalid, and attempts that are left out, with the reason."""

    def path(self, run_id: str) -> Path:
        require_name(run_id)
        return self.recorded / f"{run_id}.json"

    def read(self, run_id: str) -> "Record | None":
        """Return the record of a run; None if there is none, or the file is not a valid record of this run."""
        path = self.path(run_id)
        try:
            record = read_record(path)
            why = self._why_foreign(record, run_id)
            if why is None and self.system not in (None, record.environment.system):
                why = f"it is not about the system {self.system}"
        except (ValueError, RecursionError) as error:
            record, why = None, str(error)
        if why is None:
            self.ignored.pop(path, None)
            return record
        if path.exists():
            self.ignored[path] = why
        return None

    def replaceable(self, run_id: str) -> "Record | None":
        """Return what `read` returns, of a run whose record is about to be written.

        Raises:
            InputError: a record of a later version would be lost.
        """
        if (record := self.read(run_id)) is None:
            self._require_no_newer(run_id)
        return record

    def has_finished(self, run_id: str) -> bool:
        """Return True if the run has a record with a status of FINISHED."""
        record = self.read(run_id)
        return record is not None and record.status in FINISHED

    def document(self, run_id: str) -> Document:
        """Return the record of a run as it was written.

        Raises:
            ValueError: there is none, or it was changed after it was written.
        """
        return read_checked(self.path(run_id))

    def head(self, run_id: str) -> "Head | None":
        """Return the outcome of a run, without configuration, steps and ranks of its record; None where `read` does."""
        from harness.records.parse import head_of

        try:
            head = _parsed(self.path(run_id), head_of)
        except (ValueError, RecursionError):
            return self.read(run_id)  # which notes why it is invalid
        return head if self._why_foreign(head, run_id) is None else None

    def records(self) -> "list[Record]":
        """Return all valid records, in the order of their ids."""
        files = os.listdir(self.recorded) if self.recorded.is_dir() else []
        names = sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))
        found = (self.read(name) for name in names if NAME.fullmatch(name))
        return [record for record in found if record is not None]

    def simulated(self) -> list["Store"]:
        """Return the stores of simulated records of this experiment and tier, in the order of their systems."""
        names = sorted(path.name for path in (self.folder / SIMULATED).glob("*") if path.is_dir())
        return [Store(self.out, self.experiment, self.tier, name) for name in names if NAME.fullmatch(name)]

    def with_simulated(self) -> "list[Record]":
        """Return all valid records, measured ones first, then those of every system."""
        found = self.records()
        for store in self.simulated():
            found += store.records()
            self.ignored |= store.ignored
        return found

    def write(self, document: Document, put: Callable[[Path, str], Any] = write_atomically) -> Path:
        """Write a record, `cleaned`, in place of an earlier one of the same run; `put` writes the file.

        Raises:
            InputError: the one in its place was written by a later version.
        """
        from harness.records.privacy import cleaned

        self._require_no_newer(document["id"])
        put(path := self.path(document["id"]), with_digest(_one_line_per_item(cleaned(document)) + "\n"))
        return path

    def _require_no_newer(self, run_id: str) -> None:
        """Check that there is no record of a later version of this program in a run's place.

        Raises:
            InputError: there is, whole: a record of this version would be written over it.
        """
        try:
            schema = read_checked(path := self.path(run_id)).get("schema")
        except ValueError:
            return
        if isinstance(schema, int) and schema > SCHEMA:
            raise InputError(
                f"{path} was written by a later version (schema {schema}, this one reads up to {SCHEMA}) and would be "
                "lost: use that version, or another --out"
            )

    def _why_foreign(self, head: "Head", run_id: str) -> str | None:
        """Return why a record does not belong to the run or this store, in a few words; None if it does."""
        expected = {"id": run_id, "experiment": self.experiment, "tier": self.tier}
        for key, value in expected.items():
            if getattr(head, key) != value:
                return f"its {key} is {getattr(head, key)!r:.60}, not {value!r}"
        if head.is_simulated != (self.system is not None):
            return f"its source is {head.source!r:.60}, which lies elsewhere"
        return None


def require_name(name: str) -> None:
    """Check that a name can be that of one file or folder, and leads nowhere else.

    Raises:
        InputError: it cannot.
    """
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name!r:.80} cannot name a folder of results; valid: letters, digits, '_', '-' and inner '.'"
        )


def _one_line_per_item(record: Document) -> str:
    """Return the record as JSON, HEAD first, with one line per item of a list: small, and readable in a diff."""
    fields = []
    for key, value in {**{key: record[key] for key in HEAD if key in record}, **record}.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value)
            fields.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(fields) + "\n}"
