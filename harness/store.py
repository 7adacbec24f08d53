"""Where records lie, and how they are written so that none is ever half there."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from impl.errors import InputError

SCHEMA = 1
FINISHED = ("ok", "nan")
"""Statuses that a new run of the sweep leaves alone: training again would give the same."""

RESUMED = "resumed.json"
"""In an attempt's folder: the step that it went on from, if it did not begin anew."""

Record = dict[str, Any]


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of `text` or what it held before, whenever the writer stops.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def loads(text: str) -> Any:
    """The document in a text. What JSON has no word for and Python writes all the same, NaN and infinity, is None."""
    return json.loads(text, parse_constant=lambda _: None)


def read_json(path: Path) -> Any | None:
    """The document in a file; None if the file is missing or not a whole JSON document."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


class Store:
    """The records, tables, figures and attempts of one experiment at one tier."""

    def __init__(self, out: Path, experiment: str, tier: str) -> None:
        self.experiment, self.tier = experiment, tier
        self.folder = out / experiment / tier
        self.tables, self.figures = self.folder / "tables", self.folder / "figures"

    def require_writable(self) -> None:
        """Make the folder.

        Raises:
            InputError: it cannot be made or written.
        """
        try:
            (self.folder / "records").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise InputError(
                f"--out: {self.folder} cannot be written ({error.strerror}); give a folder that can"
            ) from error

    def path(self, run_id: str) -> Path:
        return self.folder / "records" / f"{run_id}.json"

    def read(self, run_id: str) -> Record | None:
        """The record of a run; None if there is none, or what is there is no whole record of it."""
        record = read_json(self.path(run_id))
        if not isinstance(record, dict):
            return None
        expected = {"schema": SCHEMA, "id": run_id, "experiment": self.experiment, "tier": self.tier}
        whole = isinstance(record.get("status"), str) and isinstance(record.get("config"), dict)
        return record if whole and all(record.get(key) == value for key, value in expected.items()) else None

    def records(self) -> list[Record]:
        """All whole records, in the order of their ids."""
        found = (self.read(path.stem) for path in sorted((self.folder / "records").glob("*.json")))
        return [record for record in found if record is not None]

    def write(self, record: Record) -> Path:
        """Keep a record, in place of an earlier one of the same run."""
        path = self.path(record["id"])
        write_atomically(path, _one_line_per_item(record) + "\n")
        return path

    def new_attempt(self, run_id: str) -> Path:
        """An empty folder for one try at a run."""
        root = self.folder / "attempts"
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=root)).resolve()

    def forget_attempt(self, attempt: Path) -> None:
        """Remove a try that nothing is to be read from any more."""
        shutil.rmtree(attempt, ignore_errors=True)

    def forget_attempts(self, run_id: str) -> None:
        """Remove all tries at a run that has a finished record."""
        for attempt in (self.folder / "attempts").glob(f"{run_id}-*"):
            self.forget_attempt(attempt)

    def checkpoints(self, run_id: str) -> Path:
        """Where the checkpoints of a run lie, whichever of its tries wrote them."""
        return (self.folder / "checkpoints" / run_id).resolve()

    def forget_checkpoints(self, run_id: str) -> None:
        """Remove those of a run that has a finished record."""
        shutil.rmtree(self.checkpoints(run_id), ignore_errors=True)


def _one_line_per_item(record: Record) -> str:
    """JSON in which a list's items, such as steps, take a line each: small, and readable in a diff."""
    fields = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value)
            fields.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(fields) + "\n}"
