"""Device peaks: what the papers' own fractions of peak imply, and no fallback."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.cost.peaks import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "rate", "share"),
    [
        ("Tesla V100-SXM3-32GB-H", "fp16", 39e12, 0.30),  # Megatron-LM 2019, section 5.1
        ("NVIDIA A100-SXM4-80GB", "fp16", 163e12, 0.52),  # PTD-P, section 1
        ("AMD Instinct MI250X", "fp16", 73.5e12, 0.3838),  # Frontier, abstract
    ],
)
def test_published_share_of_peak(device: str, precision: str, rate: float, share: float):
    peak = peak_flops(device, precision)
    assert peak is not None
    assert rate / peak == pytest.approx(share, abs=0.005)


def test_every_peak_has_a_source_and_is_in_flops_per_second():
    for device, peak in PEAKS.items():
        assert peak.source, device
        assert all(1e13 < value < 1e16 for value in peak.flops.values()), device


@given(st.text() | st.sampled_from(("cpu", "NVIDIA A100", "nvidia h200", "NVIDIA H200 NVL", "NVIDIA B200")))
def test_an_unknown_device_has_no_peak(device: str):
    assert device in PEAKS or peak_flops(device, "bf16") is None
    assert peak_flops("Tesla V100-SXM3-32GB", "bf16") is None, "a precision without a published peak"
