"""Torch's libraries, mapped in a thread while other modules are imported.

To map and relocate them takes a third of what `import torch` takes, and Python holds its lock meanwhile. The system's
own `dlopen`, called as any function of C is, lets it go.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Final

_LIBRARIES: Final = ("libtorch_global_deps.so", "libtorch_cpu.so")
"""In the order in which torch needs them: the first one for all to see, as torch itself has it. Those that call Python
or look at GPUs are left to `import torch`."""


def begin_loading_torch() -> None:
    """Begins, and returns at once. Does nothing where torch is loaded, is not there, or the system is not Linux."""
    found = (
        importlib.util.find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    )
    if found is not None and found.origin is not None:
        folder = Path(found.origin).with_name("lib")
        # Not a daemon: a process that ended while libraries initialize themselves would crash.
        threading.Thread(target=_load, args=(folder,), name="molink-libraries").start()


def _load(folder: Path) -> None:
    """What cannot be loaded here, `import torch` looks for elsewhere, or says what is wrong with it."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for position, name in enumerate(_LIBRARIES):
        path = folder / name
        mode = os.RTLD_NOW | (os.RTLD_GLOBAL if position == 0 else os.RTLD_LOCAL)
        if path.exists() and dlopen(os.fsencode(path), mode) is None:
            return
