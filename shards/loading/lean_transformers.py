"""Transformers without what a peer never uses of it: less than a third of the time that importing all of it takes.

For a process of this product alone; whoever imports `molink` into a program of their own gets transformers as it is.
Four things are different where `load_lean_transformers` came before any other import of it:

- Packages whose own code lists the files of some 450 architectures (`transformers`, `transformers.models`), or is
  torch's compiler (`torch._dynamo`), run it when one of its names is used, and not when a module in them is imported.
- Transformers is told that optional parts are not there which only training, sharding by its own means and compiling
  need, and accelerate unless there is a GPU: tensors go to processors without it.
- Torch's meta kernels in Python, which compilers need, and which bring in sympy when they are used, are imported only
  when one is missing (`bring_in_meta_kernels`): models are laid out with those in C++.
- What marks functions for torch's compiler leaves them as they are: nothing is compiled here.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final

_PACKAGES: Final = ("transformers", "transformers.models")
_META_KERNELS: Final = "torch._meta_registrations"
_COMPILER: Final = "torch._dynamo"
_MARKS: Final = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that leave functions as they are until the compiler is loaded, which replaces them."""
_NOT_THERE: Final = ("is_torch_distributed_available", "is_torch_flex_attn_available")
_FOR_GPUS: Final = "is_accelerate_available"


class LazyPackage(ModuleType):
    """A package whose modules can be imported without its own code, which runs when one of its other names is used."""

    def __init__(self, spec: ModuleSpec, **known: object) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__, self.__path__ = spec.name, list(spec.submodule_search_locations or ())
        self.__dict__.update(known)
        self._has_run = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the package has
        if name.startswith("__"):
            raise AttributeError(name)
        inner = f"{self.__name__}.{name}"
        if not self._has_run and PathFinder.find_spec(inner, self.__path__) is not None:
            return importlib.import_module(inner)
        if not self._has_run:
            self._has_run = True
            if self.__spec__ is not None and self.__spec__.loader is not None:
                self.__spec__.loader.exec_module(self)
        module = sys.modules[self.__name__]  # the package may have put another one in its own place
        if module is not self:
            return getattr(module, name)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def load_lean_transformers() -> None:
    """Imports torch, and transformers' models without what is never used; does nothing where it is loaded already."""
    if "transformers" in sys.modules:
        return
    deferred = _Deferred()
    sys.meta_path.insert(0, deferred)
    try:
        import torch
    finally:
        sys.meta_path.remove(deferred)
    importlib.import_module("torch._prims.rng_prims")  # or there would be no generators of random numbers
    if _COMPILER not in sys.modules:
        _lazy(_COMPILER, **dict.fromkeys(_MARKS, _unmarked))
    _lazy("transformers", __version__=version("transformers"))
    utilities = importlib.import_module("transformers.utils")
    parts = importlib.import_module("transformers.utils.import_utils")
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    for name in (*_NOT_THERE, *(() if has_gpu else (_FOR_GPUS,))):
        setattr(parts, name, _no)
        setattr(utilities, name, _no)
    _lazy("transformers.models")
    importlib.import_module("transformers.modeling_utils")


def bring_in_meta_kernels() -> bool:
    """Imports those of torch's meta kernels that were left out; whether any were."""
    module = sys.modules.get(_META_KERNELS)
    if not isinstance(module, _NotYet):
        return False
    del sys.modules[_META_KERNELS]
    importlib.import_module(_META_KERNELS)
    return True


class _NotYet(ModuleType):
    """Stands in the place of a module that is imported later, or never."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        if name.startswith("__") or not bring_in_meta_kernels():
            raise AttributeError(name)
        return getattr(sys.modules[self.__name__], name)


class _Deferred:
    """Finds and loads `_NotYet` in the place of the meta kernels."""

    def find_spec(self, fullname: str, _: object, __: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == _META_KERNELS else None  # type: ignore[arg-type] # a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _NotYet(spec.name)

    def exec_module(self, _: ModuleType) -> None:
        """There is nothing in it."""


def _lazy(name: str, **known: object) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = sys.modules[name] = LazyPackage(spec, **known)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, package)


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:  # noqa: ANN401 - a decorator, with arguments or without
    return _unmarked if function is None else function


def _no(*_: object, **__: object) -> bool:
    return False
