"""What torch.compile leaves as it is.

`torch.compiler.disable` imports the compiler, half a second on every rank, for programs of which most compile nothing.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

_hides: list[Callable[[], None]] = []
"""Callbacks, not yet called, that each hide one function from the compiler."""


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function wrapped so that modules compiled by `compile_in_place` call it uncompiled."""
    chosen: Any = function

    def hide() -> None:
        nonlocal chosen
        chosen = torch.compiler.disable(function)
        torch._dynamo.decorators.skip(call)  # its code, which all wrappers share, is compiled for no shapes

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return chosen(*args, **kwargs)

    _hides.append(hide)
    return wraps(function)(call)


def compile_in_place(module: nn.Module) -> None:
    """Compile a module by torch.compile, which then traces no function that is `untraced`."""
    while _hides:
        _hides.pop()()
    module.compile()
