"""The draft model that a peer guesses with: found, held against the model that is served, and read."""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from molink.dht.records.facts_codec import MAX_DRAFT_CHARACTERS, TOKENIZER_HASH_BYTES
from molink.dht.records.records import LOOKUP, TABLES, AnnouncedDraft
from molink.peer.daemon.compute_setup import memory_of
from molink.peer.device.device import default_memory_bytes
from molink.peer.drafting.draft_thread import DraftThread
from molink.peer.drafting.opening import PlannedDraft, load_draft, plan_draft
from molink.peer.engine.guessing import DRAFTED_SESSIONS, HeadGuesses
from molink.peer.models.model import LocalModel
from molink.peer.speculation.draft_model import SEEN_TOKENS, DraftLookup, DraftModel, DraftShape
from molink.shards.checkpoint.catalog import CheckpointNotFound, is_from_hub, resolve
from molink.shards.checkpoint.safetensors_header import StoreError, read_header, weight_files
from molink.shards.errors import WeightsError

TOKENIZER: Final = "tokenizer.json"
MOST_PARAMETERS: Final = 4_000_000
"""Of one that is computed on the loop that serves, between a trip and the next: more would hold up others."""

NUMPY_DTYPES: Final = frozenset({"F16", "F32", "F64"})
"""In which NumPy reads weights."""
TRIED_TRIPS, TRIED_GUESSES = 5, 4
"""By which it is measured what a guess takes, some milliseconds in all."""


class DraftUnusable(Exception):
    """The draft model cannot be used; one sentence says why, and what to do."""


def guesses_of(
    option: str, model: LocalModel, memory_bytes: int | None, device: str = "cpu"
) -> tuple[HeadGuesses | None, int]:
    """What tokens are guessed from where this peer is the head, as `--draft` says, and what it takes of the memory;
    None: they are not guessed. A draft model that is not small is computed on the device. It blocks. Raises
    DraftUnusable."""
    if option == "off":
        return None, 0
    announced: tuple[AnnouncedDraft, ...] = (AnnouncedDraft(LOOKUP), AnnouncedDraft(TABLES))
    if option in ("auto", "lookup"):
        told = announced if option == "auto" else announced[:1]
        return HeadGuesses(tables=option == "auto", announced=told), 0
    folder = _folder_of(option, model.spec.name, model.manifest.files)
    if not _is_small(option, folder):
        device = "cpu" if device == "mps" else device  # torch's Metal takes work from one thread only
        planned = _planned(option, folder, model, memory_bytes or default_memory_bytes(device))
        thread = _loaded(option, planned, model, device)
        tokenizer = bytes.fromhex(model.manifest.files[TOKENIZER])[:TOKENIZER_HASH_BYTES]
        named = AnnouncedDraft(_announced_name(option), tokenizer, thread.times.alone_ms)
        return HeadGuesses(tables=True, draft=thread, announced=(*announced, named)), planned.needed_bytes
    draft = open_draft(option, model.spec.name, model.manifest.files, memory_bytes)
    measured = announced_draft(option, model.manifest.files[TOKENIZER], draft)
    draft = replace(draft, guess_ms=measured.guess_ms)
    guesses = HeadGuesses(tables=True, draft=draft, announced=(*announced, measured))
    return guesses, draft_bytes(draft)


def left_memory_bytes(
    guesses: HeadGuesses | None, taken_bytes: int, memory_bytes: int | None, devices: tuple[str, ...]
) -> int | None:
    """What guesses that take so much leave of `--memory`; None: it is not given, and nothing has to be kept free."""
    if memory_bytes is not None:
        return memory_bytes - taken_bytes
    caches_bytes = draft_cache_bytes(guesses)  # what is loaded is not free any more; its caches are to come
    return memory_of(devices, None) - caches_bytes if caches_bytes else None


def draft_cache_bytes(guesses: HeadGuesses | None) -> int:
    """Of the KV caches of a draft model on the device; 0 where there is none."""
    draft = None if guesses is None else guesses.draft
    return draft.cache_bytes if isinstance(draft, DraftThread) else 0


def announced_draft(identifier: str, tokenizer: str, draft: DraftModel) -> AnnouncedDraft:
    """What is announced of a draft model: the end of its name, its tokenizer by the hash in hexadecimal digits, and
    what a guess takes here, as measured now."""
    return AnnouncedDraft(
        _announced_name(identifier), bytes.fromhex(tokenizer)[:TOKENIZER_HASH_BYTES], guess_ms(draft)
    )


def guess_ms(draft: DraftModel) -> float:
    """Milliseconds that a guess takes: the least of some trips' mean, for others use the machine too."""
    source = DraftLookup(draft)
    source.begin_with([0] * SEEN_TOKENS)
    times_s = []
    for _ in range(TRIED_TRIPS):
        begun_s, chain = time.perf_counter(), source.begin()
        for _ in range(TRIED_GUESSES):
            if (found := chain.guess()) is not None:
                chain.follow(found[0])
        times_s.append(time.perf_counter() - begun_s)
        source.extend([0])
    return 1000 * min(times_s) / TRIED_GUESSES


def open_draft(
    identifier: str, served: str, files: Mapping[str, str], memory_bytes: int | None
) -> DraftModel:
    """The small draft model of that name or folder, for the model that is `served`; `files` are hashes of that one's.

    Raises:
        DraftUnusable: one sentence: there is none, it is no draft for that model, or does not fit into `memory_bytes`.
    """
    folder = _folder_of(identifier, served, files)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    draft = _read(identifier, folder, config)
    _require_room(identifier, draft_bytes(draft), memory_bytes)
    return draft


def draft_bytes(draft: DraftModel) -> int:
    """What it takes of --memory: its weights, and the KV caches of DRAFTED_SESSIONS sessions."""
    return draft.size_bytes + DRAFTED_SESSIONS * draft.cache_bytes


def _planned(identifier: str, folder: Path, model: LocalModel, memory_bytes: int) -> PlannedDraft:
    """What the draft model in that folder takes, in the numbers that are served in. Raises DraftUnusable."""
    try:
        name = Path(identifier).name
        planned = plan_draft(folder, name, model.spec.dtype, model.digests, DRAFTED_SESSIONS)
    except (StoreError, OSError, ValueError) as error:
        raise DraftUnusable(f"--draft {identifier} cannot be a draft model: {error}") from error
    _require_room(identifier, planned.needed_bytes, memory_bytes)
    return planned


def _loaded(identifier: str, planned: PlannedDraft, model: LocalModel, device: str) -> DraftThread:
    """The draft model on the device, and what is to be its thread. Raises DraftUnusable."""
    try:
        engine, times = load_draft(planned, device, model.spec.vocabulary_size)
    except (WeightsError, OSError, MemoryError, RuntimeError, ValueError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise DraftUnusable(f"--draft {identifier} cannot be computed on {device}: {detail}") from error
    return DraftThread(engine, times, DRAFTED_SESSIONS)


def _announced_name(identifier: str) -> str:
    return Path(identifier).name[-MAX_DRAFT_CHARACTERS:]


def _is_small(identifier: str, folder: Path) -> bool:
    """Whether it is computed on the loop that serves: a Llama of few parameters in one file. Raises DraftUnusable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        headers = [read_header(path) for path in weight_files(folder)[0]]
    except (StoreError, OSError, ValueError) as error:
        raise DraftUnusable(f"--draft {identifier} cannot be read from {folder}: {error}") from error
    tensors = [tensor for header in headers for tensor in header]
    is_read = len(headers) == 1 and all(tensor.dtype in NUMPY_DTYPES for tensor in tensors)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return is_read and parameters <= MOST_PARAMETERS and _is_plain_llama(config)


def _is_plain_llama(config: Mapping[str, Any]) -> bool:
    biased = config.get("attention_bias") or config.get("mlp_bias")
    return config.get("model_type") == "llama" and not biased


def _folder_of(identifier: str, served: str, files: Mapping[str, str]) -> Path:
    """Where the draft model is, whose tokenizer is that of the model that is served. Raises DraftUnusable."""
    if is_from_hub(identifier):
        raise DraftUnusable(
            f"--draft {identifier} is neither bundled nor a directory. Fetch it first (`hf download {identifier} "
            "--local-dir DIR`) and name that directory"
        )
    try:
        folder = resolve(identifier)
    except CheckpointNotFound as error:
        raise DraftUnusable(f"--draft {identifier}: {error.detail}") from error
    _require_tokenizer(identifier, folder, served, files)
    return folder


def _require_room(identifier: str, needed_bytes: int, memory_bytes: int | None) -> None:
    if memory_bytes is not None and needed_bytes > memory_bytes // 2:
        missing = needed_bytes - memory_bytes // 2
        raise DraftUnusable(
            f"--draft {identifier} takes {needed_bytes} bytes with its KV caches, and at most half of --memory is for "
            f"a draft: {missing} bytes are missing"
        )


def _require_tokenizer(identifier: str, folder: Path, served: str, files: Mapping[str, str]) -> None:
    path = folder / TOKENIZER
    own = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
    wanted = files.get(TOKENIZER, "none")
    if own != wanted or own == "none":
        raise DraftUnusable(
            f"--draft {identifier} has another tokenizer than {served}: the hash of its {TOKENIZER} is {own[:16]}, "
            f"that of the model's is {wanted[:16]}"
        )


def _read(identifier: str, folder: Path, config: Mapping[str, Any]) -> DraftModel:
    if not _is_plain_llama(config):
        raise DraftUnusable(
            f"--draft {identifier} is no Llama without biases, which a small draft model has to be"
        )
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    rope = config.get("rope_parameters") or config
    shape = DraftShape(
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        norm_epsilon=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        most_positions=int(config["max_position_embeddings"]),
    )
    try:
        stored = load_file(folder / "model.safetensors")
        parameters = sum(tensor.size for tensor in stored.values())
        if parameters > MOST_PARAMETERS:
            raise DraftUnusable(
                f"--draft {identifier} has {parameters} parameters, and a small one has {MOST_PARAMETERS} at most"
            )
        tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in stored.items()}
        return DraftModel.of(shape, int(config["num_hidden_layers"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DraftUnusable(f"--draft {identifier} cannot be read from {folder}: {error!r}") from error
