"""Placeholders for modules that a library imports at once and that this process never uses.

A library that imports all that it can do makes each start wait for it. While `placeholders` is open, modules of the
given names are not executed: whatever is imported from them is a class of which instances can be made, but not used.
Afterwards they are imported as ever, and only the library that was loaded meanwhile keeps its placeholders. What was
loaded before stays.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType


class PlaceholderUsed(RuntimeError):
    """A command has used a part of a library that it was loaded without."""


class _Placeholder(type):
    """A class whose every attribute is another placeholder."""

    def __getattr__(cls, name: str) -> "_Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__qualname__}.{name}")


def _placeholder(name: str) -> _Placeholder:
    return _Placeholder(name, (_Unused,), {})


class _Unused:
    """Result of calling a placeholder: something that can be kept, and not be used."""

    def __init__(self, *_: object, **__: object) -> None:
        """Whatever it is made of."""

    def __getattr__(self, name: str) -> object:
        raise PlaceholderUsed(f"{type(self).__qualname__}.{name} was left out when this process was started")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _placeholder(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder:
    """Finds and loads placeholders, as `importlib` asks for it; derived from none of its classes, which take long to
    import."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, fullname: str, _: object, __: object = None) -> ModuleSpec | None:
        parts = fullname.split(".")
        if not any(".".join(parts[:count]) in self._names for count in range(1, len(parts) + 1)):
            return None
        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type] # it has a loader's methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, _: ModuleType) -> None:
        """There is nothing in it."""


@contextmanager
def placeholders(names: Collection[str]) -> Iterator[None]:
    """Modules of these names, and all within them, are placeholders when they are imported in the block."""
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Module):
                del sys.modules[name]
