"""Journal of a rank's measurements beside the run's checkpoints: each save adds to the file only what is new."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from harness.rank.instruments import Measured
from harness.records.store import DIGEST, Document, loads, with_digest, without_digest, write_atomically
from impl.files import naming

BEGIN = b"\n{\n"
"""Line that begins an entry; the text of JSON has none within an object."""


class Journal:
    """Measurements up to each checkpoint, in entries with a SHA-256 each, so that time and bytes grow as the steps do.

    The first entry of an attempt has all that was measured before, and replaces the file of an earlier attempt. Each
    further one is appended. A process that is killed meanwhile leaves a part of an entry, which is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = self.evaluations = 0
        """Number of those that this attempt has written."""
        self.is_begun = False

    def read(self) -> Measured | None:
        """Return the measurements in the whole entries; None if training cannot be resumed with them."""
        return Measured.read(list(_entries(self.path)))

    def add(self, measured: Measured) -> None:
        """Write what was measured since the last call, so that it outlives the machine's failure.

        Raises:
            OSError: the file cannot be written.
        """
        steps, evaluations = measured.steps[self.steps :], measured.evaluations[self.evaluations :]
        new = dataclasses.replace(measured, steps=steps, evaluations=evaluations)
        entry = with_digest(json.dumps(dataclasses.asdict(new))) + "\n"
        if not self.is_begun:
            write_atomically(self.path, entry)
        else:
            with naming(self.path), open(self.path, "a") as file:
                file.write(entry)
                file.flush()
                os.fsync(file.fileno())
        self.steps, self.evaluations, self.is_begun = len(measured.steps), len(measured.evaluations), True


def _entries(path: Path) -> Iterator[Document]:
    """Yield the entries up to the first that is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return
    for entry in (b"\n" + content).split(BEGIN)[1:]:
        try:
            whole = entry.removesuffix(b"\n{").removesuffix(b"\n")  # of the next entry a byte may be left
            if not DIGEST.match(text := BEGIN[1:] + whole):
                return
            yield loads(without_digest(text).decode())
        except (ValueError, RecursionError):
            return
