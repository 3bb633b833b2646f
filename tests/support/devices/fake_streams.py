"""Streams, events and graphs of a device that is not there (see `fake_cuda.py`)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from support.devices.fake_cuda import FakeCuda

Value = Any
"""Whatever functions of torch take and give."""


class FakeStream:
    """A stream of the fake device."""

    def __init__(self, fake: "FakeCuda") -> None:
        self._fake = fake
        self.capturing = False

    def synchronize(self) -> None:
        self._fake.wait()

    def wait_stream(self, other: "FakeStream") -> None:
        if self.capturing or other.capturing:
            raise RuntimeError("a stream that is captured cannot be waited for")


class FakeEvent:
    """An event of the device on which it is made."""

    def __init__(self, fake: "FakeCuda") -> None:
        fake.check("an event was made")
        self._fake = fake
        self._at = 0

    def record(self) -> None:
        self._fake.check("an event was recorded")
        self._at = self._fake.launched

    def query(self) -> bool:
        return self._fake.done >= self._at

    def synchronize(self) -> None:
        self._fake.wait()


class FakeGraph:
    """Remembers operations on the very tensors that they used, and fails where it is told to."""

    def __init__(self, fake: "FakeCuda") -> None:
        self._fake = fake
        self._tape: _Tape | None = None
        self._pool: object = None
        self._ended = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        fake = self._fake
        fake.check("a capture")
        assert capture_error_mode == "thread_local"
        if fake.stream is fake.default:
            raise RuntimeError("graphs must be captured on a stream of their own")
        if pool in fake.allocating:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if pool in fake.pools and fake.pools[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool = pool
        fake.allocating.add(pool)
        fake.pools[pool] += 1
        if fake.fails_at == "begin":
            raise RuntimeError("injected: begin")
        fake.captures += 1
        fake.stream.capturing = True
        self._tape = _Tape(fake)
        self._tape.__enter__()

    def capture_end(self) -> None:
        fake, tape = self._fake, self._tape
        if tape is None or not fake.stream.capturing:
            raise RuntimeError("there is no capture to end")
        fake.stream.capturing = False
        tape.__exit__(None, None, None)
        if fake.fails_at in ("during", "end"):
            raise RuntimeError("injected: capture_end")
        fake.allocating.remove(self._pool)
        self._ended = True

    def replay(self) -> None:
        if self._fake.fails_at == "replay":
            raise RuntimeError("injected: replay")
        assert self._tape is not None
        assert self._ended
        self._fake.check("a replay")
        self._fake.launch()
        self._tape.play()

    def __del__(self) -> None:
        if self._ended:
            self._fake.pools[self._pool] -= 1


class _Tape(TorchDispatchMode):
    def __init__(self, fake: "FakeCuda") -> None:
        super().__init__()
        self._fake = fake
        self._operations: list[tuple[Value, tuple[Value, ...], dict[str, Value], Value]] = []

    def __torch_dispatch__(
        self, func: Value, types: object, args: tuple[Value, ...] = (), kwargs: dict[str, Value] | None = None
    ) -> Value:
        if self._fake.fails_at == "during" and len(self._operations) == 5:
            raise RuntimeError("injected: an operation is not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        """All operations again, into the memory of the first time."""
        with self._fake.inside(), torch.inference_mode():
            for func, args, kwargs, before in self._operations:
                after = func(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    if (
                        isinstance(old, Tensor)
                        and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                    ):
                        old.copy_(new)
