"""The constants that are fitted: few, with a meaning each, a prior value and how far it may be off."""

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED


@dataclass(config=CHECKED | {"frozen": True})
class Constant:
    """A number that a calibration may change."""

    value: NonNegativeFloat
    log_sd: NonNegativeFloat = 0.0
    """Standard deviation of its logarithm before anything is measured; 0: never fitted."""
    source: str = "prior"
    prior: NonNegativeFloat | None = None
    """Its value before it was fitted, from which it is fitted again; None: `value`."""


CONSTANTS: dict[str, Constant] = {
    # share of the peak that a large product reaches
    "gemm_efficiency": Constant(0.88, 0.15),
    # depth by which products are as if they were deeper: tiles are filled and written
    "gemm_fill": Constant(130.0),
    # share of the peak that attention's products reach, nothing masked; those of a fused core at 2,048 tokens
    "attention_efficiency": Constant(0.4, 0.3),
    # tokens by which a causal fused core's sequence is as if longer: blocks that the mask cuts are computed whole
    "attention_fill": Constant(400.0, source="FlashAttention-3 (arXiv 2407.08608), figure 5"),
    # share of the memory bandwidth, or of what they were measured to reach alone, that elementwise operations reach
    "memory_efficiency": Constant(0.65, 0.2),
    # device seconds of an operation beside its work
    "kernel_seconds": Constant(3e-6),
    # host seconds until all of a layer is launched, of its forward pass and of its backward pass without recomputation;
    # of one collective in it at two ranks, and of each doubling; and of a core whose softmax has no fused kernel
    "host_forward": Constant(0.8e-3),
    "host_backward": Constant(1.4e-3),
    "host_collective": Constant(50e-6),
    "host_unfused": Constant(0.0),
    # of the norm that takes host and device seconds of a layer together: their maximum, rounded
    "host_exponent": Constant(6.0),
    # of links within a node and between nodes: share of the bandwidth that a large collective reaches, seconds of a hop
    "link_efficiency": Constant(0.72, 0.2),
    "link_latency": Constant(5e-6),
    "nic_efficiency": Constant(0.70, 0.3),
    # share of that which is left where several groups of a node go out
    "nic_shared": Constant(0.65),
    "nic_latency": Constant(15e-6),
    # of sends between pipeline stages: share of the link or NIC, seconds under way, seconds that both ends wait, and
    # the share of its way that its sender waits for it
    "send_efficiency": Constant(0.55, 0.3),
    "send_latency": Constant(30e-6),
    "send_wait": Constant(0.0),
    "send_blocks": Constant(0.0),
    # share of a collective that can hide behind computing: 1 where it takes nothing from it
    "overlap": Constant(0.9),
    # share of the memory bandwidth that the optimizer reaches, and its seconds a parameter tensor
    "optimizer_efficiency": Constant(0.6),
    "optimizer_tensor": Constant(0.0),
    # bytes/s of a device to its host's memory, and of that memory to an update that is done there
    "host_link": Constant(12e9, 0.0, "ZeRO, Rajbhandari et al. 2019 (1910.02054), section 8: PCIe 3"),
    "host_memory": Constant(15e9),
    # seconds of a microbatch and of a step, whatever their size
    "microbatch_seconds": Constant(1e-3),
    "step_seconds": Constant(1e-2),
}
"""By name. A system's file changes what its software needs."""
_DIVISORS = ("nic_shared", "host_link", "host_memory", *(name for name in CONSTANTS if name.endswith("efficiency")))
LIMITS = {
    **dict.fromkeys(CONSTANTS, (0.0, 1e18)),
    **dict.fromkeys(_DIVISORS, (1e-9, 1e18)),
    **{"host_exponent": (1.0, 1e18), "overlap": (0.0, 1.0), "send_blocks": (0.0, 1.0)},
}
"""Least and largest value of each constant in a system's file."""
