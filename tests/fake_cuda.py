"""A GPU that is not there: its tensors lie in the CPU's memory, and it counts what a host would have to wait for.

Everything that a GPU does without being asked back is done at once. What differs is what the host may know. A copy to
the host holds nonsense until somebody has waited for it. A copy from pinned memory may be read as late as that, so
whoever changes the memory earlier is caught. And the GPU never gets on by itself: nothing is done before it is
waited for. Each wait is noted in `waits`, with a word that says what for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# What CUDA does without waiting; from PyTorch's sources. A name that is missing here is a question for whoever adds it.
ASYNCHRONOUS = {
    "__lshift__", "__xor__", "add", "amax", "arange", "argmax", "bitwise_not", "cat", "clamp_", "clone", "cumsum",
    "div", "embedding", "empty", "empty_like", "eq", "expand", "exponential_", "fill_", "flatten", "flip", "gather",
    "ge", "gt", "index", "index_put_", "le", "linear", "log_softmax", "lt", "masked_fill", "masked_fill_", "mul",
    "mul_", "narrow", "new_empty", "new_full", "ones", "ones_like", "reciprocal", "rsub", "scalar_tensor", "scatter_",
    "scatter_add_", "select", "slice", "softmax", "sub", "sub_", "sum", "topk", "unbind", "unsqueeze", "view",
    "where", "zeros", "zeros_like",
}  # fmt: skip
ASKS_BACK = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique_dim", "_unique2",
             "repeat_interleave", "bincount", "allclose"}  # fmt: skip
CUDA = torch.device("cuda", 0)


class DeviceTensor(Tensor):
    """A tensor on the device; `raw` is where its numbers are."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> DeviceTensor:
        """Wraps `raw`. To torch's C++ it is one without numbers, so that nothing can look at them unseen."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device="meta")
        made.raw = raw
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number that is assigned becomes a tensor on the CPU first. PyTorch fills a slice with it; else it copies.

        Elements that are chosen by tensors or lists are one such case, a single element (no dimension left) another.
        """
        parts = index if isinstance(index, tuple) else (index,)
        chosen = any(isinstance(part, (Tensor, list, np.ndarray)) for part in parts)
        if isinstance(value, (bool, int, float)) and (chosen or not self[index].dim()):
            assert FakeCuda.now is not None
            FakeCuda.now.wait("a number is copied to the device")
        super().__setitem__(index, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        assert FakeCuda.now is not None, f"{func} outside of the fake device"
        return FakeCuda.now.run(func, args, kwargs or {})


class Generator(torch.Generator):
    """One on the CPU, whatever it is asked for."""

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


class Event:
    """torch.cuda.Event."""

    def __init__(self) -> None:
        self.launched = 0

    def record(self) -> None:
        assert FakeCuda.now is not None
        self.launched = FakeCuda.now.launched

    def query(self) -> bool:
        assert FakeCuda.now is not None
        return FakeCuda.now.done >= self.launched

    def synchronize(self) -> None:
        if not self.query():
            assert FakeCuda.now is not None
            places = [sys._getframe(depth + 1).f_code.co_qualname for depth in (1, 2)]  # who calls, and who calls that
            tokens = places[0] == "AsyncModelRunnerOutput.get_output"
            who = places[1].split(".")[-1] if tokens else places[0]
            FakeCuda.now.wait(f"{who} waits for tokens" if tokens else f"{who} waits", self.launched)


class FakeCuda(TorchDispatchMode):
    """The device, while it is open."""

    now: FakeCuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.done = 0  # how many things were launched, and how many the host knows to be done
        self.waits: list[str] = []
        self.unknown: set[str] = set()  # operations of which this file does not say whether they wait
        self.pinned: dict[int, Tensor] = {}
        self.to_device: list[tuple[int, Tensor, Tensor]] = []  # when, pinned memory, what was in it
        self.to_host: list[tuple[int, Tensor, Tensor]] = []  # when, memory, what it will hold
        self.overwritten = 0  # copies whose source was changed before they were known to be done
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> FakeCuda:
        executor = import_module("triton.runtime.interpreter").GridExecutor
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        self.patch.setattr(torch.cuda, "Event", Event)
        self.patch.setattr(torch, "Generator", Generator)
        self.patch.setattr(executor, "__call__", self.kernel(executor.__call__))
        FakeCuda.now = self
        self.inference = torch.inference_mode()  # torch's C++ then leaves it to us what `to` means
        self.inference.__enter__()
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.complete(self.launched)
        self.inference.__exit__(*error)
        self.patch.undo()
        FakeCuda.now = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """As if there were no device."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()

    def kernel(self, run: Callable[..., None]) -> Callable[..., None]:
        """The interpreter's launch, on the numbers of device tensors."""

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.launched += 1
            host = [a for a in args if isinstance(a, Tensor) and not isinstance(a, DeviceTensor)]
            assert not host, f"{executor.fn.__name__}: a tensor on the CPU"
            with _disable_current_modes():
                run(executor, *[a.raw if isinstance(a, DeviceTensor) else a for a in args], **kwargs)

        return launch

    def wait(self, what: str, until: int | None = None) -> None:
        """The host waits until what was launched so far is done, or the first `until` things."""
        self.waits.append(what)
        self.complete(self.launched if until is None else until)

    def complete(self, until: int) -> None:
        self.done = max(self.done, until)
        for when, source, was in self.to_device:
            self.overwritten += when <= until and not torch.equal(source, was)
        for when, target, values in self.to_host:
            if when <= until:
                target.copy_(values)
        self.to_device = [x for x in self.to_device if x[0] > until]
        self.to_host = [x for x in self.to_host if x[0] > until]

    def is_pinned(self, t: Tensor) -> bool:
        return t.untyped_storage().data_ptr() in self.pinned

    def pin(self, t: Tensor) -> Tensor:
        self.pinned[t.untyped_storage().data_ptr()] = t
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name, leaves = func._schema.name.removeprefix("aten::"), tree_leaves((args, kwargs))
        ours = [t for t in leaves if isinstance(t, DeviceTensor)]
        host = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)]
        place = next((d for d in leaves if isinstance(d, torch.device)), None)
        there = bool(ours) if place is None else place.type != "cpu"
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if name in ("to", "_to_copy") and bool(ours) != there:
            return self.upload(func, args[0], kwargs, blocking) if there else self.download(args[0], blocking)
        if name == "copy_" and ours and host:
            assert isinstance(args[0], DeviceTensor), "copy_ into the CPU's memory is not used"
            self.leave(args[1], blocking)
            host = []
        pin = kwargs.pop("pin_memory", False) or name in ("pin_memory", "_pin_memory")
        if not ours and not there:
            out = args[0].clone() if "pin_memory" in name else func(*args, **kwargs)
            return self.pin(out) if pin else out
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        self.launched += not (is_view or name in ("empty", "empty_like", "new_empty"))
        masks = name == "index" and any(t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        if name in ASKS_BACK or masks:
            self.wait(name)
        elif any(t.dim() or name.startswith("index") for t in host):
            self.wait(f"{name} of a tensor on the CPU")
        elif name not in ASYNCHRONOUS | {"to", "_to_copy", "copy_"}:
            self.unknown.add(name)
        return self.compute(func, args, kwargs, place)

    def compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: torch.device | None) -> Any:
        """`func` on the numbers; results are device tensors, the same objects where it writes into them."""
        raws = {id(t.raw): t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)}

        def inside(x: Any) -> Any:
            return x.raw if isinstance(x, DeviceTensor) else torch.device("cpu") if isinstance(x, torch.device) else x

        def outside(x: Any) -> Any:
            return raws[id(x)] if id(x) in raws else DeviceTensor(x) if isinstance(x, Tensor) else x

        return tree_map(outside, func(*tree_map(inside, args), **tree_map(inside, kwargs)))

    def leave(self, source: Tensor, blocking: bool) -> None:
        """A copy to the device begins."""
        self.launched += 1
        if blocking:
            self.wait("copy to the device, blocking")
        elif not self.is_pinned(source):
            self.wait("copy to the device from memory that is not pinned")
        else:
            self.to_device.append((self.launched, source, source.clone()))

    def upload(self, func: Any, source: Tensor, kwargs: dict[str, Any], blocking: bool) -> Tensor:
        self.leave(source, blocking)
        return DeviceTensor(source.to(kwargs.get("dtype") or source.dtype, copy=True))

    def download(self, source: DeviceTensor, blocking: bool) -> Tensor:
        self.launched += 1
        if blocking:
            self.wait("copy to the host, blocking")
            return source.raw.clone()
        nonsense = self.pin(torch.full_like(source.raw, 77))
        self.to_host.append((self.launched, nonsense, source.raw.clone()))
        return nonsense
