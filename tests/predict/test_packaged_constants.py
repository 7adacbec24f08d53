"""Packaged systems: their numbers are those that their rows give, and are written without touching anything else."""

import pytest

from harness.predict.systems import load_system, path_of
from tests.packaged_constants import fitted_again, written

FEW_ROWS = ("frontier", "internevo", "selene", "selene_2022", "selene_deepspeed")
"""Systems whose constants are fitted within seconds."""


@pytest.mark.parametrize("name", FEW_ROWS)
def test_packaged_constants_are_those_of_todays_laws(name: str) -> None:
    found, packaged = fitted_again(name), load_system(name)
    for constant, one in packaged.all_constants.items():
        assert found.constant(constant) == pytest.approx(one.value, rel=0.002), constant
    assert found.calibration is not None
    assert packaged.calibration is not None
    for measure in ("mape", "worst", "constant_mfu_mape", "interval"):
        assert getattr(found.calibration, measure) == pytest.approx(getattr(packaged.calibration, measure), rel=0.02)


@pytest.mark.parametrize("name", ["a100_cluster", "dgx_h100", *FEW_ROWS])
def test_a_file_says_what_is_written_into_it(name: str) -> None:
    text = path_of(name).read_text()
    assert written(text, load_system(name)) == text
    changed = load_system(name)
    assert written(text.replace("mape: ", "mape: 1", 1), changed) == text


def test_a_file_without_a_place_for_a_number_is_refused() -> None:
    text = path_of("selene").read_text().replace("  mape:", "  error:")
    with pytest.raises(ValueError, match="0 lines begin with '  mape: '"):
        written(text, load_system("selene"))
