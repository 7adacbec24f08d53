"""One harness has a point at a time, and a dead one loses it, by nothing but renames."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launch import claim_lock
from harness.launch.claim_lock import ClaimLost, Claims, Owner

POINT = "0123456789ab"


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


def claims(folder: Path, clock: Clock, seconds: float = 30.0) -> Claims:
    return Claims(folder, seconds, clock)


def test_a_point_has_one_owner_until_it_is_released(folder: Path, clock: Clock):
    one, other = claims(folder, clock), claims(folder, clock)
    claim = one.claim(POINT)
    assert claim is not None
    assert claim.is_held()
    assert one.claim(POINT) is claim
    assert other.claim(POINT) is None
    assert other.owner(POINT) == f"process {os.getpid()} on {Owner.here().host} ({folder / POINT})"
    assert other.claim("ba9876543210") is not None, "another point is another claim"
    one.release(POINT)
    assert not claim.is_held()
    assert other.claim(POINT) is not None
    other.release(POINT)
    other.release("ba9876543210")
    assert list(folder.iterdir()) == []


def test_an_owner_that_says_nothing_for_a_lease_loses_its_claim(folder: Path, clock: Clock):
    one, other = claims(folder, clock), claims(folder, clock)
    claim = one.claim(POINT)
    assert claim is not None
    for _ in range(5):
        assert other.claim(POINT) is None
        clock.now += 29
        one.renew()
    assert other.claim(POINT) is None
    clock.now += 29
    assert other.claim(POINT) is None
    clock.now += 1
    assert other.claim(POINT) is not None
    assert not claim.is_held()
    one.renew()
    assert not claim.is_held()
    one.release(POINT)
    assert one.claim(POINT) is None, "what it released was not its own any more"


def test_how_long_an_owner_was_silent_is_what_one_has_seen_oneself(folder: Path, clock: Clock):
    """Nobody knows what the clocks of others say: a file's time, say."""
    one = claims(folder, clock)
    assert one.claim(POINT) is not None
    [token] = (folder / POINT).iterdir()
    os.utime(token / claim_lock.OWNER, (0, 0))
    clock.now += 1000
    other = claims(folder, clock)
    assert other.claim(POINT) is None
    clock.now += 31
    assert other.claim(POINT) is not None


def test_of_all_who_want_a_dead_owners_point_one_gets_it(folder: Path, clock: Clock):
    assert claims(folder, clock).claim(POINT) is not None
    heirs = [claims(folder, clock) for _ in range(8)]
    assert [heir.claim(POINT) for heir in heirs] == [None] * 8
    clock.now += 31
    assert sum(heir.claim(POINT) is not None for heir in heirs) == 1


def test_who_saw_the_owner_before_dead_does_not_take_the_next_one_for_it(folder: Path, clock: Clock):
    one, quick, slow = (claims(folder, clock) for _ in range(3))
    one.claim(POINT)
    assert quick.claim(POINT) is slow.claim(POINT) is None
    clock.now += 31
    taken = quick.claim(POINT)
    assert taken is not None
    assert not slow._take_over(folder / POINT, _token_of(one), "late")  # between its look and its rename
    assert slow.claim(POINT) is None
    assert taken.is_held()


def _token_of(one: Claims) -> str:
    return one.held[POINT].folder.name


def test_only_who_holds_the_claim_publishes(folder: Path, clock: Clock, tmp_path: Path):
    one, other, path = claims(folder, clock), claims(folder, clock), tmp_path / "records" / "record.json"
    first = one.claim(POINT)
    assert first is not None
    first.publish(path, "first")
    assert other.claim(POINT) is None
    clock.now += 31
    second = other.claim(POINT)
    assert second is not None
    with pytest.raises(ClaimLost):
        first.publish(path, "late")
    assert path.read_text() == "first"
    second.publish(path, "second")
    assert path.read_text() == "second"
    other.release(POINT)
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_what_cannot_be_written_is_no_lost_claim(folder: Path, clock: Clock, tmp_path: Path):
    claim = claims(folder, clock).claim(POINT)
    assert claim is not None
    (tmp_path / "record.json").mkdir()
    with pytest.raises(OSError, match=r"record\.json"):
        claim.publish(tmp_path / "record.json", "text")
    assert claim.is_held()
    assert [path.name for path in claim.folder.iterdir()] == [claim_lock.OWNER]


def test_a_full_disk_does_not_lose_a_claim(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    one = claims(folder, clock)
    claim = one.claim(POINT)
    assert claim is not None
    with monkeypatch.context() as patch:
        patch.setattr(claim_lock, "write_atomically", _full)
        one.renew()
    assert claim.is_held()
    one.renew()
    assert claim.is_held()


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("left", ["nothing", "empty folder", "prepared", "no owner", "junk"])
def test_whatever_a_killed_harness_left_is_free_in_the_end(left: str, folder: Path, clock: Clock):
    folder.mkdir()
    if left == "prepared":
        (folder / ".new-x" / "token").mkdir(parents=True)
    elif left != "nothing":
        (folder / POINT).mkdir()
    if left in ("no owner", "junk"):
        (folder / POINT / "token").mkdir()
    if left == "junk":
        (folder / POINT / "token" / claim_lock.OWNER).write_bytes(b"\xff{")
    one = claims(folder, clock)
    at_once = one.claim(POINT)
    assert (at_once is None) == (left in ("no owner", "junk"))
    clock.now += 31
    assert one.claim(POINT) is not None


# Owners that are gone -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which boot this is")
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
        assert one.claim(POINT) is not None
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which boot this is")
def test_owners_of_other_machines_are_never_known_to_be_gone():
    me = asdict(Owner.here())
    dead = {**me, "pid": 2**22 + 1}
    assert not is_gone(_as_owner(me))
    assert is_gone(_as_owner(dead))
    assert is_gone(_as_owner({**me, "started": me["started"] - 1000})), "the number is another process' by now"
    assert not is_gone(_as_owner({**dead, "machine": "another boot"}))
    assert not is_gone(_as_owner({**dead, "machine": None}))


@pytest.mark.parametrize(
    "owner", [b"", b"{", b"[]", b"[" * 100_000, b'{"pid": "1"}', b'{"pid": 1e99, "host": "x"}', b'{"host": "x"}']
)
def test_an_owner_that_names_nobody_is_not_known_to_be_gone(owner: bytes):
    assert not is_gone(owner)


def test_a_number_that_no_process_can_have_is_no_error():
    is_gone(_as_owner({**asdict(Owner.here()), "pid": 2**80}))
    is_gone(_as_owner({**asdict(Owner.here()), "pid": -5}))
    is_gone(_as_owner({**asdict(Owner.here()), "started": "yesterday"}))


def is_gone(content: bytes) -> bool:
    owner = Owner.read(content)
    return owner is not None and owner.is_gone()


def _as_owner(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


# At the same time -----------------------------------------------------------------------------------------------------


def test_many_at_once_never_have_the_same_point(folder: Path):
    """Threads that claim, check that they are alone, and release, as fast as they can; owners die, too."""
    inside, most, errors = [0], [0], []

    def work(seed: int) -> None:
        one = Claims(folder, seconds=1e9)
        for i in range(40):
            claim = one.claim(POINT)
            if claim is None:
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
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
    assert most == [1]


def test_a_context_renews_and_releases(folder: Path):
    with Claims(folder, seconds=0.03) as one:
        claim = one.claim(POINT)
        assert claim is not None
        before = (claim.folder / claim_lock.OWNER).read_bytes()
        for _ in range(1000):
            if (claim.folder / claim_lock.OWNER).read_bytes() != before:
                break
            threading.Event().wait(0.01)
        else:
            raise AssertionError("never renewed")
    assert list(folder.iterdir()) == []
