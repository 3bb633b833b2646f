"""Which products were fastest on this machine when they were measured, so that a later start need not measure again."""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from molink.shards.matrices import products
from molink.shards.matrices.products import Choice
from molink.shards.store.store_notes import replace_file

Decision: TypeAlias = tuple[Choice[int], bool]
"""From so many rows on, the number of the way to use; and whether weights are packed instead."""

UNCERTAIN_S: Final = 24 * 3600.0
_FORMAT: Final = 1
"""Of the notes. Whoever changes which ways there are, or their order, counts it up."""
_OWN: Final = (Path(products.__file__), Path(products.__file__).with_name("linear.py"))


@dataclass(frozen=True, slots=True)
class KnownProducts:
    """Decisions of one machine, each in a file of its own. Used from one thread."""

    folder: Path
    machine: str
    """Names the processor: on another one other products may be faster."""
    _made: dict[Path, Decision] = field(default_factory=dict)
    """What was decided since, and is not written yet."""

    def find(self, kind: Sequence[object], ways: int) -> Decision | None:
        """What was decided for matrices of this kind, of so many ways; None: nothing that can be read.

        `kind` is all that times depend on beside the machine, the software and the number of threads, as JSON values.
        """
        path = self._path(kind)
        if path in self._made:
            return self._made[path]
        try:
            return _decision(json.loads(path.read_bytes()), ways)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def decided(self, kind: Sequence[object], decision: Decision) -> None:
        """Takes a decision down, to be kept if `keep` is called."""
        self._made[self._path(kind)] = decision

    def keep(self, *, certain: bool) -> None:
        """Writes down what was decided. Not `certain`: other programs kept the processors busy, and it is believed for
        UNCERTAIN_S only. On a full disk it is simply measured again."""
        until_s = None if certain else time.time() + UNCERTAIN_S
        for path, (choice, packs) in self._made.items():
            note = {"choice": choice, "packs": packs, "until_s": until_s}
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(note).encode())
        self._made.clear()

    def _path(self, kind: Sequence[object]) -> Path:
        states = [[stat.st_size, stat.st_mtime_ns] for path in _OWN for stat in [path.stat()]]
        software = (_FORMAT, torch.__version__, torch.backends.cpu.get_cpu_capability(), states)
        what = (*software, self.machine, torch.get_num_threads(), *kind)
        return self.folder / f"products-{hashlib.sha256(json.dumps(what).encode()).hexdigest()}.json"


def _decision(content: Any, ways: int) -> Decision:  # noqa: ANN401 - out of a file
    """Raises ValueError, KeyError or TypeError where it is none."""
    choice = tuple((rows, way) for rows, way in content["choice"])
    packs, until_s = content["packs"], content["until_s"]
    if until_s is not None and not time.time() < float(until_s) <= time.time() + UNCERTAIN_S:
        raise ValueError("out of date")
    numbers = [number for pair in choice for number in pair]
    if not choice or choice[0][0] != 1 or type(packs) is not bool or {*map(type, numbers)} != {int}:
        raise ValueError("no decision")
    if any(not 0 <= way < ways for _, way in choice):
        raise ValueError("no such way")
    return choice, packs
