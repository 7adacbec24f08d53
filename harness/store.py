"""Where records lie, and how they are written so that none is ever half there."""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from harness.kept import Kept
from impl.errors import InputError

SCHEMA = 1
SIMULATED = "simulated"
"""Source of a record that nothing was run for, and the folder of such records, a folder for each system."""
FINISHED = ("ok", "nan")
"""Statuses that a new run of the sweep leaves alone: training again would give the same."""

RESUMED = "resumed.json"
"""In an attempt's folder: the step that it went on from, if it did not begin anew."""
JOB = "job.json"
"""In an attempt's folder: what it was submitted as; harness.jobs reads and writes it."""
HARVESTED = "harvested"
"""In an attempt's folder: its record is written."""
HEAD = (
    *("schema", "id", "experiment", "tier", "source", "config"),
    *("status", "reason", "cause", "attempt", "tries", "times"),
)
"""The fields that a record begins with, so that they can be read without the rest; the configuration is skipped."""
HEAD_NAMES = frozenset(name.encode() for name in HEAD)
HEAD_BYTES = 2**13
FIELD = re.compile(rb'^ "(\w+)":', re.MULTILINE)
CONFIG = re.compile(rb'^( "config": )\{.*\},$', re.MULTILINE)
END = b"\n}\n"
NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)

DECODER = json.JSONDecoder(parse_constant=lambda _: None)

Record = dict[str, Any]


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file holds all of `content` or what it held before, whenever the writer stops.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def loads(text: str) -> Any:
    """The document in a text. What JSON has no word for and Python writes all the same, NaN and infinity, is None."""
    return DECODER.decode(text)


def read_json(path: Path) -> Any | None:
    """The document in a file; None if the file is missing or not a whole JSON document."""
    try:
        with _open(path) as file:
            return loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None


def _read_fast(path: Path) -> tuple[Any | None, bytes]:
    """As `read_json`, several times as fast, with the JSON text: no NaN or infinity is in it."""
    from pydantic_core import from_json  # ranks and what watches over them read no record: they start faster

    try:
        with _open(path) as file:
            text = file.read()
        if b"NaN" not in text and b"Infinity" not in text:
            return from_json(text), text
        record = loads(text.decode())
        return record, json.dumps(record).encode()
    except (OSError, ValueError, RecursionError):
        return None, b""


def _open(path: Path) -> BinaryIO:
    """A file for reading; not a pipe, which is waited for, nor a device, which may have no end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


class Store:
    """The records, tables, figures and attempts of one experiment at one tier.

    Args:
        system: whose simulated records these are, which lie in a folder of their own; None: the measured ones.

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
        """How the code differed from its commit, by the difference's hash."""
        self.ignored: dict[Path, str] = {}
        """Files among the records that were read and are none, and why."""

    def require_writable(self) -> None:
        """Make the folder.

        Raises:
            InputError: it cannot be made or written.
        """
        try:
            self.recorded.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise InputError(
                f"--out: {self.folder} cannot be written ({error.strerror}); give a folder that can"
            ) from error

    def path(self, run_id: str) -> Path:
        require_name(run_id)
        return self.recorded / f"{run_id}.json"

    def read(self, run_id: str) -> Record | None:
        """The record of a run; None if there is none, or what is there is no whole record of it."""
        from harness.whole import why_not_whole  # ranks and what watches over them read no record: they start faster

        path = self.path(run_id)
        record, text = _read_fast(path)
        why = self._why_foreign(record, run_id) or why_not_whole(record, text)
        if why is not None and path.exists():
            self.ignored[path] = why
        if why is None:
            self.ignored.pop(path, None)
        return Kept({**record, "config": Kept(record["config"])}) if why is None else None

    def head(self, run_id: str) -> Record | None:
        """The first fields of a run's record, HEAD: what became of it, without configuration, steps and ranks.

        None if there is no record, or one that is cut short or of something else.
        """
        found = _head(self.path(run_id))
        if found is None:
            record = self.read(run_id)
            return record and {key: record[key] for key in HEAD if key in record} | {"config": {}}
        return found if self._why_foreign(found, run_id) is None else None

    def records(self) -> list[Record]:
        """All whole records, in the order of their ids."""
        names = (path.stem for path in sorted(self.recorded.glob("*.json")))
        found = (self.read(name) for name in names if NAME.fullmatch(name))
        return [record for record in found if record is not None]

    def simulated(self) -> list["Store"]:
        """The stores of this experiment and tier that hold a system's simulated records, by its name."""
        names = sorted(path.name for path in (self.folder / SIMULATED).glob("*") if path.is_dir())
        return [Store(self.out, self.experiment, self.tier, name) for name in names if NAME.fullmatch(name)]

    def with_simulated(self) -> list[Record]:
        """All whole records, those of every system after the measured ones."""
        found = self.records()
        for store in self.simulated():
            found += store.records()
            self.ignored |= store.ignored
        return found

    def write(self, record: Record, put: Callable[[Path, str], Any] = write_atomically) -> Path:
        """Keep a record, in place of an earlier one of the same run; `put` writes the file."""
        path = self.path(record["id"])
        put(path, _one_line_per_item(record) + "\n")
        return path

    def _why_foreign(self, record: Any, run_id: str) -> str | None:
        """Why this is no record of the run, in a few words; None: it is one."""
        if not isinstance(record, dict):
            return "not a whole JSON document of a record"
        expected = {"schema": SCHEMA, "id": run_id, "experiment": self.experiment, "tier": self.tier}
        for key, value in expected.items():
            if record.get(key) != value:
                return f"its {key} is {record.get(key)!r:.60}, not {value!r}"
        if (record.get("source") == SIMULATED) != (self.system is not None):
            return f"its source is {record.get('source')!r:.60}, which lies elsewhere"
        if self.system is not None and (record.get("environment") or {}).get("system") != self.system:
            return f"it is not about the system {self.system}"
        is_whole = isinstance(record.get("status"), str) and isinstance(record.get("config"), dict)
        return None if is_whole else "it has no status or no config"

    def new_attempt(self, run_id: str) -> Path:
        """An empty folder for one try at a run."""
        require_name(run_id)
        root = self.folder / "attempts"
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=root)).resolve()

    def attempts(self) -> dict[str, list[Path]]:
        """The tries that were submitted and whose record is not written yet, by the id of their run."""
        found: dict[str, list[Path]] = {}
        for attempt in self._attempts():
            if _is_open(attempt):
                found.setdefault(attempt.name.rpartition("-")[0], []).append(attempt)
        return found

    def attempts_of(self, run_id: str) -> list[Path]:
        """The tries at one run that were submitted and whose record is not written yet."""
        return [attempt for attempt in self._attempts(run_id) if _is_open(attempt)]

    def _attempts(self, run_id: str = "") -> list[Path]:
        root = (self.folder / "attempts").resolve()
        try:
            names = sorted(os.listdir(root))
        except OSError:
            return []
        return [root / name for name in names if name.startswith(f"{run_id}-" if run_id else "") and name[0] != "."]

    def forget_attempt(self, attempt: Path) -> None:
        """Remove a try that nothing is to be read from any more."""
        shutil.rmtree(attempt, ignore_errors=True)

    def dead_starts(self, run_id: str) -> list[Path]:
        """Tries at a run that were never submitted: whoever made them was stopped."""
        return [attempt for attempt in self._attempts(run_id) if not (attempt / JOB).exists()]

    def all_attempts(self, run_id: str) -> list[Path]:
        """All tries at a run."""
        return self._attempts(run_id)

    def checkpoints(self, run_id: str) -> Path:
        """Where the checkpoints of a run lie, whichever of its tries wrote them."""
        return (self.folder / "checkpoints" / run_id).resolve()

    def forget_checkpoints(self, run_id: str) -> None:
        """Remove those of a run that has a finished record."""
        shutil.rmtree(self.checkpoints(run_id), ignore_errors=True)


def require_name(name: str) -> None:
    """Check that this names a file or folder right below another one, and nothing else.

    Raises:
        InputError: it does not.
    """
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name!r:.80} cannot name a folder of results; valid: letters, digits, '_', '-' and inner '.'"
        )


def _is_open(attempt: Path) -> bool:
    return (attempt / JOB).exists() and not (attempt / HARVESTED).exists()


def _head(path: Path) -> Record | None:
    """The fields of HEAD at the beginning of a record that this module wrote; None: read all of it to know."""
    try:
        with _open(path) as file:
            text = file.read(HEAD_BYTES)
            file.seek(-len(END), os.SEEK_END)
            is_whole = file.read() == END
        end = next((field.start() for field in FIELD.finditer(text) if field[1] not in HEAD_NAMES), None)
        if not is_whole or end is None:
            return None
        return loads(CONFIG.sub(b"\\1{},", text[:end], count=1).decode().rstrip().rstrip(",") + "}")
    except (OSError, ValueError, RecursionError):
        return None


def _one_line_per_item(record: Record) -> str:
    """JSON, HEAD first, in which a list's items, such as steps, take a line each: small, and readable in a diff."""
    fields = []
    for key, value in {**{key: record[key] for key in HEAD if key in record}, **record}.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value)
            fields.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(fields) + "\n}"
