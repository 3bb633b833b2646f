"""The draft model that a peer guesses with: found, held against the model that is served, and read."""

import hashlib
import json
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
from molink.peer.engine.guessing import DRAFTED_SESSIONS, HeadGuesses
from molink.peer.models.model import LocalModel
from molink.peer.speculation.draft_model import SEEN_TOKENS, DraftLookup, DraftModel, DraftShape
from molink.shards.checkpoint.catalog import CheckpointNotFound, is_from_hub, resolve

TOKENIZER: Final = "tokenizer.json"
MOST_PARAMETERS: Final = 4_000_000
"""It is computed on the loop that serves, between a trip and the next: more would hold up others."""

TRIED_TRIPS, TRIED_GUESSES = 5, 4
"""By which it is measured what a guess takes, some milliseconds in all."""


class DraftUnusable(Exception):
    """The draft model cannot be used; one sentence says why, and what to do."""


def guesses_of(option: str, model: LocalModel, memory_bytes: int | None) -> tuple[HeadGuesses | None, int]:
    """What tokens are guessed from where this peer is the head, as `--draft` says, and what it takes of the memory;
    None: they are not guessed. Raises DraftUnusable."""
    if option == "off":
        return None, 0
    announced: tuple[AnnouncedDraft, ...] = (AnnouncedDraft(LOOKUP), AnnouncedDraft(TABLES))
    if option in ("auto", "lookup"):
        told = announced if option == "auto" else announced[:1]
        return HeadGuesses(tables=option == "auto", announced=told), 0
    draft = open_draft(option, model.spec.name, model.manifest.files, memory_bytes)
    measured = announced_draft(option, model.manifest.files[TOKENIZER], draft)
    draft = replace(draft, guess_ms=measured.guess_ms)
    guesses = HeadGuesses(tables=True, draft=draft, announced=(*announced, measured))
    return guesses, draft_bytes(draft)


def announced_draft(identifier: str, tokenizer: str, draft: DraftModel) -> AnnouncedDraft:
    """What is announced of a draft model: the end of its name, its tokenizer by the hash in hexadecimal digits, and
    what a guess takes here, as measured now."""
    name = Path(identifier).name[-MAX_DRAFT_CHARACTERS:]
    return AnnouncedDraft(name, bytes.fromhex(tokenizer)[:TOKENIZER_HASH_BYTES], guess_ms(draft))


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
    """The draft model of that name or folder, for the model that is `served`, of whose files these are the hashes.

    Raises:
        DraftUnusable: one sentence: there is none, it is no draft for that model, or does not fit into `memory_bytes`.
    """
    if is_from_hub(identifier):
        raise DraftUnusable(
            f"--draft {identifier} is neither bundled nor a directory. Fetch it first (`hf download {identifier}`) and "
            "name its directory"
        )
    try:
        folder = resolve(identifier)
    except CheckpointNotFound as error:
        raise DraftUnusable(f"--draft {identifier}: {error.detail}") from error
    _require_tokenizer(identifier, folder, served, files)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    draft = _read(identifier, folder, config)
    needed_bytes = draft_bytes(draft)
    if memory_bytes is not None and needed_bytes > memory_bytes // 2:
        missing = needed_bytes - memory_bytes // 2
        raise DraftUnusable(
            f"--draft {identifier} takes {needed_bytes} bytes with its KV caches, and at most half of --memory is for "
            f"a draft: {missing} bytes are missing"
        )
    return draft


def draft_bytes(draft: DraftModel) -> int:
    """What it takes of --memory: its weights, and the KV caches of DRAFTED_SESSIONS sessions."""
    return draft.size_bytes + DRAFTED_SESSIONS * draft.cache_bytes


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
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise DraftUnusable(f"--draft {identifier} is no Llama without biases, which a draft model has to be")
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
                f"--draft {identifier} has {parameters} parameters, and a draft model has {MOST_PARAMETERS} at most"
            )
        tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in stored.items()}
        return DraftModel.of(shape, int(config["num_hidden_layers"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DraftUnusable(f"--draft {identifier} cannot be read from {folder}: {error!r}") from error
