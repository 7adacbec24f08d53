"""Peak matrix-multiplication rates of known devices."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense peak in FLOP/s by precision, and who says so."""

    flops: Mapping[str, float]
    source: str


_V100 = "ZeRO, Rajbhandari et al. 2019 (1910.02054), section 10: DGX-2"
_V100_H = "Megatron-LM, Shoeybi et al. 2019 (1909.08053), section 5.1: 39 TFLOP/s are 30% of a DGX-2H GPU's peak"
_A100 = "PTD-P, Narayanan et al. 2021 (2104.04473), section 5"
_H100 = "ml-engineering (github.com/stas00/ml-engineering), accelerator tables: SXM5, without sparsity"
_H200 = "ml-engineering (github.com/stas00/ml-engineering), accelerator tables: SXM, without sparsity"
_GCD = "Frontier, Dash et al. 2023 (2312.12705); OLCF user guide. One GCD, half a package, is one device"

PEAKS: dict[str, Peak] = {
    "Tesla V100-SXM3-32GB": Peak(flops={"fp16": 125e12}, source=_V100),
    "Tesla V100-SXM3-32GB-H": Peak(flops={"fp16": 130e12}, source=_V100_H),
    "NVIDIA A100-SXM4-40GB": Peak(flops={"fp16": 312e12, "bf16": 312e12}, source=_A100),
    "NVIDIA A100-SXM4-80GB": Peak(flops={"fp16": 312e12, "bf16": 312e12}, source=_A100),
    "NVIDIA H100 80GB HBM3": Peak(flops={"fp16": 989e12, "bf16": 989e12}, source=_H100),
    "NVIDIA H100 96GB HBM2e": Peak(flops={"fp16": 989e12, "bf16": 989e12}, source=_H100),
    "NVIDIA H200": Peak(flops={"fp16": 989e12, "bf16": 989e12}, source=_H200),
    "AMD Instinct MI250X": Peak(flops={"fp16": 191.5e12, "bf16": 191.5e12}, source=_GCD),
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the dense peak FLOP/s of a device, named as `torch.cuda.get_device_name` does; None if not known."""
    peak = PEAKS.get(device)
    return None if peak is None else peak.flops.get(precision)
