"""In which way a device has shown that it computes, remembered from one start to the next while nothing has changed."""

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from molink.peer.compute.first_step import Proof, first_step
from molink.peer.device.graphics_cards import Card, seen_cards
from molink.peer.models.model import LocalModel
from molink.peer.state_dir import read_json, remember_json
from molink.shards.batching.ways import DecodingWay

REMEMBERED = 32
"""Proofs kept, the newest."""
_LIBRARIES = ("torch", "triton", "triton-windows", "transformers", "bitsandbytes")


def known_or_proven(
    model: LocalModel,
    device: str,
    memory: Path,
    cards: Callable[[], Sequence[Card]] = seen_cards,
    prove: Callable[[LocalModel, str], Proof] = first_step,
) -> Proof:
    """As `first_step`, but what the file `memory` remembers is not proven again: the same model on the same card with
    the same driver, libraries and compiler, and this package as it was.

    Only that all worked is remembered: whoever has mended what did not finds it out at the next start. Raises as
    `first_step`.
    """
    if device == "cpu":
        return prove(model, device)
    key = _key(model, device, cards())
    known = read_json(memory)
    proof = _proof(known.pop(key, None))
    if proof is None:
        proof = prove(model, device)
        if proof.sentence is None:
            newest = dict(list(known.items())[-(REMEMBERED - 1) :])
            found: dict[str, object] = {"way": proof.way.name, "library_bytes": proof.library_bytes}
            remember_json(memory, {**newest, key: found}, "the next start tries a layer again")
    return proof


def _proof(content: object) -> Proof | None:
    """One that a file held; None if it is none."""
    if not isinstance(content, dict) or content.get("way") not in DecodingWay.__members__:
        return None
    library_bytes = content.get("library_bytes")
    if library_bytes is not None and (type(library_bytes) is not int or library_bytes < 0):
        return None
    return Proof(DecodingWay[content["way"]], None, library_bytes)


def _key(model: LocalModel, device: str, cards: Sequence[Card]) -> str:
    """A digest of all that the proof depends on."""
    named = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor()
    what = [
        model.spec.model_hash,
        device,
        named,
        [asdict(card) for card in cards],
        {name: _version(name) for name in _LIBRARIES},
        [torch.version.cuda, torch.version.hip, platform.platform(), platform.python_version()],
        [shutil.which(compiler) for compiler in ("cc", "gcc", "clang")],
        own_files(),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def own_files() -> list[tuple[str, int, int]]:
    """Name, size and time of change of the modules that compute: an edited one counts as another version."""
    spec = find_spec("molink.shards")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    own = [*(path for folder in folders for path in sorted(folder.rglob("*.py"))), Path(__file__)]
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path in own for stat in [path.stat()]]
