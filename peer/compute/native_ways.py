"""Which native ways this machine computes by: tried in a process of its own before they are used, and remembered.

Native code that fails ends its process, or computes something else, and says nothing. So each way is run by
`molink.shards.native.trial` first, which tells what it begins and what came of it: what ended or stopped that process,
or was wrong, is dropped, and another process goes on with the rest.
"""

import hashlib
import json
import logging
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final

import torch

from molink.shards.native.compiling import library_name
from molink.shards.native.native_way import NativeWay, TrialJob
from molink.shards.store.store_notes import replace_file

__all__ = ["DroppedWay", "NativeWay", "NativeWays", "TriedWay", "WaysRecord", "read_record"]

TABLE: Final = "molink.shards.matrices.trial_table"
PRODUCT_WITHIN_S: Final = 5.0
"""A product that takes longer is taken for an endless loop, and dropped for this start only: a busy machine may be
that slow."""
READY_WITHIN_S: Final = 60.0
"""The process has imported torch by then."""
TRIED_WITHIN_S: Final = 8.0
"""No further way is begun after this long in one start: what is left is not used, and tried by the next start."""
_FORMAT: Final = 1
"""Of the record. Whoever changes what is tried counts it up."""
_LIBRARIES: Final = ("torch", "bitsandbytes", "numpy")
_ISA_PREFIXES: Final = ("ATEN_CPU_CAPABILITY", "ONEDNN_", "DNNL_", "MKL_")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriedWay:
    """A way that gave the right numbers with one matrix."""

    job: TrialJob
    bytes_per_s: float
    """Weights read by one row, as measured once."""


@dataclass(frozen=True, slots=True)
class DroppedWay:
    """A way that is not used here."""

    name: str
    reason: str
    """Behind "because it"."""


@dataclass(frozen=True, slots=True)
class WaysRecord:
    """What is known of native ways on one machine, with its software and settings."""

    machine: Mapping[str, Any]
    """All that the record depends on."""
    tried: tuple[TriedWay, ...] = ()
    dropped: tuple[DroppedWay, ...] = ()
    chosen: Mapping[str, float] = field(default_factory=dict)
    """Ways that were fastest for some matrices when last loaded, with the bytes of weights that they read a second."""
