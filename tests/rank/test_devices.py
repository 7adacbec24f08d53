"""Which GPUs ranks may use: those that PyTorch sees, and of a machine with other users only one's own."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.cli.sweeps import site_of
from harness.doctor import rank as doctor_rank
from harness.doctor.measuring import orders
from harness.doctor.report import Rank
from harness.launch.flags import Place
from harness.launch.slurm import Site
from harness.predict import memory as memory_verb
from harness.rank import devices, jobs
from harness.rank.devices import gpu_count, restricted_to, visible_gpus
from harness.rank.rendezvous import join
from impl.device import Cuda
from impl.errors import InputError
from impl.run import Run
from tests.harness.calls import refused
from tests.harness.made_up_orders import made_up
from tests.harness.small_runs import small, wait_until

UUIDS = [f"GPU-{n}a5f5c9e-0000-4000-8000-00000000000{n}" for n in range(8)]
MIG = "MIG-11111111-0000-4000-8000-000000000000"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this a machine whose driver shows GPUs to a build of PyTorch, under these variables."""
    dev = tmp_path / "dev"
    dev.mkdir()

    def make(gpus: int = 8, *, nodes: int = 8, build: str | None = "cuda", **variables: str) -> None:
        for n in range(nodes):
            (dev / ("kfd" if build == "hip" else f"nvidia{n}")).touch()
        monkeypatch.setattr(devices, "DEV", dev)
        monkeypatch.setattr(torch.version, "hip", "6.4" if build == "hip" else None)
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: build is not None)
        monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS[:gpus])
        monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: gpus)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)  # which is asked about MIG
        for name in (devices.CUDA, devices.HIP, devices.ROCR):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
        devices._visible.cache_clear()
        memory_verb.gpu_memory.cache_clear()

    yield make
    devices._visible.cache_clear()
    memory_verb.gpu_memory.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "seen"),
    [
        (None, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ("", []),
        ("-1", []),
        ("5,6", ["5", "6"]),
        (" 6 , 5 ", ["6", "5"]),
        ("5,-1,6", ["5"]),
        ("5,9,6", ["5"]),
        ("5,5", []),
        (f"{UUIDS[5]},{UUIDS[2]}", [UUIDS[5], UUIDS[2]]),
        ("GPU-5a5f,GPU-2a5f", ["GPU-5a5f", "GPU-2a5f"]),
        ("GPU-nothing", []),
        (f"{MIG},MIG-2", [MIG]),
    ],
)
def test_gpus_are_those_that_the_variable_leaves(
    machine: Callable[..., None], cuda: str | None, seen: list[str]
) -> None:
    machine(**{} if cuda is None else {"CUDA": cuda})
    assert list(visible_gpus()) == seen
    assert gpu_count() == len(seen)
    assert site_of(Place(), [Run()]).device == ("cuda" if seen else "cpu")


def test_a_change_of_the_variable_is_seen(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(CUDA="5,6")
    assert visible_gpus() == ("5", "6")
    monkeypatch.setenv(devices.CUDA, "7")
    assert visible_gpus() == ("7",)


def test_device_files_without_what_drives_them_are_no_gpus(machine: Callable[..., None]) -> None:
    machine(build=None)
    assert visible_gpus() == (), "a CPU build of PyTorch"
    machine(gpus=2)
    assert visible_gpus() == ("0", "1"), "a container that was given two of eight"
    reason = Site(device="cuda").why_invalid(3)
    assert reason is not None
    assert "3 GPUs, PyTorch sees 2 here" in reason


@pytest.mark.parametrize(
    ("build", "variables", "seen"),
    [
        ("hip", {}, "0 1 2 3 4 5 6 7"),
        ("hip", {"HIP": "5,6"}, "5 6"),
        ("hip", {"HIP": "5,6", "CUDA": "1"}, "5 6"),
        ("hip", {"CUDA": "3"}, "3"),
        ("hip", {"ROCR": "5,6"}, "0 1"),
        ("hip", {"ROCR": "5,6", "HIP": "1"}, "1"),
        ("cuda", {"HIP": "3", "CUDA": "5,6"}, "5 6"),
    ],
)
def test_gpus_of_amd_have_variables_of_their_own(
    machine: Callable[..., None], build: str, variables: dict[str, str], seen: str
) -> None:
    machine(build=build, **variables)
    assert list(visible_gpus()) == seen.split()
    limited = restricted_to(["6"])
    assert limited == {"CUDA_VISIBLE_DEVICES": "6"} | ({"HIP_VISIBLE_DEVICES": "6"} if "HIP" in variables else {})


def test_without_device_files_pytorch_is_not_imported() -> None:
    program = "import sys\nfrom harness.rank import devices\nfrom pathlib import Path\n"
    program += (
        "devices.DEV = Path('/nonexistent')\nassert devices.gpu_count() == 0\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "indices"),
    [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])],
    ids=["all are seen", "one is bound to each", "two are bound to each"],
)
def test_a_rank_takes_the_gpu_of_its_number_among_those_it_sees(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, indices: list[int]
) -> None:
    machine(gpus=gpus)
    taken: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append((device.index, "set")))
    met = lambda backend, *_, device_id, **__: taken.append((device_id.index, backend))
    monkeypatch.setattr("torch.distributed.init_process_group", met)
    named = lambda device: SimpleNamespace(name=f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", named)
    for local_rank, index in enumerate(indices):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        place = f"file://{tmp_path}/rendezvous-{local_rank}"
        assert join(made_up(device="cuda"), local_rank, local_rank, 4, place)[0] == torch.device("cuda", index)
        assert taken[-2:] == [(index, "set"), (index, "nccl")], "bound before its groups are made"
        assert devices.os.environ["LOCAL_RANK"] == str(index), "what DeepSpeed reads"
        assert doctor_rank.host_report(Rank(tmp_path, 0, local_rank, 4, place), "cuda").device == f"GPU {index}"


def test_a_rank_that_sees_no_gpu_says_so(machine: Callable[..., None]) -> None:
    machine(CUDA="")
    with pytest.raises(InputError, match=r"sees no GPU here \(CUDA_VISIBLE_DEVICES=''\)"):
        Cuda.of_rank(0)
    report = doctor_rank.host_report(Rank(Path(), 0, 0, 1, ""), "cuda")
    assert (report.device, report.backend) == ("none", "nccl")


def test_evaluate_needs_a_gpu_if_it_is_told_to_take_one(machine: Callable[..., None]) -> None:
    machine(build=None)
    words = "evaluate --checkpoint nowhere --data nowhere --lambada nowhere --device cuda"
    assert "--device cuda: PyTorch sees no GPU here; valid: cpu" in refused(*words.split())


def seen_by_ranks(attempt: Path, ranks: int) -> list[dict[str, str]]:
    files = [attempt / f"rank-{rank}.seen.json" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def test_local_ranks_see_gpus_of_the_user_and_share_them_only_if_they_must(
    machine: Callable[..., None], tmp_path: Path
) -> None:
    tries: list[Path] = []

    def start(ranks: int, device: str = "cuda") -> list[dict[str, str]]:
        site = Site(device="cuda" if device == "cuda" else "cpu")
        attempt = tmp_path / "attempts" / f"try-{len(tries)}"
        attempt.mkdir(parents=True)
        tries.append(attempt)
        orders(small(tmp_path, dp=ranks), site, 60.0, "tests.harness.gpu_rank").write(attempt)
        site.submit([attempt], ranks, 60.0)
        return seen_by_ranks(attempt, ranks)

    machine(CUDA=f"{UUIDS[5]},{UUIDS[6]},{UUIDS[7]}")
    try:
        assert start(1) == [{"CUDA_VISIBLE_DEVICES": UUIDS[5]}]
        assert start(2) == [{"CUDA_VISIBLE_DEVICES": f"{UUIDS[6]},{UUIDS[7]}"}] * 2
        assert start(1, "cpu") == [{"CUDA_VISIBLE_DEVICES": ""}]
        assert start(2) == [{"CUDA_VISIBLE_DEVICES": f"{UUIDS[5]},{UUIDS[6]}"}] * 2, "no three are free"
        jobs.cancel(tries[1:2])
        assert start(2) == [{"CUDA_VISIBLE_DEVICES": f"{UUIDS[7]},{UUIDS[6]}"}] * 2, "those of the second are free"
    finally:
        jobs.cancel(tries)


# Their memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "gib"),
    [
        ({}, 16),
        ({"CUDA": "5,6"}, 16),
        ({"CUDA": "5,6", "order": "PCI_BUS_ID"}, 80),
        ({"CUDA": "4", "order": "PCI_BUS_ID"}, 16),
        ({"CUDA": UUIDS[4]}, 16),
        ({"CUDA": f"{UUIDS[5]},GPU-6a5f"}, 80),
        ({"CUDA": MIG}, None),
        ({"CUDA": ""}, None),
    ],
)
def test_memory_is_of_the_smallest_gpu_that_may_be_used(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gib: int | None
) -> None:
    """The fifth GPU is smaller than the others; CUDA numbers them as nvidia-smi does if it is told to."""
    rows = "".join(f"{n}, {uuid}, {16384 if n == 4 else 81920}\n" for n, uuid in enumerate(UUIDS))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=rows))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if "order" in variables:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", variables["order"])
    machine(**{name: value for name, value in variables.items() if name != "order"})
    assert memory_verb.gpu_memory() == (None if gib is None else gib * 2**30)
    memory_verb.gpu_memory.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="N/A"))
    assert memory_verb.gpu_memory() is None
