"""A system's file: what it may say, and what is told where it is wrong."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from impl.errors import InputError
from impl.simulator.constants import CONSTANTS
from impl.simulator.surface import Surface
from impl.simulator.system import Calibration, System
from tests.impl.simulator.made_up import DOCUMENT, SYSTEM, number, with_constants


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    *above, last = path.split(".")
    place = document
    for name in above:
        place = place[name]
    place[last] = value
    return document


def test_a_system_is_written_and_read_back():
    system = replace(
        with_constants(SYSTEM, gemm_efficiency=0.7),
        calibration=Calibration(stack="made up", rows=["a"], held_out=[], mape=1.0, worst=2.0, interval=(0.9, 1.1)),
    )
    again = System.from_dict(system.as_dict())
    assert again == system
    assert again.constant("gemm_efficiency") == 0.7
    assert again.device.memory_bandwidth.source == "made up"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("device.memory_bandwidth", number(-1.0), "device.memory_bandwidth.value '-1.0': Input should be greater"),
        ("device.kind", "tpu", "device.kind 'tpu': Input should be 'cuda' or 'cpu'"),
        ("node.size", number(2.5), "node.size.value '2.5': Input should be a valid integer"),
        ("node.nics", 4, "node.nics '4': valid: its value and source, as {value: 8"),
        ("constants", {"gemm_eficiency": number(1.0)}, "gemm_eficiency is no constant; valid: gemm_efficiency"),
        ("constants", {"link_efficiency": {"value": 0.0}}, "link_efficiency 0; valid: 1e-09 to 1e+18"),
        ("constants", {"host_exponent": {"value": 0.5}}, "host_exponent 0.5; valid: 1 to 1e+18"),
        ("constants", {"overlap": {"value": 1.5}}, "overlap 1.5; valid: 0 to 1"),
        ("colour", "red", "system field colour does not exist"),
        (
            "node",
            {"nic_bandwith": number(8.0)},
            "system field node.nic_bandwith does not exist; did you mean nic_bandwidth?",
        ),
        ("node", {"size": number(8)}, "system field node.nics: Field required"),
        ("device.peak_flops", {"fp4": number(1.0)}, "device.peak_flops.fp4"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(path: str, value: Any, told: str):
    with pytest.raises(InputError) as error:
        System.from_dict(changed(path, value))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_constants_that_a_file_does_not_name_have_their_prior():
    assert SYSTEM.constant("nic_efficiency") == CONSTANTS["nic_efficiency"].value
    assert SYSTEM.all_constants.keys() == CONSTANTS.keys()


@pytest.mark.parametrize("is_grid", [True, False])
def test_a_surface_is_exact_at_its_points_and_smooth_between(is_grid: bool):
    axes = [64.0, 256.0, 1024.0]
    places = np.array([[m, n] for m in axes for n in axes])
    places = places if is_grid else places[:-1]
    logs = np.log(places[:, 0] * places[:, 1] ** 0.5)
    surface = Surface(places)
    assert surface.at(logs, (256.0, 64.0)) == pytest.approx(256 * 8, rel=1e-6)
    assert surface.at(logs, (512.0, 64.0)) == pytest.approx(512 * 8, rel=1e-6 if is_grid else 0.3)
    many = surface.at(logs, (np.array([256.0, 512.0]), 64.0))
    assert many[1] == pytest.approx(surface.at(logs, (512.0, 64.0)))
    sizes = np.geomspace(32, 2048, 400)
    values = np.log(surface.at(logs, (sizes, 100.0)))
    assert np.abs(np.diff(values)).max() < 0.1
