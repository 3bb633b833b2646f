"""Model resolver: a model's name to its description and tokenizer, from this machine or from peers by hash.

What peers hand out is somebody else's work. Its tokenizer is loaded in a process with limits first, so one that loads
without end, fills the memory or ends its process does so there; only then is it loaded here, to make text of tokens,
and only if its decoder does nothing but replace and join.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import ModelNotFound, SwarmUnavailable, as_said
from molink.client.models.fetching import ArtifactRequest, NotFetched, fetch
from molink.client.models.model_choice import ModelCandidate, asked_in_order, candidates
from molink.client.text.text_work import TextWork
from molink.dht.records.records import ServedModel
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.checkpoint import catalog, store
from molink.shards.checkpoint.manifest import MAX_MANIFEST_BYTES
from molink.shards.spec import ModelSpec
from molink.shards.text.tokenizer import Tokenizer, TokenizerError, read_files
from molink.shards.text.tokenizer_files import require_plain_decoder

MAX_FILE_BYTES = 64 * 1024 * 1024
OPEN_TIMEOUT_S = 120.0
"""For all that is fetched of a model, from whomever."""
NEXT_AFTER_S = 4.0
"""A model that has not been fetched within this time is not waited for by the one that is next in rank."""
GRACE_S = 2.0
"""What it has left once that one has been."""
MOST_CANDIDATES = 4
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
class ResolvedModel:
    """Resolved model: its description, and the tokenizer that makes text of its tokens."""

    spec: ModelSpec
    tokenizer_files: Mapping[str, bytes]
    """Contents by name."""
    from_peers: bool
    """Whether they are strangers' work, handed out by peers, and not files of this machine."""


async def open_model(
    connection: SwarmConnection,
    model: str | None,
    dtype: str | None,
    quantization: str | None,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> ResolvedModel:
    """Finds the model and its tokenizer.

    `model` is a bundled name, a local folder, the name under which peers serve it, or at least 8 digits of its hash.
    None is the one of which all layers are held, by a peer that the user named or in the most networks.

    Raises:
        ModelNotFound: nobody serves it and this machine has no copy, or one that is not what the swarm serves.
        SwarmUnavailable: no peer is known, or none hands out the model's description in time.
    """
    views = connection.snapshot()
    folder = await asyncio.to_thread(_local_folder, model) if model is not None else None
    if folder is not None:
        return await _open_local(connection, folder, model or "", dtype, quantization)
    matching = [view for view in views if _matches(view.facts.model, model, dtype, quantization)]
    found = candidates(matching, connection.initial_peer_ids)
    if not found:
        if not views:
            raise SwarmUnavailable("no peer of this swarm is known, so no model can be looked up in it")
        names = ", ".join(sorted({f"{view.facts.model.name} ({view.facts.model.dtype})" for view in views}))
        raise ModelNotFound(model or "any", f"the swarm serves {names}; a local folder would also do")
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            spec, files = await _first_fetched(connection, found)
    except TimeoutError:
        raise SwarmUnavailable(
            f"no peer handed out the description of {found[0].served.name} within {OPEN_TIMEOUT_S:g} s"
        ) from None
    others = {one.served.name for one in found if one.complete} - {spec.name}
    if model is None and others:
        report(f"the swarm serves {', '.join(sorted(others))} too; {spec.name} is asked, --model chooses")
    return ResolvedModel(spec, files, from_peers=True)


async def load_tokenizer(access: ResolvedModel, tried: TextWork | None) -> Tokenizer:
    """The tokenizer, in this process: to make text of tokens. Work of strangers has to load in `tried` before, which
    alone has its chat template.

    Raises:
        SwarmUnavailable: it cannot be used.
    """
    try:
        if access.from_peers:
            require_plain_decoder(access.tokenizer_files)
            if tried is not None:
                await tried.encode("a")
        load = partial(Tokenizer.from_files, with_template=tried is None)
        return await asyncio.to_thread(load, access.tokenizer_files)
    except TokenizerError as error:
        if not access.from_peers:
            raise ModelNotFound(access.spec.name, str(error)) from error
        raise SwarmUnavailable(
            f"the tokenizer of {access.spec.name} that peers hand out cannot be used: {as_said(str(error))} "
            "A copy of the model on this machine would do"
        ) from error


def _local_folder(model: str) -> Path | None:
    if model in catalog.BUNDLED or Path(model).is_dir():
        return catalog.resolve(model)
    return None


async def _open_local(
    connection: SwarmConnection, folder: Path, name: str, dtype: str | None, quantization: str | None
) -> ResolvedModel:
    """A copy on this machine says what the model is; the swarm says in which numbers it is served."""
    views = connection.snapshot()
    try:
        manifest = await asyncio.to_thread(store.read_manifest, folder)
        served_models = [(view.facts.model.name, view.facts.model.content_hash) for view in views]
        catalog.require_identity(name, folder, manifest.content_hash, served_models)
    except store.StoreError as error:
        raise ModelNotFound(name, str(error)) from error
    same = [
        view
        for view in views
        if _matches(view.facts.model, None, dtype, quantization)
        and view.facts.model.content_hash == manifest.content_hash
    ]
    found = candidates(same, connection.initial_peer_ids)
    served = found[0].served if found else None
    spec = store.describe(
        manifest,
        dtype=served.dtype if served else dtype or "auto",
        quantization=served.quantization if served else quantization or "none",
        name=name,
    )
    try:
        files = await asyncio.to_thread(read_files, folder)
    except TokenizerError as error:
        raise ModelNotFound(name, str(error)) from error
    return ResolvedModel(spec, files, from_peers=False)


def _matches(served: ServedModel, model: str | None, dtype: str | None, quantization: str | None) -> bool:
    return (
        (model is None or served.name == model or (len(model) >= 8 and served.model_hash.startswith(model)))
        and dtype in (None, "auto", served.dtype)
        and quantization in (None, served.quantization)
    )


async def _first_fetched(
    connection: SwarmConnection, found: Sequence[ModelCandidate]
) -> tuple[ModelSpec, Mapping[str, bytes]]:
    """The likeliest model that is really handed out: who only claims to have one keeps nobody waiting for it.

    Raises:
        SwarmUnavailable: none is; the likeliest one's reasons.
    """
    tasks: list[asyncio.Task[tuple[ModelSpec, Mapping[str, bytes]]]] = []
    left = list(reversed(found[:MOST_CANDIDATES]))
    try:
        while left or any(not task.done() for task in tasks):
            if left:
                tasks.append(asyncio.create_task(_fetch_model(connection, left.pop())))
            under_way = [task for task in tasks if not task.done()]
            if under_way:
                timeout_s = NEXT_AFTER_S if left else None
                await asyncio.wait(under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() and task.exception() is None for task in tasks):
                break
        better = _before_first_success(tasks)
        if better:
            await asyncio.wait(better, timeout=GRACE_S)
        for task in tasks:
            if task.done() and task.exception() is None:
                return task.result()
        errors = [error for task in tasks if (error := task.exception()) is not None]
        unexpected = next((error for error in errors if not isinstance(error, NotFetched)), None)
        if unexpected is not None:
            raise unexpected
        raise SwarmUnavailable(f"no peer handed out the description of {found[0].served.name}: {errors[0]}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _before_first_success(
    tasks: "Sequence[asyncio.Task[tuple[ModelSpec, Mapping[str, bytes]]]]",
) -> "list[asyncio.Task[tuple[ModelSpec, Mapping[str, bytes]]]]":
    """Those of a higher rank that are still under way."""
    better = []
    for task in tasks:
        if not task.done():
            better.append(task)
        elif task.exception() is None:
            return better
    return []


async def _fetch_model(
    connection: SwarmConnection, one: ModelCandidate
) -> tuple[ModelSpec, Mapping[str, bytes]]:
    """Nothing but peers knows it: their word is checked against the hash. Raises NotFetched."""
    served = one.served
    views = asked_in_order(one.views, connection.initial_peer_ids, random.Random())
    manifest, first = await fetch(
        connection.links,
        views,
        ArtifactRequest(
            lambda _: pb.Request(get_manifest=pb.GetManifest(model_hash=served.model_hash)),
            MAX_MANIFEST_BYTES,
            partial(_manifest, served),
        ),
    )
    try:
        spec = store.describe(
            manifest, dtype=served.dtype, quantization=served.quantization, name=served.name
        )
    except ValueError as error:
        raise NotFetched(str(error)) from error
    if spec.model_hash != served.model_hash:
        raise NotFetched("what is announced of the model does not fit its hash")
    wanted = {name: sha256 for name, sha256 in manifest.files.items() if name in _TOKENIZER_FILES}
    files: dict[str, bytes] = {}
    for name, sha256 in wanted.items():
        order = sorted(views, key=lambda view: view.peer_id != first.peer_id)
        files[name], first = await fetch(connection.links, order, _wanted_file(served.model_hash, sha256))
    return spec, files


def _manifest(served: ServedModel, data: bytes) -> store.Manifest:
    manifest = store.Manifest.from_bytes(data)
    if manifest.content_hash != served.content_hash:
        raise ValueError("its manifest does not have the announced hash")
    return manifest


def _wanted_file(model_hash: str, sha256: str) -> ArtifactRequest[bytes]:
    def checked(data: bytes) -> bytes:
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"the file {sha256[:12]} does not have its hash")
        return data

    return ArtifactRequest(
        lambda offset: pb.Request(get_file=pb.GetFile(model_hash=model_hash, sha256=sha256, offset=offset)),
        MAX_FILE_BYTES,
        checked,
    )
