"""What the backward pass computes anew is what the forward pass computed: gradients to the last bit.

Of whole models `test_parity` holds that, in every layout.
"""

import pytest
import torch
from torch import Tensor, nn

from impl.device import Device
from impl.recompute import kept_by, recompute
from impl.tensor_parallel.group import TensorParallel


class Calls:
    """tanh(linear(x)) + y, which knows how often it is called."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear, self.count = nn.Linear(3, 3), 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x)) + y

    def gradients(self, out: Tensor, *inputs: Tensor) -> list[Tensor | None]:
        self.linear.zero_grad()
        (out * out).sum().backward()
        return [t.grad for t in (*self.linear.parameters(), *inputs)]


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_are_those_of_the_function_itself(needed: tuple[bool, bool]) -> None:
    """Also where no input needs one: parameters inside do."""
    found: list[list[Tensor | None]] = []
    for does in (False, True):
        function = Calls()
        x, y = (torch.arange(6.0).view(2, 3).requires_grad_(needs) for needs in needed)
        found.append(function.gradients(recompute(function, x, y) if does else function(x, y), x, y))
        assert function.count == 1 + does
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_without_gradients_it_is_a_call() -> None:
    function, x = Calls(), torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        out = recompute(function, x, x)
    assert not out.requires_grad
    assert function.count == 1


def test_a_function_of_constants_has_no_gradient() -> None:
    x = torch.ones(3)
    recompute(lambda x: 2 * x, x).sum().backward()
    assert x.grad is None


def test_hosts_memory_is_where_a_cpus_activations_are(serial: TensorParallel) -> None:
    x, cpu = torch.ones(4, 2), Device(torch.device("cpu"))
    for partition in (False, True):
        kept = kept_by(serial.group, partition=partition, offload=cpu)
        assert torch.equal(kept.unpack(kept.pack(x)), x)
        assert (kept.pack(x).data_ptr() == x.data_ptr()) != partition, "a part is copied, to let the whole go"
