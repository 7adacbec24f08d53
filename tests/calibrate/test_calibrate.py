"""What a machine measures becomes a system that predicts it again; and two ranks measure for real, in small."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.calibrate import calibrate, rank
from harness.calibrate import runs as calibrate_runs
from harness.calibrate.calibrate import text_of
from harness.calibrate.runs import runs_to_train
from harness.calibrate.system import ROW_SD, Measurements, described, system_of, undisturbed
from harness.doctor import rank as doctor_rank
from harness.doctor.report import Rank, Report, report_of
from harness.predict.fit import Measured
from harness.predict.simulation import Done
from harness.predict.systems import load_system
from harness.rank.json_files import read_as
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.step import step_seconds
from impl.simulator.system import AttentionTable, Elementwise, Four, GemmTable, System, Two
from tests.harness.calls import call, refused
from tests.impl.simulator.made_up import with_constants
from tests.ranks import run_ranks

FLOPS, BANDWIDTH, LINK = 1e11, 1e10, 2e9
OTHER = Run(
    model=ModelConfig(num_layers=3, hidden_size=192, num_heads=6, seq_len=192),
    plan=Plan(pp=2),
    train=Recipe(global_batch=12, microbatch=2),
)


def measured(ranks: int, true: System | None = None, **machine: Any) -> Measurements:
    """What ranks of a machine without surprises measure; steps as a system says, or of a second each."""
    edges = itertools.product((64, 1024), repeat=3)
    rows: list[Four] = [(m, n, k, 2 * m * n * k / FLOPS + 1e-6) for m, n, k in edges]
    curve: list[Two] = [(size, 1e-4 + size / LINK) for size in (2**8, 2**16, 2**24)]
    runs = runs_to_train(ranks, "cpu", ["fp32"], 1)
    seconds = lambda run: step_seconds(run, run.model.vocabulary(257), true) if true else 1.0
    made_up = {"source": "made up", "stack": "none", "hardware": "made up", "kind": "cpu", "memory_bytes": 2**33}
    return Measurements(
        **made_up | machine,
        ranks=ranks,
        gemm=[GemmTable("fp32", "made up", rows, pass_) for pass_ in rank.PASSES],
        attention=[AttentionTable("fp32", "made up", [(4, 4, 128, 64, 1e-3, 2e-3), (2, 2, 512, 64, 2e-3, 4e-3)])],
        elementwise=[Elementwise("fp32", "gelu", 5e9, 4e9, "made up")],
        added=[(2**12, 1e-6), (2**24, 2**24 / BANDWIDTH)],
        updated=10**6,
        update_seconds=5e-3,
        tensor_seconds=1e-5,
        collectives=dict.fromkeys(rank.OPS, curve) if ranks > 1 else {},
        overlap=0.0 if ranks > 1 else 1.0,
        trained=[Measured(label, Done(run), seconds(run)) for label, run in runs.items()],
    )


def test_runs_use_every_axis_and_are_possible() -> None:
    for ranks, device in itertools.product((1, 2, 3, 4, 8), ("cpu", "cuda")):
        runs = runs_to_train(ranks, device, ["fp32", "bf16"], 1)
        assert all(not run.problems() and run.plan.world_size == ranks for run in runs.values())
        assert len({run.id for run in runs.values()}) == len(runs)
        used = {axis for run in runs.values() for axis in ("dp", "tp", "pp") if getattr(run.plan, axis) > 1}
        assert used == (set() if ranks == 1 else {"dp", "pp"} if ranks == 3 else {"dp", "tp", "pp"})


def test_constants_are_found_again() -> None:
    plain = described(measured(2), "made_up")
    true = with_constants(plain, host_forward=1e-3, host_backward=2e-3, host_collective=4e-4, step_seconds=8e-3)
    found = system_of(measured(2, true), "made_up")
    assert found.calibration is not None
    assert found.calibration.mape < 5
    assert step_seconds(OTHER, 257, found) == pytest.approx(step_seconds(OTHER, 257, true), rel=0.02)


def test_a_file_describes_the_same_system(tmp_path: Path) -> None:
    found = system_of(measured(1), "made_up")
    (tmp_path / "made_up.yaml").write_text(text_of(found, "calibrate"))
    assert load_system(str(tmp_path / "made_up.yaml")).as_dict() == found.as_dict()
    assert found.collectives == []
    assert found.row_sd == ROW_SD, "what the fit took as the scatter of a step is what predictions take"


def test_what_was_disturbed_is_no_slower_than_a_larger_one() -> None:
    found = undisturbed([(2**8, 4e-3), (2**16, 2e-4), (2**24, 9e-3)])
    assert found == [(2**8, 2e-4), (2**16, 2e-4), (2**24, 9e-3)]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "here.yaml")
    assert "ends in .yaml" in refused("calibrate", "--out", str(tmp_path / "here"))
    assert "does not exist" in refused("calibrate", "--out", str(tmp_path / "nowhere" / "here.yaml"))
    assert "--ranks 0" in refused("calibrate", "--out", out, "--ranks", "0")
    assert "--threads 0" in refused("calibrate", "--out", out, "--threads", "0")
    assert "--wait" in refused("calibrate", "--out", out, "--wait", "-1")
    assert "one of each" in refused("calibrate", "--out", out, "--precision", "fp32", "fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "device", "ranks"), [(0, "auto", 2), (8, "auto", 8), (8, "cuda", 8), (8, "cpu", 2)])
def test_a_rank_for_each_gpu_or_two_on_processors(
    gpus: int, device: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(calibrate, "gpu_count", lambda: gpus)
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: gpus)
    monkeypatch.setattr(calibrate, "_measured", lambda orders, *_, **__: asked.append(orders.ranks))
    assert call("calibrate", "--out", str(tmp_path / "here.yaml"), "--device", device).status == 1
    assert asked == [ranks]


def in_small(folder: str) -> Measurements:
    """What a rank finds where all is tiny, and no two calls are waited for."""
    import torch
    import torch.distributed as dist

    rank.EDGES, rank.SENT = {"cpu": (8, 16)}, {"cpu": (2**8, 2**12)}
    doctor_rank.REPEATS = 1
    rank.CORES = {"cpu": [(1, 2, 8, 4)]}
    rank.MOVED, rank.UPDATED = {"cpu": (2**8, 2**10)}, {"cpu": 2**8}
    rank.LAYER, rank.STEPS = {"cpu": (8, 16)}, {"cpu": (0, 1)}
    tiny = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=8, vocab_size=260)
    calibrate_runs.MODELS, calibrate_runs.HEAD_SIZE = {"cpu": (tiny, tiny)}, {"cpu": 8}
    this = Rank(Path(folder), dist.get_rank(), dist.get_rank(), 2, "")
    return rank.Calibrating(torch.device("cpu"), ["bf16"], 1).run_to_end(this)


def test_two_ranks_measure(tmp_path: Path) -> None:
    found = run_ranks(2, in_small, str(tmp_path))
    reports = [read_as(Report, report_of(tmp_path, rank)) for rank in range(2)]
    assert all(report and report.of == report.done + 1 for report in reports), "the last part was reported"
    assert found[0] == found[1]
    system = described(found[0], "here")
    assert {curve.op for curve in system.collectives} == set(rank.OPS)
    assert [table.precision for table in system.gemm] == ["bf16"] * 3
    assert system.constant("optimizer_tensor") > 0
    assert len(found[0].trained) == len(runs_to_train(2, "cpu", ["bf16"], 1))
