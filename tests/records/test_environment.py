"""What a record says of the code and the machine that measured."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from harness.records import environment
from harness.records.environment import git_state, host_environment, keep_changes, network


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, taken for the code that measures."""
    folder = tmp_path / "code"
    (folder / "results").mkdir(parents=True)
    (folder / "model.py").write_text("layers = 2\n")
    told = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*told, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    monkeypatch.setattr(environment, "CODE", folder)
    return folder


def test_the_difference_that_a_record_names_is_kept(code: Path, tmp_path: Path) -> None:
    (code / "model.py").write_text("layers = 3\n")
    (code / "new.py").write_text("")
    stamped = host_environment([])
    assert stamped["git"]["dirty"]
    keep_changes(tmp_path / "changes", stamped)
    (kept,) = (tmp_path / "changes").iterdir()
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == kept.stem == stamped["git"]["diff_sha256"]
    assert "-layers = 2\n+layers = 3" in kept.read_text()
    assert "?? new.py" in kept.read_text()


def test_nothing_is_kept_of_other_changes_than_those_that_measured(code: Path, tmp_path: Path) -> None:
    keep_changes(tmp_path / "changes", host_environment([]))
    (code / "results" / "record.json").write_text("{}")
    assert git_state(code) == {**(git_state(code) or {}), "dirty": False, "diff_sha256": None}
    (code / "model.py").write_text("layers = 3\n")
    stamped = host_environment([])
    (code / "model.py").write_text("layers = 4\n")
    keep_changes(tmp_path / "changes", stamped)
    keep_changes(tmp_path / "changes", {"git": None})
    assert not (tmp_path / "changes").exists()


def test_the_host_is_told_apart_but_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []
    for name in ("node-a", "node-b"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        hosts.append(host_environment([])["host"])
        assert name not in str(host_environment([]))
    assert len(set(hosts)) == 2


def test_interfaces_that_are_down_and_the_loopback_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stats:
        def __init__(self, speed: int, *, isup: bool = True) -> None:
            self.speed, self.isup = speed, isup

    found = {"lo": Stats(0), "eth0": Stats(25_000), "eth1": Stats(0, isup=False), "veth": Stats(0)}
    monkeypatch.setattr("psutil.net_if_stats", lambda: found)
    told = network()
    assert {name: told[name] for name in told if "port" not in name} == {"eth0": "25000 Mb/s", "veth": "speed unknown"}
