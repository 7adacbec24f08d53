"""Sums of squares are exact enough to clip by, in every precision."""

import pytest
import torch

from impl.squares import squares


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_squares_are_exact(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = ((1,), (3, 5), (6_000_000,), (0,))
    tensors = [(0.1 * torch.randn(shape, generator=random)).to(dtype) for shape in shapes]
    found = squares([*tensors, tensors[1].t()])
    expected = [tensor.double().square().sum() for tensor in (*tensors, tensors[1])]
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=0.0)
