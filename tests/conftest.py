"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.turned import pytest_addoption, pytest_collection_finish, pytest_sessionfinish, pytest_testnodedown

if TYPE_CHECKING:  # many tests need no torch, whose import takes longer than they do
    import torch.distributed as dist

    from harness.predict.kinds import Errors
    from harness.records.store import Store
    from impl.simulator.system import System
    from impl.tensor_parallel.group import TensorParallel
    from tests.fake_cuda import Driver

__all__ = ["pytest_addoption", "pytest_collection_finish", "pytest_sessionfinish", "pytest_testnodedown"]
"""Hooks of `--every-claim`."""
gc.disable()  # until all tests are collected: what they import is never garbage
# machines that run tests are shared: time is not a fault
settings.register_profile("any time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any time")
# ignored where tests run in the background, and programs that tests start and interrupt would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


ROOMS = (
    "launch", "rank", "cli", "harness", "tune", "predict", "doctor", "calibrate", "report", "experiment", "records",
    "analysis", "figures",
)  # fmt: skip
"""Folders of the harness's tests."""
LONG = (
    "tests/slurm/", "tests/test_quickstart.py", "tests/impl/test_parity.py", "tests/notebooks/",
    *(f"tests/{room}/" for room in ROOMS), "tests/test_documents.py",
    "tests/test_committed_verdicts.py",
)  # fmt: skip
"""Whose tests take long, or wait much: they go first, so that none runs alone at the end."""


APART = "tests/test_results.py"
"""Whose tests each run by themselves; those of any other file stay together in one process."""
WITH = {"tests/test_committed_verdicts.py": "tests/test_documents.py"}
"""Files whose tests stay with those of another, as both read all records."""
ERRORS: dict[str, Errors] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*LONG, ""]
    items.sort(key=lambda item: next(i for i, folder in enumerate(order) if item.nodeid.startswith(folder)))
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What pytest-xdist's `loadgroup` is for; pytest 9.2 does without the names by which it knows its groups."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file == APART else WITH.get(file, file)

    return ByFile(config, log)


@pytest.fixture(autouse=True, scope="session")
def folders_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Test processes, and commands that they start, do not wait for those of others, nor find what others kept."""
    for name in ("turns", "cache"):
        os.environ[f"LMSCALE_{name.upper()}"] = str(tmp_path_factory.mktemp(name))


@pytest.fixture(autouse=True)
def no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of the test process find no committed records, unless a test names their folder."""
    monkeypatch.setattr("harness.experiment.folders.ARCHIVE", Path("/nowhere/results"))


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress() -> Iterator[None]:
    """What commands of the test process write on standard error does not depend on how long they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.terminal.LINE_SECONDS", 3600)
        yield


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of tokens, which no test changes."""
    from tests.harness.small_runs import write_tokens

    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    from harness.records.store import Store

    return Store(tmp_path, "made_up", "smoke")


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks of this machine are forked with PyTorch imported: for tests of what training leaves."""
    from tests.harness.forked_ranks import fork_ranks

    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        yield


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone, which computes by one thread, as ranks do."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Tensors in the host's memory are on a GPU, as far as this process asks `impl.device.Device`."""
    from tests.fake_cuda import fake_cuda

    with fake_cuda(monkeypatch) as driver:
        yield driver


@pytest.fixture(scope="module")
def serial(one_rank: dist.ProcessGroup) -> TensorParallel:
    """What serial training is: tensor parallelism of degree 1."""
    from impl.tensor_parallel.group import TensorParallel

    return TensorParallel(one_rank, sequence_parallel=False, overlap=True)


@pytest.fixture
def errors_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each system, whose published steps every search predicts."""
    from harness.predict.kinds import errors_by_kind

    def found(system: System) -> Errors:
        if system.name not in ERRORS:
            ERRORS[system.name] = errors_by_kind(system)
        return ERRORS[system.name]

    monkeypatch.setattr("harness.tune.tune.errors_by_kind", found)
