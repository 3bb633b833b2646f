"""Imports as the product's own processes make them: whichever test first imports torch, transformers or libp2p gets it
without what nobody here uses of it, in less than half of the time. A test that uses none of them waits for none."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class LeanImports(MetaPathFinder):
    """Finder that has a package loaded by a function of the product, once. `LeanImports().install()` before others."""

    def __init__(self) -> None:
        self._loads: dict[str, Callable[[], None]] = {
            "libp2p": _load_libp2p,
            "torch": _load_transformers,
            "transformers": _load_transformers,
        }

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, _: Sequence[str] | None, __: ModuleType | None = None
    ) -> ModuleSpec | None:
        load = self._loads.get(fullname)
        if load is None:
            return None
        self._loads = {name: other for name, other in self._loads.items() if other is not load}
        load()
        module = sys.modules[fullname]
        module.__spec__ = ModuleSpec(
            fullname, _Present(module)
        )  # Python asks a module that is there before a finder
        return module.__spec__


class _Present(Loader):
    """What loads nothing: the module is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _load_transformers() -> None:
    from molink.shards.loading.lean_transformers import load_lean_transformers

    load_lean_transformers()


def _load_libp2p() -> None:
    from molink.dht.host.lean_libp2p import load_lean_libp2p

    load_lean_libp2p()
