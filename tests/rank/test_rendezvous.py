"""How ranks find each other, and nobody else."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from harness.rank import addresses, rendezvous
from harness.rank.addresses import LOOPBACK, address, interface, place, ports
from harness.rank.rendezvous import RendezvousError, join
from tests.harness.made_up_orders import made_up
from tests.ranks import CONTEXT

SHORT = timedelta(seconds=1)


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Ports of which the first is somebody else's, a store without our word, and the second is free."""
    stranger = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with closing(socket.create_server((LOOPBACK, 0))) as free:
        port = free.getsockname()[1]
    yield [stranger.port, port]
    del stranger


def test_one_host_listens_to_itself_and_several_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address(["node1"], 0) == "127.0.0.1"
    assert address(["node1", "node2"], 1) == "node1"
    monkeypatch.setattr(addresses, "own_address", lambda other: {"node2": "10.0.0.1"}[other])
    assert address(["node1", "node2", "node3"], 0) == "10.0.0.1"


def test_the_way_to_a_host_has_an_address_and_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.own_address("127.0.0.1") == "127.0.0.1"
    name = interface(["localhost"], 0)
    assert name is None or "127.0.0.1" in {a.address for a in psutil.net_if_addrs()[name]}
    assert interface(["127.0.0.1", "127.0.0.1"], 1) == name

    def unknown(host: str) -> str:
        raise OSError(host)

    monkeypatch.setattr(addresses, "own_address", unknown)
    assert interface(["node1", "nowhere"], 0) is None


def test_on_one_machine_it_is_a_file_and_on_a_cluster_ports_of_the_job(tmp_path: Path) -> None:
    assert place(tmp_path, ["here"], 0, None) == f"file://{tmp_path}/rendezvous"
    found = ports("7_3")
    assert place(tmp_path, ["node1", "node2"], 1, "7_3") == f"tcp://node1:{','.join(map(str, found))}"
    assert len(set(found)) == addresses.PORTS_OF_JOB
    assert all(port in addresses.PORTS for port in found)
    assert not set(found) & set(ports("7_4"))


def test_the_first_rank_listens_at_its_address_only_and_takes_the_next_port(taken: list[int]) -> None:
    store = rendezvous._listen(LOOPBACK, taken, SHORT)
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert [address for address, port in listening if port == taken[1]] == [LOOPBACK]
    del store


def test_ports_that_are_all_taken_are_told() -> None:
    with closing(socket.create_server((LOOPBACK, 0))) as one:
        port = one.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"cannot listen at 127.0.0.1 on any of the ports {port} \(.*in use"):
            rendezvous._listen(LOOPBACK, [port], SHORT)


def test_a_rank_waits_for_its_own_run_only(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.2)
    own = dist.PrefixStore(rendezvous._proof("word", "prefix"), rendezvous._listen(LOOPBACK, taken, SHORT))
    own.set(rendezvous.HERE, "")
    own.set("x", "y")
    found = rendezvous._connect(LOOPBACK, taken, "word", timedelta(seconds=20))
    assert found.get("x") == b"y"
    with pytest.raises(RendezvousError, match=r"no rank 0 of this run at 127.0.0.1, ports \d+, \d+, within 1 s"):
        rendezvous._connect(LOOPBACK, taken, "another word", SHORT)


def met(rank: int, where: str, answers: object) -> None:
    device, store = join(made_up(), rank, rank, 2, where)
    store.set(f"from {rank}", str(rank))
    told = store.get(f"from {1 - rank}").decode()
    dist.barrier()
    dist.destroy_process_group()
    answers.put((rank, str(device), told))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_meet_and_can_tell_each_other_things(kind: str, tmp_path: Path, taken: list[int]) -> None:
    where = f"file://{tmp_path}/rendezvous" if kind == "file" else f"tcp://127.0.0.1:{taken[1]}"
    told = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=met, args=(rank, where, told), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    assert sorted(told.get(timeout=60) for _ in ranks) == [(0, "cpu", "1"), (1, "cpu", "0")]
    for process in ranks:
        process.join(timeout=10)


def peek(port: int) -> tuple[dist.TCPStore, list[str]]:
    """What a process without the token finds in the first rank's store."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=9))
    end = time.monotonic() + 9
    while not (keys := store.list_keys()) and time.monotonic() < end:
        time.sleep(0.01)
    return store, keys


def first(where: str, answers: "queue.Queue[dist.Store | str]") -> None:
    try:
        answers.put(rendezvous._store(where, 0, 2, "secret-token", timedelta(seconds=20)))
    except RendezvousError as error:
        answers.put(str(error))


@pytest.mark.parametrize("knows", [True, False], ids=["a rank", "a stranger"])
def test_only_who_knows_the_token_counts_as_a_rank_and_the_store_does_not_tell_it(
    taken: list[int], knows: bool
) -> None:
    where, answers = f"tcp://{LOOPBACK}:{taken[1]}", queue.Queue[dist.Store | str]()
    thread = threading.Thread(target=first, args=(where, answers))
    thread.start()
    store, (here,) = peek(taken[1])
    prefix, _, name = here.rpartition("/")
    assert name == rendezvous.HERE
    if knows:
        rendezvous._store(where, 1, 2, "secret-token", timedelta(seconds=20))
    else:
        with pytest.raises(RendezvousError, match="within 1 s"):
            rendezvous._store(where, 1, 2, "another-token", SHORT)
        store.set(f"{prefix}/rank 1", "nonce proof")
    told = answers.get(timeout=30)
    thread.join()
    if isinstance(told, str):
        assert (knows, told) == (False, "a process without the run's token came as rank 1")
    else:
        assert knows
        texts = [*(keys := store.list_keys()), *(store.get(key).decode() for key in keys)]
        assert not any("secret" in text for text in texts)


def test_a_stranger_in_the_place_of_the_first_rank_is_not_met() -> None:
    store = dist.HashStore()
    store.set(rendezvous.HERE, "nonce")
    store.set("answer 1", "proof")
    with pytest.raises(RendezvousError, match="came as rank 0"):
        rendezvous._prove(store, 1, "secret-token")
