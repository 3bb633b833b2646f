"""A live swarm as `molink-peer status --json` describes it, as the volunteers of a simulated one.

The description says of each peer what it holds, what is free, how long a layer takes it, and what its line carries.
It says nothing about batches, prompts or where a peer is: what a router assumes of those that nobody has measured is
assumed here too. Round trips count if the document has `links`, as a gateway's overview does.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from molink.dht.records import Device, LayerLatency
from molink.peer.memory import MemoryPlan
from molink.peer.profiling.profile import Profile
from molink.routing.cost import CostModel
from molink.shards.spec import ModelSpec, Span, merge_spans
from molink.simnet.model_shapes import ModelShape
from molink.simnet.swarm.hardware import Kind
from molink.simnet.swarm.volunteers import Volunteer, identity_of, plain_facts

_LOAD_BYTES_PER_S = 2e9
_UNKNOWN_MBPS = CostModel().unknown_bandwidth_mbps


class SnapshotError(ValueError):
    """The file is no such description; the message is one sentence that names it, and the line or the key."""


@dataclass(frozen=True, slots=True)
class LiveSwarm:
    """The peers of one model."""

    model: ModelSpec
    volunteers: tuple[Volunteer, ...]
    names: Mapping[str, str]
    """As the file has them, by the peer id that stands for each here."""
    rtt_ms: Mapping[tuple[str, str], float]

    def without(self, peer: str) -> "LiveSwarm":
        """The swarm if that peer, by id, the end of its id, or name, were not there. ValueError if none or several
        are meant."""
        meant = [one for one, text in self.names.items() if peer in text.split("\n") or text.endswith(peer)]
        if len(meant) != 1:
            raise ValueError(f"--without {peer}: {len(meant) or 'no'} peers of the snapshot are called so")
        return replace(self, volunteers=tuple(one for one in self.volunteers if one.peer_id != meant[0]))

    def with_bandwidth(self, factor: float) -> "LiveSwarm":
        """The swarm if every line carried so many times as much."""
        faster = []
        for one in self.volunteers:
            mbps = (one.uplink_mbps or _UNKNOWN_MBPS) * factor
            faster.append(replace(one, uplink_mbps=mbps, facts=replace(one.facts, uplink_mbps=mbps)))
        return replace(self, volunteers=tuple(faster))


def read_snapshot(path: Path, shape: ModelShape) -> LiveSwarm:
    """The swarm in a file; of its model the layers are as large as the shape's. Raises SnapshotError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SnapshotError(f"{path} is no text in UTF-8: byte {error.start} is out of place") from error
    return parse_snapshot(text, str(path), shape)


def parse_snapshot(text: str, name: str, shape: ModelShape) -> LiveSwarm:
    """As `read_snapshot`; `name` is what errors call the file."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise SnapshotError(
            f"{name}, line {line}, is no JSON: {getattr(error, 'msg', 'nested too deeply')}"
        ) from None
    if not isinstance(document, dict):
        raise SnapshotError(f"{name} is no JSON object: it must be what molink-peer status --json prints")
    model = _only(_objects(document, "models", name), f"{name}, models")
    layers = int(_number(model, "layers", f"{name}, models[0]", least=1, most=10_000))
    model_hash = _text(model, "model_hash", f"{name}, models[0]")
    spec = replace(shape, layers=layers).spec()
    volunteers, names, ids = [], {}, {}
    for at, peer in enumerate(_objects(document, "peers", name)):
        where = f"{name}, peers[{at}]"
        if _text(peer, "model_hash", where) != model_hash:
            continue
        peer_id = _text(peer, "peer_id", where)
        if peer_id in ids:
            raise SnapshotError(f"{where}, key peer_id: {peer_id!r} is there twice")
        volunteer = _volunteer(peer, spec, where)
        volunteers.append(volunteer)
        ids[peer_id] = volunteer.peer_id
        names[volunteer.peer_id] = f"{_text(peer, 'name', where)}\n{peer_id}"
    if not volunteers:
        raise SnapshotError(f"{name}, key peers: nobody serves the model {model_hash[:12]}")
    return LiveSwarm(spec, tuple(volunteers), names, _links(document, ids, name))


def _volunteer(peer: Mapping[str, object], spec: ModelSpec, where: str) -> Volunteer:
    spans = merge_spans(tuple(_spans(peer, spec.layers, where)))
    free_weight, free_kv = (
        int(_number(peer, key, where, least=0, most=2**60)) for key in ("free_weight_bytes", "free_kv_bytes")
    )
    layer_ms = _number(peer, "layer_ms", where, least=0, most=1e6)
    uplink = peer.get("uplink_mbps")
    uplink_mbps = None if uplink is None else _number(peer, "uplink_mbps", where, least=1e-6, most=1e7)
    weight_limit = sum(map(spec.weight_bytes, spans)) + free_weight
    kind = Kind(
        name="as announced",
        device=Device("cpu", str(peer.get("device") or ""), 1, 0, "", 1),
        profile=Profile((LayerLatency(1, layer_ms),), 0.0, 0.0, _LOAD_BYTES_PER_S),
        memory=MemoryPlan(weight_limit + free_kv, 0, weight_limit),
    )
    # Ids stand for those of the file: here records are signed, and nobody has the peers' own keys.
    identity = identity_of(0, _text(peer, "peer_id", where))
    facts = replace(
        plain_facts(identity, spec, _text(peer, "name", where)[:64], kind), uplink_mbps=uplink_mbps
    )
    return Volunteer(identity, facts, kind.memory, uplink_mbps, None, spans=spans)


def _spans(peer: Mapping[str, object], layers: int, where: str) -> list[Span]:
    value = peer.get("spans")
    if not isinstance(value, list):
        raise SnapshotError(f"{where}, key spans: a list of [start, stop] is needed, got {value!r}")
    spans = []
    for one in value:
        pair = one if isinstance(one, list) and len(one) == 2 else [None, None]
        start, stop = pair
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= layers:
            raise SnapshotError(f"{where}, key spans: {one!r} is no span of {layers} layers")
        spans.append(Span(start, stop))
    return spans


def _links(document: Mapping[str, object], ids: Mapping[str, str], name: str) -> dict[tuple[str, str], float]:
    found = {}
    for at, link in enumerate(_objects(document, "links", name) if "links" in document else ()):
        where = f"{name}, links[{at}]"
        if "from" not in link:
            continue  # a link of this machine's own peer, as its status lists them
        ends = tuple(ids.get(_text(link, key, where), "") for key in ("from", "to"))
        rtt_ms = _number(link, "rtt_ms", where, least=0, most=1e6)
        if all(ends):
            found[ends[0], ends[1]] = rtt_ms
    return found


def _objects(document: Mapping[str, object], key: str, name: str) -> Sequence[Mapping[str, object]]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise SnapshotError(f"{name}, key {key}: a list of objects is needed")
    return value


def _only(models: Sequence[Mapping[str, object]], where: str) -> Mapping[str, object]:
    if len(models) != 1:
        raise SnapshotError(f"{where}: one model is needed, there are {len(models)}")
    return models[0]


def _text(one: Mapping[str, object], key: str, where: str) -> str:
    value = one.get(key)
    if not isinstance(value, str):
        raise SnapshotError(f"{where}, key {key}: a text is needed, got {value!r}")
    return value


def _number(one: Mapping[str, object], key: str, where: str, *, least: float, most: float) -> float:
    value = one.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SnapshotError(f"{where}, key {key}: a number is needed, got {value!r}")
    if not least <= value <= most:
        raise SnapshotError(f"{where}, key {key}: {value!r} is not from {least:g} to {most:g}")
    return value
