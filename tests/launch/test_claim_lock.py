"""One harness has a point at a time, and a dead one loses it, by nothing but renames."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from harness.launch import claim_lock
from harness.launch.claim_lock import Claim, ClaimLost, Claims, Owner

POINT, OTHER = "0123456789ab", "ba9876543210"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows which boot this is")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claims(folder: Path, clock: Clock) -> Claims:
    return Claims(folder, 30.0, clock)


def claimed(one: Claims) -> Claim:
    claim = one.claim(POINT)
    assert claim is not None
    assert claim.is_held()
    return claim


def test_a_point_has_one_owner_until_it_is_released(folder: Path, clock: Clock):
    one, other = claims(folder, clock), claims(folder, clock)
    claim = claimed(one)
    assert one.claim(POINT) is claim
    assert other.claim(POINT) is None
    assert other.owner(POINT) == f"process {os.getpid()} on {Owner.here().host} ({folder / POINT})"
    assert other.claim(OTHER) is not None, "another point is another claim"
    one.release(POINT)
    assert not claim.is_held()
    claimed(other)
    other.release(POINT)
    other.release(OTHER)
    assert list(folder.iterdir()) == []


def test_an_owner_that_does_not_renew_for_a_lease_loses_its_claim(folder: Path, clock: Clock):
    one, other = claims(folder, clock), claims(folder, clock)
    claim = claimed(one)
    for _ in range(5):
        assert other.claim(POINT) is None
        clock.now += 29
        one.renew()
    assert other.claim(POINT) is None
    clock.now += 29
    assert other.claim(POINT) is None
    clock.now += 1
    claimed(other)
    one.renew()
    assert not claim.is_held()
    one.release(POINT)
    assert one.claim(POINT) is None, "what it released was not its own any more"


def test_only_the_own_clock_counts_and_not_the_time_of_a_file(folder: Path, clock: Clock):
    claimed(claims(folder, clock))
    [token] = (folder / POINT).iterdir()
    os.utime(token / claim_lock.OWNER, (0, 0))
    clock.now += 1000
    other = claims(folder, clock)
    assert other.claim(POINT) is None
    clock.now += 31
    claimed(other)


def test_one_of_several_gets_the_point_of_a_dead_owner(folder: Path, clock: Clock):
    dead, slow, *heirs = (claims(folder, clock) for _ in range(8))
    token = claimed(dead).folder.name
    assert [heir.claim(POINT) for heir in (slow, *heirs)] == [None] * 7
    clock.now += 31
    [taken] = filter(None, [heir.claim(POINT) for heir in heirs])
    assert not slow._take_over(folder / POINT, token, "late")  # between its look and its rename
    assert slow.claim(POINT) is None
    assert taken.is_held()


def test_only_who_holds_the_claim_publishes(folder: Path, clock: Clock, tmp_path: Path):
    one, other, path = claims(folder, clock), claims(folder, clock), tmp_path / "records" / "record.json"
    first = claimed(one)
    first.publish(path, "first")
    assert other.claim(POINT) is None
    clock.now += 31
    second = claimed(other)
    with pytest.raises(ClaimLost):
        first.publish(path, "late")
    assert path.read_text() == "first"
    second.publish(path, "second")
    assert path.read_text() == "second"
    other.release(POINT)
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_what_cannot_be_written_loses_no_claim(
    folder: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = claims(folder, clock)
    claim = claimed(one)
    (tmp_path / "record.json").mkdir()
    with pytest.raises(OSError, match=r"record\.json"):
        claim.publish(tmp_path / "record.json", "text")
    assert [path.name for path in claim.folder.iterdir()] == [claim_lock.OWNER]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(claim_lock, "write_atomically", full)
        one.renew()
    one.renew()
    assert claim.is_held()


@pytest.mark.parametrize("left", ["nothing", "empty folder", "prepared", "no owner", "junk"])
def test_whatever_a_killed_harness_left_is_free_in_the_end(left: str, folder: Path, clock: Clock):
    folder.mkdir()
    if left == "prepared":
        (folder / ".new-x" / "token").mkdir(parents=True)
    elif left != "nothing":
        (folder / POINT).mkdir()
    if has_token := left in ("no owner", "junk"):
        (folder / POINT / "token").mkdir()
    if left == "junk":
        (folder / POINT / "token" / claim_lock.OWNER).write_bytes(b"\xff{")
    one = claims(folder, clock)
    assert (one.claim(POINT) is None) == has_token
    clock.now += 31
    claimed(one)


# Owners that are gone -------------------------------------------------------------------------------------------------


@on_linux
def test_a_process_that_was_killed_on_this_machine_loses_its_claim_at_once(folder: Path, clock: Clock):
    program = "import sys, time; from harness.launch.claim_lock import *"
    program += "; Claims(Path(sys.argv[1])).claim(sys.argv[2]); print(1); sys.stdout.flush(); time.sleep(600)"
    owner = subprocess.Popen([sys.executable, "-c", program, folder, POINT], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        assert owner.stdout.read(1) == b"1"
        one = claims(folder, clock)
        assert one.claim(POINT) is None
        assert f"process {owner.pid} on" in (one.owner(POINT) or "")
        owner.kill()
        psutil.wait_procs([psutil.Process(owner.pid)], timeout=30)
        claimed(one)
    finally:
        owner.kill()
        owner.communicate()


@on_linux
@pytest.mark.parametrize(
    ("changed", "is_gone"),
    [
        ({}, False),
        ({"pid": 2**22 + 1}, True),
        ({"seconds_after_boot": -9.0}, True),  # another process has the number by now
        ({"pid": 2**22 + 1, "machine": "another boot"}, False),
        ({"pid": 2**22 + 1, "machine": None}, False),
        ({"pid": -5}, False),
    ],
)
def test_an_owner_is_gone_if_it_ended_on_this_machine(changed: dict[str, object], is_gone: bool):
    owner = Owner.read(json.dumps({**asdict(Owner.here()), **changed, "count": 1}).encode())
    assert owner is not None
    assert owner.is_gone() == is_gone


@on_linux
def test_a_clock_that_is_set_ends_no_owner(monkeypatch: pytest.MonkeyPatch):
    owner, boot = Owner.here(), psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: boot + 3600)
    assert psutil.Process().create_time() > boot + 3600
    assert not owner.is_gone()


def test_a_number_that_no_process_can_have_is_no_error():
    Owner("x", 2**80, 0.0, Owner.here().machine).is_gone()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 100_000, b'{"pid": "1"}', b'{"pid": 1e99, "host": "x"}', b'{"host": "x"}']
)
def test_a_damaged_owner_is_none(content: bytes):
    assert Owner.read(content) is None


# At the same time -----------------------------------------------------------------------------------------------------


def test_many_at_once_never_have_the_same_point(folder: Path):
    """Threads claim, check that they are alone, and release, as fast as they can."""
    inside, errors = [0], []

    def work(seed: int) -> None:
        one = Claims(folder, seconds=1e9)
        for i in range(40):
            if (claim := one.claim(POINT)) is not None:
                inside[0] += 1
                if inside[0] != 1 or not claim.is_held():
                    errors.append((seed, i))
                inside[0] -= 1
                one.release(POINT)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_context_renews_and_releases(folder: Path):
    with Claims(folder, seconds=0.03) as one:
        path = claimed(one).folder / claim_lock.OWNER
        before = path.read_bytes()
        for _ in range(1000):
            if path.read_bytes() != before:
                break
            threading.Event().wait(0.01)
        else:
            raise AssertionError("never renewed")
    assert list(folder.iterdir()) == []
