"""Names of a package that are imported on first use (PEP 562)."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package: `homes` are modules within the package, with the names that each defines."""
    module_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        """Raises AttributeError for a name that the package does not have."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return load
