"""Transformers without what a peer never uses of it: less than a third of the time that importing all of it takes.

For a process of this product alone; whoever imports `molink` into a program of their own gets transformers as it is.
Six things are different where `load_lean_transformers` came before any other import of it:

- Packages whose own code lists the files of some 450 architectures (`transformers`, `transformers.models`), is torch's
  compiler (`torch._dynamo`), or what exports programs to others and traces them (`torch.export`,
  `torch._higher_order_ops`), run it when one of its names is used, and not when a module in them is imported.
- Transformers is told that optional parts are not there which only training, sharding by its own means and compiling
  need, and accelerate unless there is a GPU: tensors go to processors without it.
- Torch's meta kernels in Python, which compilers need, and which bring in sympy when they are used, are imported only
  when one is missing (`bring_in_meta_kernels`): models are laid out with those in C++.
- What marks functions for torch's compiler leaves them as they are: nothing is compiled here.
- Who registers an operation is noted with file and line, without a search of all modules for its source.
- The patterns of the conversions of all architectures' checkpoints are compiled when they are matched.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final

_META_KERNELS: Final = "torch._meta_registrations"
_TRACING: Final[Mapping[str, tuple[str, ...]]] = {
    "torch.export": (),
    "torch._higher_order_ops": ("cond", "while_loop"),
}
"""Packages that torch imports with its first line, and the functions that it takes of them."""
_ANNOTATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch._higher_order_ops.invoke_subgraph": ("NestedCompileRegionOptions",),
}
"""Modules of which it takes classes that it only names in annotations."""
_COMPILER: Final = "torch._dynamo"
_WRAPPED: Final = "torch._dynamo._trace_wrapped_higher_order_op"
_MARKS: Final = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that leave functions as they are until the compiler is loaded, which replaces them."""
_NOT_THERE: Final = ("is_torch_distributed_available", "is_torch_flex_attn_available")
_FOR_GPUS: Final = "is_accelerate_available"


class LazyPackage(ModuleType):
    """A package whose modules can be imported without its own code, which runs when one of its other names is used."""

    def __init__(self, spec: ModuleSpec, **known: object) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self._own_loader = spec.loader
        self.__package__, self.__path__ = spec.name, list(spec.submodule_search_locations or ())
        self.__dict__.update(known)
        self._has_run = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the package has
        if name.startswith("__"):
            raise AttributeError(name)
        inner = f"{self.__name__}.{name}"
        if not self._has_run and PathFinder.find_spec(inner, self.__path__) is not None:
            return importlib.import_module(inner)
        self.run_own_code()
        module = sys.modules[self.__name__]  # the package may have put another one in its own place
        if module is not self:
            return getattr(module, name)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def run_own_code(self) -> None:
        """Runs the package's own code, once."""
        if not self._has_run:
            self._has_run = True
            if self._own_loader is not None:
                self._own_loader.exec_module(self)


def load_lean_transformers() -> None:
    """Imports torch, and transformers' models without what is never used; does nothing where it is loaded already."""
    if "transformers" in sys.modules:
        return
    with _no_search_for_source():
        _load_torch()
        _load_transformers()


def _load_torch() -> None:
    deferred = _Deferred()
    sys.meta_path.insert(0, deferred)
    try:
        importlib.import_module("torch")
    finally:
        sys.meta_path.remove(deferred)
    _allow_generators()
    if _COMPILER not in sys.modules:
        _lazy(_COMPILER, **dict.fromkeys(_MARKS, _unmarked))
        _lazy(_WRAPPED, TransformGetItemToIndex=_called_later(_WRAPPED, "TransformGetItemToIndex"))


def _load_transformers() -> None:
    torch = sys.modules["torch"]
    _lazy("transformers", __version__=version("transformers"))
    utilities = importlib.import_module("transformers.utils")
    parts = importlib.import_module("transformers.utils.import_utils")
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    for module in (parts, utilities):
        _put(module, **dict.fromkeys((*_NOT_THERE, *(() if has_gpu else (_FOR_GPUS,))), _no))
        _put(module, direct_transformers_import=_this_package)
    _lazy("transformers.models")
    importlib.import_module("transformers.modeling_utils")
    _put(importlib.import_module("transformers.core_model_loading"), re=_Patterns())


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
    """Finds and loads `_NotYet` in the place of the meta kernels, and a `LazyPackage` for each of the others."""

    def find_spec(self, fullname: str, _: object, __: object = None) -> ModuleSpec | None:
        if fullname not in (_META_KERNELS, *_TRACING, *_ANNOTATIONS):
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _TRACING)  # type: ignore[arg-type] # a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name
        if name == _META_KERNELS:
            return _NotYet(name)
        found = PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        spec.submodule_search_locations, spec.origin = found.submodule_search_locations, found.origin
        functions = {one: _called_later(name, one) for one in _TRACING.get(name, ())}
        return LazyPackage(
            found, **functions, **{one: type(one, (), {}) for one in _ANNOTATIONS.get(name, ())}
        )

    def exec_module(self, _: ModuleType) -> None:
        """Nothing is run yet."""


def _called_later(package: str, name: str) -> Callable[..., Any]:
    """The function of that name, whose package's own code runs when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
        module = sys.modules[package]
        if isinstance(module, LazyPackage):
            module.run_own_code()
        return getattr(module, name)(*arguments, **named)

    call.__name__ = name
    return call


@contextmanager
def _no_search_for_source() -> Iterator[None]:
    """`inspect` finds a frame's module and line without the lines around: for these it looks up the paths of all
    modules."""
    module_of, describe = inspect.getmodule, inspect.getframeinfo

    def own_module_of(thing: object, filename: str | None = None) -> ModuleType | None:
        if isinstance(thing, FrameType):
            return sys.modules.get(thing.f_globals.get("__name__", ""))
        return module_of(thing, filename)

    def described(frame: FrameType | TracebackType, _: int = 1) -> inspect.Traceback:
        return describe(frame, context=0)

    _put(inspect, getmodule=own_module_of, getframeinfo=described)
    try:
        yield
    finally:
        _put(inspect, getmodule=module_of, getframeinfo=describe)


def _put(module: ModuleType, **parts: object) -> None:
    """Replaces what the module has under these names."""
    for name, part in parts.items():
        setattr(module, name, part)


def _allow_generators() -> None:
    """Generators of random numbers work once they have a metaclass for compilers. The module that sets it first defines
    operations for compilers, which takes a tenth of a second."""
    set_metaclass = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)
    if set_metaclass is None:
        importlib.import_module("torch._prims.rng_prims")
    else:
        set_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


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


def _this_package(*_: object, **__: object) -> ModuleType:
    """What transformers imports anew from its own folder, to have it whole: its names are the same."""
    return sys.modules["transformers"]


class _Patterns:
    """`re`, of which patterns are compiled when they are first used."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(re, name)

    def compile(self, pattern: str, flags: int = 0) -> "_Pattern":
        return _Pattern(pattern, flags)


class _Pattern:
    """One of them; its copies are equal."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._asked = pattern, flags
        self._compiled: re.Pattern[str] | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a pattern has
        if name.startswith("_"):
            raise AttributeError(name)
        if self._compiled is None:
            self._compiled = re.compile(*self._asked)
        return getattr(self._compiled, name)


def _no(*_: object, **__: object) -> bool:
    return False
