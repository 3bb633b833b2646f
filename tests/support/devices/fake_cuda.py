"""A CUDA device that is not there: tensors that say they are on it, and what `torch.cuda` does around them.

Numbers are computed on the CPU, at once. But who may touch them, what waits, and what has been copied when, is as on a
device: a thread's current device is the first one until it says otherwise, a copy without waiting brings nothing before
something is waited for, and a capture that cannot be ended leaves the allocator in it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from support.devices.fake_streams import FakeEvent, FakeGraph, FakeStream
from support.devices.paged_reference import WrittenOut
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from molink.shards.paged_attention.paged import BlockAddresses, Logits, RotaryAngles

Value = Any
"""Whatever functions of torch take and give."""
STEP_S = 5.0
"""What the device takes for whatever was launched since it was last waited for."""
WAITING = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "equal"}
)
LOOKING = frozenset(
    {"data_ptr", "size", "dim", "numel", "element_size", "stride", "is_contiguous", "__len__", "__repr__"}
    | {"is_floating_point", "untyped_storage", "storage_offset", "type", "get_device", "is_inference"}
)
"""What says something of a tensor and not of its numbers."""


class WrongPlace(Exception):
    """Something was done on a thread or a device where it must not be."""


class OnDevice(Tensor):
    """A tensor whose numbers are on the fake device."""

    fake: ClassVar["FakeCuda | None"] = None

    @classmethod
    def __torch_function__(
        cls, func: Value, types: object, args: tuple[Value, ...] = (), kwargs: dict[str, Value] | None = None
    ) -> Value:
        if cls.fake is None or cls.fake.is_inside:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.fake.call(func, args, kwargs or {})


class _OfThread(threading.local):
    """What CUDA and the fake know of a thread."""

    def __init__(self) -> None:
        self.current = 0
        self.watched = False
        self.inside = False
        self.stream: FakeStream | None = None
        self.now_s = 0.0
        self.waited = 0
        self.launched = 0
        self.done = 0
        self.coming: list[Callable[[], object]] = []


class FakeCuda:
    """One device of several, the only one that may be used; installed by `fake_cuda`."""

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        self.waits: list[str] = []
        """The thread of each wait."""
        self.fails_at = ""
        """begin, during, end or replay: where the next capture fails."""
        self.allocating: set[object] = set()
        """Pools for which the allocator takes a capture to be under way."""
        self.pools: Counter[object] = Counter()
        """How many hold each pool."""
        self.captures = 0
        self._threads = _OfThread()
        self._pinned: list[Tensor] = []
        self.default = FakeStream(self)

    # -- threads

    @property
    def current(self) -> int:
        """The current device of this thread."""
        return self._threads.current

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the middle of what the device does."""
        return self._threads.inside

    def set_device(self, device: torch.device) -> None:
        self._threads.current = torch.device(device).index
        if not self._threads.watched:
            self._threads.watched = True
            _Factories(self).__enter__()

    def check(self, what: str) -> None:
        """Raises WrongPlace where the thread's current device is another."""
        if self.current != self.place.index:
            name = threading.current_thread().name
            raise WrongPlace(
                f"{what} on cuda:{self.current} by thread {name}, which has not entered {self.place}"
            )

    def check_place(self, device: object) -> None:
        if torch.device(device) != self.place:  # type: ignore[arg-type]
            raise WrongPlace(f"{device} was reached instead of {self.place}")

    # -- time

    @property
    def now_s(self) -> float:
        """The clock of what this thread has waited for."""
        return self._threads.now_s

    @property
    def waited(self) -> int:
        """How often this thread has."""
        return self._threads.waited

    @property
    def launched(self) -> int:
        return self._threads.launched

    @property
    def done(self) -> int:
        """Of what this thread launched."""
        return self._threads.done

    def launch(self) -> None:
        self._threads.launched += 1

    def wait(self) -> None:
        """The thread waits until all that it launched is done."""
        self.check("a wait")
        self.waits.append(threading.current_thread().name)
        mine = self._threads
        mine.waited += 1
        if mine.launched > mine.done:
            mine.now_s += STEP_S
        mine.done = mine.launched
        coming, mine.coming = mine.coming, []
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode():
            for copy in coming:
                copy()

    # -- streams

    @property
    def stream(self) -> "FakeStream":
        return self._threads.stream or self.default

    def set_stream(self, stream: "FakeStream") -> None:
        self._threads.stream = stream

    @contextmanager
    def on_stream(self, stream: "FakeStream") -> Iterator[None]:
        before = self.stream
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def current_stream(self, device: object = None) -> "FakeStream":
        self.check("a stream was asked for") if device is None else self.check_place(device)
        return self.stream

    # -- tensors

    def is_pinned(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            mine = tensor.untyped_storage().data_ptr()
            return any(mine == one.untyped_storage().data_ptr() for one in self._pinned)

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor)
        return tensor

    def wrap(self, result: Value) -> Value:
        def wrapped(one: Value) -> Value:
            if type(one) in (Tensor, torch.nn.Parameter):
                return one.as_subclass(OnDevice)
            return one

        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(wrapped, result)

    def call(self, func: Value, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        """What a function of torch gives for tensors of which some are on the device."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return self._property(func, args)
        if name == "_has_compatible_shallow_copy_type":
            return False
        if name in LOOKING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        self.check(name)
        if name in ("cpu", "to") and (name == "cpu" or _target(args[1:], kwargs) == torch.device("cpu")):
            self.wait()
            with torch._C.DisableTorchFunctionSubclass():
                plain = args[0].as_subclass(Tensor).clone()
            dtypes = [one for one in args[1:] if isinstance(one, torch.dtype)]
            return plain.to(*dtypes) if dtypes else plain
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "numpy":
            raise TypeError("can't convert a device's tensor to numpy")
        if name in WAITING or (name == "__getitem__" and _looks_up(args[1])):
            self.wait()
        args, kwargs = tree_map(_here, args), tree_map(_here, kwargs)
        if isinstance(kwargs.get("attn_mask"), CausalBias):  # what a kernel knows without numbers
            kwargs["attn_mask"] = self.wrap(kwargs["attn_mask"]._materialize(torch.device("cpu")))
        self._refuse_mixed(name, args, kwargs)
        self.launch()
        with self.inside():
            return self.wrap(func(*args, **kwargs))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is done now is what the device does."""
        self._threads.inside = True
        try:
            with torch._C.DisableTorchFunctionSubclass():
                yield
        finally:
            self._threads.inside = False

    def kernel(self, run: Callable[[], Value]) -> Value:
        """As a kernel that torch does not launch: on this thread's current device."""
        self.check("a kernel")
        self.launch()
        with self.inside():
            return self.wrap(run())

    def create(self, func: Value, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        """What a function of torch gives where no tensor is on the device yet."""
        name = getattr(func, "__name__", "")
        target = _target(args[1:] if name == "to" else (), kwargs)
        pins = bool(kwargs.pop("pin_memory", False)) or name == "pin_memory"
        if name == "pin_memory":
            func, args = torch.clone, args[:1]
        if target is None or target.type != "cuda":
            result = func(*args, **kwargs)
            return self.pin(result) if pins else result
        self.check_place(target)
        self.check(name)
        waits = name == "tensor" or (
            name == "to" and not (kwargs.get("non_blocking") and self.is_pinned(args[0]))
        )
        if waits:
            self.wait()
        self.launch()
        result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        return self.wrap(result.clone() if name == "to" else result)

    def _property(self, func: Value, args: tuple[Value, ...]) -> Value:
        told = {"device": self.place, "is_cpu": False, "is_cuda": True}
        if func.__self__.__name__ in told:
            return told[func.__self__.__name__]
        with torch._C.DisableTorchFunctionSubclass():
            return self.wrap(func(*args))

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        self.launch()
        down = not isinstance(target, OnDevice)
        host = target if down else source
        within = isinstance(target, OnDevice) and isinstance(source, OnDevice)
        with torch._C.DisableTorchFunctionSubclass():
            if down and non_blocking and self.is_pinned(host):
                snapshot = source.as_subclass(Tensor).clone()
                target.fill_(float("nan") if target.is_floating_point() else 77)
                self._threads.coming.append(lambda: target.copy_(snapshot))
                return target
        if not within and not (non_blocking and self.is_pinned(host)):
            self.wait()
        with torch._C.DisableTorchFunctionSubclass():
            return target.copy_(source)

    def _refuse_mixed(self, name: str, args: Value, kwargs: Value) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            plain = [one for one in tensors if not isinstance(one, OnDevice) and one.dim() > 0]
        if plain and name not in ("__setitem__", "__getitem__"):
            raise WrongPlace(f"{name} of tensors on cpu and {self.place}")


class Kernels(WrittenOut):
    """Paged attention by kernels of its own."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        self._fake.kernel(lambda: super(Kernels, self).store(keys, values, places, slot))

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        self._fake.kernel(lambda: super(Kernels, self).rotate_and_store(turned, keys, values, places, slot))

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        attended = self._fake.kernel(
            lambda: super(Kernels, self).attend(query, places, slot, key_heads, logits)
        )
        assert isinstance(attended, Tensor)
        return attended


class _Factories(TorchFunctionMode):
    """On a thread that has entered the device, makes tensors there."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Value, types: object, args: tuple[Value, ...] = (), kwargs: dict[str, Value] | None = None
    ) -> Value:
        if OnDevice.fake is not self._fake or self._fake.is_inside:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(one, OnDevice) for one in leaves):
            return self._fake.call(func, args, kwargs or {})
        return self._fake.create(func, args, dict(kwargs or {}))


def _target(args: tuple[Value, ...], kwargs: dict[str, Value]) -> torch.device | None:
    """The device that a call names."""
    named = [kwargs.get("device"), *(one for one in args if isinstance(one, torch.device | str))]
    return next((torch.device(one) for one in named if one is not None), None)


def _here(value: Value) -> Value:
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if named else value


def _looks_up(index: Value) -> bool:
    """Whether an index has to be brought to the device, or looked at there, before it can be used."""
    parts = index if isinstance(index, tuple) else (index,)
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            isinstance(part, list)
            or (isinstance(part, Tensor) and (part.dtype is torch.bool or not isinstance(part, OnDevice)))
            for part in parts
        )


@contextmanager
def fake_cuda(index: int = 1) -> Iterator[FakeCuda]:
    """The device `cuda:index`, on threads that were started within."""
    fake = FakeCuda(index)

    def stream(device: object = None) -> FakeStream:
        fake.check("a stream was made") if device is None else fake.check_place(device)
        return FakeStream(fake)

    def end_allocating(device: int, pool: object) -> None:
        assert device == index
        if pool not in fake.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        fake.allocating.remove(pool)

    def release_pool(device: int, pool: object) -> None:
        assert device == index
        fake.pools[pool] -= 1

    instead: dict[str, object] = {
        "set_device": fake.set_device,
        "current_device": lambda: fake.current,
        "current_stream": fake.current_stream,
        "stream": fake.on_stream,
        "set_stream": fake.set_stream,
        "synchronize": lambda device: (fake.check_place(device), fake.wait()),
        "empty_cache": lambda: None,
        "Stream": stream,
        "Event": lambda: FakeEvent(fake),
        "CUDAGraph": lambda: FakeGraph(fake),
        "graph_pool_handle": object,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "HF_DEACTIVATE_ASYNC_LOAD", "1"
        )  # transformers' threads that read weights enter no device
        for name, value in instead.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocating)
        patch.setattr(torch._C, "_cuda_releasePool", release_pool)
        OnDevice.fake = fake
        try:
            yield fake
        finally:
            OnDevice.fake = None
