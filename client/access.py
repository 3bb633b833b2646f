"""From what a user calls a model to its description and tokenizer: this machine's copy, or the peers' by hash."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from molink.client.connection import Connection
from molink.client.errors import ModelNotFound, SwarmUnavailable
from molink.dht.records import PeerView, ServedModel
from molink.peer.link.link import LinkError
from molink.peer.protocol import molink_pb2 as pb
from molink.shards import catalog, store
from molink.shards.spec import ModelSpec
from molink.shards.tokenizer import Tokenizer, read_files

PART_TIMEOUT_S = 10.0
MAX_FILE_BYTES = 256 * 1024 * 1024
ASKED_PEERS = 3
_TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelAccess:
    """A model that can be asked for tokens, with the tokenizer that turns them into text."""

    spec: ModelSpec
    tokenizer: Tokenizer
    tokenizer_files: Mapping[str, bytes]
    """What the tokenizer was made of, contents by name."""
    from_peers: bool
    """Whether they are strangers' work, handed out by peers, and not files of this machine."""


async def open_model(
    connection: Connection, model: str | None, dtype: str | None, quantization: str | None
) -> ModelAccess:
    """Finds the model and its tokenizer.

    `model` is a bundled name, a local folder, the name under which peers serve it, or at least 8 digits of its hash.
    None is what most peers serve.

    Raises:
        ModelNotFound: nobody serves it and this machine has no copy, or one that is not what the swarm serves.
        SwarmUnavailable: no peer is known, or none hands out the model's description.
    """
    views = connection.snapshot()
    folder = await asyncio.to_thread(_local_folder, model) if model is not None else None
    if folder is not None:
        return await _open_local(folder, model or "", views, dtype, quantization)
    served = _choose(_matching(views, model, dtype, quantization))
    if served is None:
        if not views:
            raise SwarmUnavailable("no peer of this swarm is known, so no model can be looked up in it")
        names = ", ".join(sorted({f"{view.facts.model.name} ({view.facts.model.dtype})" for view in views}))
        raise ModelNotFound(model or "any", f"the swarm serves {names}; a local folder would also do")
    return await _open_served(connection, served, views)


def _local_folder(model: str) -> Path | None:
    if model in catalog.BUNDLED or Path(model).is_dir():
        return catalog.resolve(model)
    return None


async def _open_local(
    folder: Path, name: str, views: Sequence[PeerView], dtype: str | None, quantization: str | None
) -> ModelAccess:
    """A copy on this machine says what the model is; the swarm says in which numbers it is served."""
    try:
        manifest = await asyncio.to_thread(store.read_manifest, folder)
        served_models = [(view.facts.model.name, view.facts.model.content_hash) for view in views]
        catalog.require_identity(name, folder, manifest.content_hash, served_models)
    except store.StoreError as error:
        raise ModelNotFound(name, str(error)) from error
    same = [
        served
        for served in _matching(views, None, dtype, quantization)
        if served.content_hash == manifest.content_hash
    ]
    served = _choose(same)
    spec = store.describe(
        manifest,
        dtype=served.dtype if served else dtype or "auto",
        quantization=served.quantization if served else quantization or "none",
        name=name,
    )
    files = await asyncio.to_thread(read_files, folder)
    return ModelAccess(spec, await asyncio.to_thread(Tokenizer.from_files, files), files, from_peers=False)


def _matching(
    views: Sequence[PeerView], model: str | None, dtype: str | None, quantization: str | None
) -> list[ServedModel]:
    return [
        served
        for served in (view.facts.model for view in views)
        if (
            model is None or served.name == model or (len(model) >= 8 and served.model_hash.startswith(model))
        )
        and dtype in (None, "auto", served.dtype)
        and quantization in (None, served.quantization)
    ]


def _choose(candidates: Sequence[ServedModel]) -> ServedModel | None:
    """The one that most peers serve; the smallest hash of equals, so that clients agree."""
    counts = Counter(served.model_hash for served in candidates)
    best = min(counts, key=lambda model_hash: (-counts[model_hash], model_hash), default=None)
    return next((served for served in candidates if served.model_hash == best), None)


async def _open_served(connection: Connection, served: ServedModel, views: Sequence[PeerView]) -> ModelAccess:
    """Nothing but peers knows it: their word is checked against the hash."""
    reasons: list[str] = []
    for view in [view for view in views if view.facts.model.model_hash == served.model_hash][:ASKED_PEERS]:
        try:
            data = await _fetch(
                connection, view, pb.Request(get_manifest=pb.GetManifest(model_hash=served.model_hash))
            )
            manifest = store.Manifest.from_bytes(data)
            if manifest.content_hash != served.content_hash:
                raise ValueError("its manifest does not have the announced hash")
            spec = store.describe(
                manifest, dtype=served.dtype, quantization=served.quantization, name=served.name
            )
            files = {
                name: await _fetch_file(connection, view, served.model_hash, sha256)
                for name, sha256 in manifest.files.items()
                if name in _TOKENIZER_FILES
            }
            return ModelAccess(spec, Tokenizer.from_files(files), files, from_peers=True)
        except (LinkError, ValueError) as error:
            reasons.append(f"{view.facts.name}: {error}")
    raise SwarmUnavailable(f"no peer handed out the description of {served.name}: {'; '.join(reasons)}")


async def _fetch_file(connection: Connection, view: PeerView, model_hash: str, sha256: str) -> bytes:
    asked = pb.GetFile(model_hash=model_hash, sha256=sha256)
    data = await _fetch(connection, view, pb.Request(get_file=asked))
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"the file {sha256[:12]} does not have its hash")
    return data


async def _fetch(connection: Connection, view: PeerView, request: pb.Request) -> bytes:
    """A manifest or file, part by part."""
    link = await connection.links.to(view.facts)
    content = bytearray()
    while True:
        if request.WhichOneof("body") == "get_file":
            request.get_file.offset = len(content)
        response, payload = await link.request(request, PART_TIMEOUT_S)
        if response.WhichOneof("body") != "content":
            raise LinkError(view.peer_id, response.refusal.detail or "it does not hand that out")
        if response.content.total_bytes > MAX_FILE_BYTES:
            raise ValueError(f"a file of {response.content.total_bytes} bytes is not a tokenizer")
        content += payload
        if len(content) >= response.content.total_bytes or not payload:
            return bytes(content)
