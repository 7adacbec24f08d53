"""Tensors without memory that say they are on a device: the engine takes that device's branches, and sizes are right.

They are PyTorch's meta tensors. Operations on them give shapes and types only; what would look at a value finds one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # meta kernels import it on first use, which must not happen among what is put in place here
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.flop_counter import flop_registry

import impl.expert_parallel
import impl.model.experts
import impl.train
from impl.ghost.recorder import instead
from impl.instruments import Tracked, gradients_under_way
from impl.train import Trainer

META = torch.device("meta")
Look = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]
"""Function of an operation and what it is called with."""
TEXT = 2**40
"""Tokens of the text that is not read."""
_device = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class _Claiming(TorchFunctionMode):
    """Every meta tensor says that it is on `device`, and what is made there is a meta tensor.

    On cpu that is all without a device too, but ranges, whose values some code reads.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._instead: dict[Any, Callable[..., Any]] = {
            _device: self._claimed,
            torch.Tensor.data_ptr: _place,
            torch.Tensor.item: lambda _: True,
            torch.Tensor.bernoulli_: lambda x, p, generator: x.bernoulli_(p),
            torch.Tensor.pin_memory: lambda x: x,
            torch.bincount: lambda x, minlength: x.new_empty(minlength),
            torch.Tensor.to: self._to,
            functional.scaled_dot_product_attention: partial(_attention, device.type),
            functional.rms_norm: functional.layer_norm,  # whose kernel too keeps its input, and two numbers a row
        }
        if device.type == "cpu":
            self._instead |= {make: self._made(make) for make in (torch.empty, torch.zeros, torch.full)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs["device"] = self._real(kwargs["device"])
        chosen = self._instead.get(func)
        return func(*args, **kwargs) if chosen is None else chosen(*args, **kwargs)

    def _real(self, device: Any) -> Any:
        return META if torch.device(device) == self.device else device

    def _claimed(self, tensor: Tensor) -> torch.device:
        found = _device(tensor)
        return self.device if found == META else found

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.to(*(self._real(a) if isinstance(a, str | torch.device) else a for a in args), **kwargs)

    def _made(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, device=META, **kwargs: make(*args, device=device, **kwargs)


def _place(tensor: Tensor) -> int:
    """Return an address that views of the same memory share, as it has none."""
    return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.element_size()


def _even(counts: Tensor, total: int) -> list[int]:
    """Return counts of a total in parts as equal as can be, as no tensor has values."""
    few, more = divmod(total, len(counts))
    return [few + (i < more) for i in range(len(counts))]


def _attention(device: str, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **_: Any) -> Tensor:
    """Attention by the fused kernel that the device has; for meta tensors PyTorch would take products one by one."""
    aten = torch.ops.aten
    of_cpu, of_gpu = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention
    return (of_cpu if device == "cpu" else of_gpu)(q, k, v, 0.0, is_causal)[0]


class Counting(Tracked):
    """`Tracked` that counts the FLOPs of matrix products and attention as well."""

    flops = 0
    look: Look
    """Function called before every operation, with the operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # devices are to be the real ones
            self.look(func, args, kwargs or {})
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if counts := _FLOPS.get(func.overloadpacket):
                self.flops += counts(*args, **(kwargs or {}), out_val=result)
            return result

    def pack(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return super().pack(tensor)

    def keeps(self, tensor: Tensor) -> bool:
        """Return whether autograd has kept the tensor's memory."""
        with torch._C.DisableTorchFunction():
            memory = self._see(tensor)
        return memory is not None and memory.is_kept

    def parts_of(self, one: Trainer) -> dict[str, int]:
        """Return `parts` of the tensors that the trainer holds."""
        held = one.held()
        with torch._C.DisableTorchFunction():
            return self.parts(held)


@contextmanager
def counting(one: Trainer, look: Look) -> Iterator[Counting]:
    """Count memory and FLOPs of the trainer's operations inside, as `impl.instruments.tracked` does."""
    held = one.held()
    with torch._C.DisableTorchFunction():
        tracker = Counting(held, META, lambda: gradients_under_way(one))
    tracker.look = look
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, lambda tensor: tensor), tracker:
        yield tracker


def _flops() -> dict[Any, Callable[..., int]]:
    """Return PyTorch's counts and those that it lacks; attention's backward pass is twice its forward pass."""
    aten, counts = torch.ops.aten, dict[Any, Callable[..., int]](flop_registry)
    counts |= {aten.addmm_: counts[aten.addmm], aten.baddbmm_: counts[aten.baddbmm]}
    forward = counts[aten._scaled_dot_product_flash_attention]
    backward = lambda _, *args, out_val, **others: 2 * forward(*args[:3], out_val=args[3])
    counts[aten._scaled_dot_product_flash_attention_for_cpu] = forward
    counts[aten._scaled_dot_product_flash_attention_for_cpu_backward] = backward
    counts[aten._scaled_dot_product_flash_attention_backward] = backward
    return counts


_FLOPS = _flops()


class Unread:
    """Stand-in for a token folder: any number of tokens, all the same."""

    def __init__(self, tokenizer_tokens: int) -> None:
        self.manifest = SimpleNamespace(vocab_size=tokenizer_tokens)

    def tokens(self, _: str) -> np.ndarray:
        return np.broadcast_to(np.uint16(0), (TEXT,))


@contextmanager
def without_memory(device: torch.device) -> Iterator[None]:
    """Let trainers be made and run inside whose tensors are on the device, as far as they can see, and have no memory.

    Initial weights are not drawn, tokens are not copied, and groups are made as usual, since their ranks are numbers.
    """
    generator = torch.Generator
    others: dict[str, Any] = {
        "InitialWeights": lambda *_: lambda *_: (),
        "to_device": lambda array, device: torch.empty(array.shape, dtype=torch.int64, device=device.device),
    }
    of_groups = ("joint_group", "zero_groups", "expert_groups", "ends_group", "neighbours")
    others |= {name: _as_usual(getattr(impl.train, name)) for name in of_groups}
    with ExitStack() as stack:
        stack.enter_context(instead(impl.train, **others))
        stack.enter_context(instead(torch, Generator=lambda *_: generator()))
        stack.enter_context(instead(impl.model.experts, numbers=_even, within=lambda order, _: order))
        stack.enter_context(instead(impl.expert_parallel, numbers=_even))
        # the mode would be put aside for all of a backward pass
        stack.enter_context(instead(torch.autograd, has_torch_function=lambda _: False))
        stack.enter_context(_Claiming(device))
        yield


def _as_usual(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it works on tensors as if nothing claimed anything about them."""

    def call(*args: Any) -> Any:
        mode = _pop_mode()
        try:
            return function(*args)
        finally:
            _push_mode(mode)

    return call
