"""What `make accuracy` compares: rows that are there, none of them fitted and asked for at once."""

import dataclasses

import numpy as np
import pytest

from harness.experiment.experiment import load
from harness.predict.accuracy import _printed_memory, choices, figure, plans_table
from harness.predict.fit import Measured, fit, percent_off, seconds_of
from harness.predict.held_out import (
    CASES,
    H100,
    NVIDIA,
    STEPS,
    Case,
    Result,
    Rows,
    on_priors,
    plain_nvidia,
    result_of,
    rows_of,
    splits,
    with_priors,
)  # fmt: skip
from harness.predict.simulation import Done, predicted, simulated
from harness.predict.systems import load_system
from impl.simulator.system import System
from tests.impl.simulator.made_up import DOCUMENT, SYSTEM, number, run_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id} {case.what}")
def test_rows_that_are_fitted_are_not_asked_for(case: Case):
    asked, fitted = case.asked.read(case.system), case.fitted.read(case.system)
    assert asked
    assert fitted
    assert not {row.name for row in asked} & {row.name for row in fitted}


def test_the_hold_out_plan_is_kept():
    rows = rows_of("ptdp2021_table1", "selene")
    assert [row.cells["name"] for row in rows if row.split == "calibrate"] == ["gpt-1.7b", "gpt-18.4b", "gpt-145.6b"]
    measured = rows_of("vtrain2024", "a100_cluster")
    for split, least, most, count in (("calibrate", 1, 8, 64), ("calibrate", 9, 512, 32), ("check", 1, 8, 400)):
        assert sum(row.split == split and least <= row.cells["gpus"] <= most for row in measured) == count
    assert len(measured) == 516


def test_every_file_of_steps_is_described_and_used():
    described = (STEPS / "README.md").read_text()
    for path in STEPS.glob("*.csv"):
        assert f"`{path.name}`" in described
        assert path.stem in {case.asked.file for case in CASES} | {H100.file, NVIDIA.file}


def test_steps_on_h100s_are_predicted_by_priors_better_than_by_a_utilization_fitted_to_them():
    found = on_priors("h100")
    assert load_system("h100").calibration is None
    assert len(found.rows) == 12
    assert {row.run.model.mlp for row in found.rows} == {"gelu", "squared_relu", "swiglu"}
    assert abs(found.off).mean() < 0.6 * abs(percent_off(found.baseline, found.measured)).mean()


def test_nvidias_steps_are_predicted_by_priors_better_than_by_a_utilization_fitted_to_them():
    """Eight bits, split products and parameters gathered ahead are laws without a constant of their own."""
    found = on_priors("dgx_h100")
    assert {row.run.precision for row in found.rows} == {"bf16", "fp8"}
    assert abs(found.off).mean() < 0.5 * abs(percent_off(found.baseline, found.measured)).mean()
    assert plain_nvidia() > 1.5 * abs(found.off).mean()


def test_derived_seconds_are_the_printed_rates():
    """PTD-P's equation 3, where the paper prints TFLOP/s: 137 of a 1.7B model, 163 of 1T."""
    rows = {row.cells["name"]: row for row in rows_of("ptdp2021_table1", "selene")}
    for name, rate in (("gpt-1.7b", 137), ("gpt-1008b", 163)):
        row = rows[name]
        c = {key: row.cells[key] for key in ("global_batch", "seq_len", "layers", "hidden", "gpus")}
        h, s = c["hidden"], c["seq_len"]
        flops = 96 * c["global_batch"] * s * c["layers"] * h**2 * (1 + s / (6 * h) + 51200 / (16 * c["layers"] * h))
        assert row.measured is not None
        assert flops / c["gpus"] / row.measured.seconds == pytest.approx(rate * 1e12, rel=1e-3)


def test_table_1_is_predicted_from_three_of_its_rows():
    found = result_of(CASES[0])
    off = abs(100 * (found.predicted / found.measured - 1))
    assert off.mean() <= 2.0
    assert off.max() <= 5.0
    assert splits().mean() <= 2.8


def test_heads_that_are_not_aligned_are_predicted_from_other_sizes_and_not_without_the_law():
    (case,) = (case for case in CASES if case.id == "BLOOM")
    assert abs(result_of(case).off).max() <= 12.0
    system = load_system(case.system)
    tensor_cores = system.device.peak_flops | {"fp32": system.device.peak_flops["fp16"]}
    without = dataclasses.replace(system, device=dataclasses.replace(system.device, peak_flops=tensor_cores))
    rows = case.asked.read(case.system)
    off = percent_off(seconds_of(rows, fit(case.fitted.read(case.system), without)), result_of(case).measured)
    assert off.max() <= -15.0, "too fast in every row"


def test_broadcasts_of_whole_tensors_are_what_wide_data_parallelism_costs():
    """InternEvo's ZeRO-1 over 1,024 GPUs, by priors."""
    system = with_priors(load_system("internevo"))
    plain = dataclasses.replace(system, habits=dataclasses.replace(system.habits, owns_tensors=False))
    rows = [row for row in Rows("internevo2023").read("internevo") if row.name == "7B/1024/tp1/all/4x2"]
    off = [float(percent_off(seconds_of(rows, one), np.array([rows[0].seconds]))[0]) for one in (system, plain)]
    assert abs(off[0]) < 15
    assert off[1] < -40


def test_the_law_of_heads_holds_where_it_was_not_written_for():
    """ZeRO's figure 2: 1.5B parameters, 16 heads of 100 on V100s, by priors alone; 44 and 54 TFLOP/s without it."""
    runs = [run for run in load("zero2019/zero_throughput").runs["paper"] if run.model.hidden_size == 1600]
    system = load_system("dgx2h")
    rates = {run.plan.tp: predicted(simulated(run, (), system).done, system).model_flops_per_gpu_s for run in runs}
    assert rates == pytest.approx({1: 30.3e12, 2: 26.3e12}, rel=0.1)


def test_memory_with_the_framework_is_what_trials_printed_and_without_it_is_less():
    assert _printed_memory()["mape"] < 8.0
    rows = [row for row in rows_of("bloom2022", "jean_zay") if row.cells["memory_gb"]]
    system = load_system("jean_zay")
    for row in rows:
        assert row.asked is not None
        tensors = max(one.total for one in predicted(row.asked.done, system).memory)
        assert tensors < row.cells["memory_gb"] * 1e9
        assert predicted(row.asked.done, system).fits, "it ran"


def test_a_framework_takes_its_part_of_a_device():
    run, least = run_of(tp=2), predicted(Done(run_of(tp=2)), SYSTEM).memory[0].total

    def fits(room: float, framework: float) -> bool | None:
        part = number(framework) if framework else None
        device = DOCUMENT["device"] | {"memory_bytes": number(room), "framework_bytes": part}
        return predicted(Done(run), System.from_dict({**DOCUMENT, "device": device})).fits

    assert [fits(least, 0.0), fits(least, 1.0), fits(least + 1.0, 1.0)] == [True, False, True]


def measured(*seconds: float) -> list[Measured]:
    """Steps of plans that share four devices in different ways."""
    return [Measured(str(i), Done(run_of(dp=2**i, tp=4 // 2**i)), one) for i, one in enumerate(seconds)]


def test_the_best_plan_of_a_group():
    rows = measured(2.0, 1.0, 1.5)
    assert choices(rows, [3.0, 1.0, 2.0]) == (1, 1.0, 0.0)
    assert choices(rows, [3.0, 2.0, 1.0]) == (1, 0.0, 0.5)
    assert choices(rows, [1.0, 1.0, 1.0]) == (1, pytest.approx(1 / 3), pytest.approx(0.5))


def test_tables_and_figure_are_made_of_results():
    case = next(case for case in CASES if case.id == "H5")
    result = Result(case, measured(2.0, 1.0), np.array([2.1, 1.0]), np.array([1.0, 1.1]))
    frame = plans_table([result]).frame
    assert (frame["best"].tolist(), frame["regret"].tolist()) == ([100.0, 0.0], [0.0, 100.0])
    assert len(figure([result]).axes) == 2
    assert result.measured.sum() == pytest.approx(3.0)
