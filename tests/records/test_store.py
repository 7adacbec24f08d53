"""Records are whole or not there, whatever stops the writer and whatever lies in the folder."""

import errno
import json
import os
import random
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import store as store_module
from harness.records.attempts import HARVESTED, JOB, Attempts
from harness.records.parse import head_of
from harness.records.parts import Head
from harness.records.record import Record
from harness.records.store import HEAD, SCHEMA, Store, read_json, with_digest, write_atomically
from harness.records.writable import require_writable
from impl.errors import InputError
from impl.run import Run, to_dict

ID = Run().id
CONFIG = json.loads(json.dumps(to_dict(Run())))
SAID = attrgetter(*(name for name in HEAD if name != "config"))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
documents = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def record(**fields: Any) -> dict[str, Any]:
    head = {"schema": SCHEMA, "id": ID, "experiment": "made_up", "tier": "smoke", "status": "ok", "reason": None}
    return head | {"config": CONFIG, "steps": [{"step": 0, "loss": 2.5}, {"step": 1, "loss": 2.25}]} | fields


def said(document: dict[str, Any]) -> Any:
    """What a record says of its run's outcome."""
    return SAID(head_of(json.dumps(document).encode()))


def put(store: Store, content: bytes | str) -> Path:
    path = store.path(ID)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@given(fields=st.dictionaries(st.sampled_from(["notes", "more", "tries of mine"]), documents))
def test_a_record_reads_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]):
    store = Store(tmp_path_factory.getbasetemp() / "same", "made_up", "smoke")
    store.write(record(**fields))
    assert store.document(ID) == record(**fields)
    (read,) = store.records()
    assert SAID(read) == SAID(store.head(ID)) == said(record())
    assert (read.run, list(read.losses)) == (Run(), [2.5, 2.25])
    assert not store.ignored


def test_items_of_a_list_take_a_line_each(store: Store):
    lines = store.write(record()).read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 2
    assert max(len(line) for line in lines if "config" not in line) < 80


def test_no_beginning_of_a_record_is_read_as_one(store: Store):
    whole = store.write(record()).read_bytes()
    end = len(whole.rstrip())
    for length in sorted({*range(60), *range(60, end, 11), *range(end - 60, end)}):
        put(store, whole[:length])
        assert store.read(ID) is None, whole[:length]
        assert store.head(ID) is None, whole[:length]
    assert store.records() == []
    assert list(store.ignored) == [store.path(ID)]


def test_a_head_is_read_without_the_rest_and_only_of_a_whole_file(store: Store):
    tries = [{"status": "failed", "reason": "no\n luck", "cause": "killed"}] * 2
    fields = {"status": "oom", "reason": 'a "word"\n', "cause": "oom", "attempt": "a-b", "tries": tries}
    long = record(**fields, steps=[{"step": i, "loss": 1.0} for i in range(5000)])
    path = store.write(dict(reversed(long.items())))
    head = store.head(ID)
    assert isinstance(head, Head)
    assert not isinstance(head, Record)
    assert SAID(head) == said(long)
    assert (head.status, head.reason, head.cause, head.attempt) == tuple(fields[name] for name in list(fields)[:4])
    assert [{name: getattr(one, name) for name in tries[0]} for one in head.tries] == tries
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + b"#" * 5000 + whole[10000:])
    assert store.head(ID) is store.read(ID) is None
    path.write_bytes(whole[:-3])
    assert store.head(ID) is None
    path.write_text(json.dumps(long | {"schema": 1}))
    assert SAID(store.head(ID)) == said(long | {"schema": 1}), "of a file that another program wrote, too"
    for damaged in (b"", b"{", whole[: len(whole) // 2], b'{\n "status": "ok",\n "x": 1\n}\n'):
        path.write_bytes(damaged)
        assert store.head(ID) is None, damaged[:20]


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", "", ".hidden", "a\0b", "a b", "ä", "a/..", "-x/"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path, store: Store):
    with pytest.raises(InputError, match="cannot name"):
        store.path(name)
    with pytest.raises(InputError, match="cannot name"):
        Attempts(store).new(name)
    for where in ((f"paper/{name}", "smoke"), ("paper", name)) if name != "a/b" else (("paper", name),):
        with pytest.raises(InputError, match="cannot name"):
            Store(tmp_path, *where)
    assert list(tmp_path.iterdir()) == []


def test_tries_are_open_from_their_submission_until_their_record_is_written(store: Store):
    started, submitted, harvested = (Attempts(store).new(ID) for _ in range(3))
    other = Attempts(store).new("ba9876543210")
    (store.folder / "attempts" / ".submit").mkdir()
    assert Attempts(store).open() == {}
    for attempt in (submitted, harvested, other):
        (attempt / JOB).write_text("{}")
    (harvested / HARVESTED).touch()
    assert Attempts(store).open() == {ID: [submitted], "ba9876543210": [other]}
    assert Attempts(store).open_of(ID) == [submitted]
    assert Attempts(store).dead_starts(ID) == [started]
    assert Attempts(store).all(ID) == sorted([started, submitted, harvested])


@given(content=st.binary(max_size=60) | documents.map(lambda document: json.dumps(document).encode()))
def test_other_bytes_are_no_record(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    store = Store(tmp_path_factory.getbasetemp() / "other", "made_up", "smoke")
    put(store, content)
    assert store.read(ID) is None
    assert store.records() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": "small"},
        {"experiment": "another"},
        {"id": "ba9876543210"},
        {"schema": SCHEMA + 1},
        {"status": None},
        {"status": ["ok"]},
        {"config": None},
    ],
)
def test_a_record_of_something_else_is_not_read(store: Store, fields: dict[str, Any]):
    put(store, with_digest(json.dumps(record(**fields))))
    assert store.read(ID) is None
    assert store.records() == []


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_bit_of_a_record_changes_unnoticed(store: Store):
    path = store.write(record(attempt="a", tries=[{"status": "failed"}], notes=["x" * 200]))
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        path.write_bytes(flipped(whole, bit))
        assert store.head(ID) is store.read(ID) is None, bit
        assert list(store.ignored) == [path]
    path.write_bytes(whole)
    assert store.read(ID) is not None
    assert not store.ignored


def test_a_record_without_a_digest_is_of_the_first_schema(store: Store):
    path = put(store, json.dumps(record(), indent=1))
    assert store.read(ID) is store.head(ID) is None
    assert store.ignored == {path: "it has no SHA-256"}
    put(store, json.dumps(record(schema=1), indent=1))
    assert store.document(ID) == record(schema=1)
    assert store.read(ID) is not None


def test_a_configuration_that_is_not_the_runs_own_is_noticed(store: Store):
    other = Run(seed=7)
    path = store.write(record(config=to_dict(other)))
    assert store.read(ID) is None
    assert store.ignored == {path: f"config: it is that of the run {other.id}, not of {ID!r}"}


def test_what_has_no_end_is_no_record_and_nobody_waits_for_it(store: Store):
    path = put(store, "")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert store.read(ID) is store.head(ID) is None
    path.unlink()
    os.mkfifo(path)
    assert store.read(ID) is store.head(ID) is None


def test_json_nested_beyond_reason_is_no_record(store: Store):
    put(store, "[" * 100_000)
    assert store.records() == []


def test_what_json_cannot_hold_is_read_as_none_and_never_written(store: Store):
    lost = record(steps=[{"loss": float("nan")}, {"loss": float("-inf")}])
    path = put(store, with_digest(json.dumps(lost)))
    kept = path.read_bytes()
    read = store.read(ID)
    assert read is not None
    assert [step.loss for step in read.steps] == [None, None]
    with pytest.raises(ValueError, match="JSON"):
        store.write(record(steps=[{"loss": float("nan")}]))
    assert path.read_bytes() == kept


def test_records_come_in_the_order_of_their_ids_and_tiers_stay_apart(tmp_path: Path):
    runs = [Run(seed=seed) for seed in range(3)]
    for tier in ("smoke", "small"):
        for run in runs:
            Store(tmp_path, "made_up", tier).write(record(id=run.id, tier=tier, config=to_dict(run)))
    ids = [run.id for run in runs]
    for tier in ("smoke", "small"):
        found = Store(tmp_path, "made_up", tier).records()
        assert [(r.tier, r.id) for r in found] == [(tier, run_id) for run_id in sorted(ids)]
    assert Store(tmp_path, "made_up", "paper").records() == []


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("fault", [full, interrupted])
def test_a_write_that_stops_leaves_the_old_record_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, fault: Callable[..., None]
):
    store.write(record(status="failed"))
    monkeypatch.setattr(store_module.os, call, fault)
    with pytest.raises((OSError, KeyboardInterrupt)):
        store.write(record(status="ok"))
    monkeypatch.undo()
    assert store.document(ID) == record(status="failed")
    assert [path.name for path in (store.folder / "records").iterdir()] == [f"{ID}.json"]


@given(texts=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_the_last_text_written_is_the_one_there(tmp_path_factory: pytest.TempPathFactory, texts: list[str]):
    path = tmp_path_factory.getbasetemp() / "written" / "file"
    for text in texts:
        write_atomically(path, text)
    assert path.read_bytes().decode() == texts[-1].replace("\n", os.linesep)
    assert list(path.parent.iterdir()) == [path]


def test_a_name_is_on_the_disk_before_the_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced, fsync = list[tuple[int, bool]](), os.fsync

    def note(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, (tmp_path / "file").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(tmp_path / "file", "text")
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def test_a_file_in_the_way_is_told(tmp_path: Path):
    (tmp_path / "results").write_text("")
    with pytest.raises(InputError, match=r"results.*cannot be written"):
        require_writable(tmp_path / "results" / "made_up")


def test_attempts_of_one_run_do_not_share_a_folder(store: Store):
    first, second = Attempts(store).new(ID), Attempts(store).new(ID)
    assert first != second
    assert first.is_absolute()
    Attempts(store).forget(first)
    Attempts(store).forget(first)
    assert list((store.folder / "attempts").iterdir()) == [second]


def test_a_missing_file_is_no_document(tmp_path: Path):
    assert read_json(tmp_path / "none.json") is None
    assert read_json(tmp_path) is None
