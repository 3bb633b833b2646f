"""A live swarm as `molink-peer status --json` describes it, as the volunteers of a simulated one.

The description says of each peer what it holds, what is free, where it is, what its line carries, and what routers
count with: how long a layer takes it by batch size and by tokens of a prompt, what a step takes whatever its layers,
what contexts and the model's ends add, how fast it loads. Of the round trips count first those under `links`, as a
gateway's overview has them, then what coordinates predict. What a document leaves out, as those of older versions do,
is assumed as a router assumes what nobody has measured.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from molink.dht.records.records import DeviceProperties, LayerLatency, LinkMeasurement, PrefillLatency
from molink.peer.memory.memory import MemoryPlan
from molink.peer.profiling.profile import Profile
from molink.routing.cost.cost import CostModel
from molink.shards.spec import ModelSpec, merge_spans
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.swarm.population import snapshot_values as values
from molink.simnet.swarm.population.hardware import CardKind
from molink.simnet.swarm.population.snapshot_values import SnapshotError
from molink.simnet.swarm.population.volunteers import Volunteer, identity_of, plain_facts

_LOAD_BYTES_PER_S = 2e9
_UNKNOWN_MBPS = CostModel().unknown_bandwidth_mbps


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
    except json.JSONDecodeError as error:
        raise SnapshotError(f"{name}, line {error.lineno}, is no JSON: {error.msg}") from None
    except RecursionError:
        raise SnapshotError(f"{name}, line 1, is no JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise SnapshotError(f"{name} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise SnapshotError(f"{name} is no JSON object: it must be what molink-peer status --json prints")
    model = _only(values.objects(document, "models", name), f"{name}, models")
    layers = int(values.number(model, "layers", f"{name}, models[0]", least=1, most=10_000))
    model_hash = values.text(model, "model_hash", f"{name}, models[0]")
    spec = replace(shape, layers=layers).spec()
    volunteers, names, ids = [], {}, {}
    for at, peer in enumerate(values.objects(document, "peers", name)):
        where = f"{name}, peers[{at}]"
        if values.text(peer, "model_hash", where) != model_hash:
            continue
        if peer.get("same_protocol") is False:
            continue  # it can be in no circuit
        peer_id = values.text(peer, "peer_id", where)
        if peer_id in ids:
            raise SnapshotError(f"{where}, key peer_id: {peer_id!r} is there twice")
        volunteer = _volunteer(peer, spec, where)
        volunteers.append(volunteer)
        ids[peer_id] = volunteer.peer_id
        names[volunteer.peer_id] = f"{values.text(peer, 'name', where)}\n{peer_id}"
    if not volunteers:
        raise SnapshotError(f"{name}, key peers: nobody serves the model {model_hash[:12]}")
    rtt_ms = _links(document, ids, name)
    return LiveSwarm(spec, _announcing(volunteers, rtt_ms), names, rtt_ms)


def _volunteer(peer: Mapping[str, object], spec: ModelSpec, where: str) -> Volunteer:
    held = merge_spans(tuple(values.spans(peer, "spans", spec.layers, where)))
    free_weight, free_kv = (
        int(values.number(peer, key, where, least=0, most=2**60))
        for key in ("free_weight_bytes", "free_kv_bytes")
    )
    uplink = peer.get("uplink_mbps")
    uplink_mbps = None if uplink is None else values.number(peer, "uplink_mbps", where, least=1e-6, most=1e7)
    processors = int(values.number_or(peer, "processors", where, 1, most=65_535))
    weight_limit = sum(map(spec.weight_bytes, held)) + free_weight
    kind = CardKind(
        name="as announced",
        device=DeviceProperties("cpu", str(peer.get("device") or ""), 1, 0, "", processors),
        profile=_profile(peer, where),
        memory=MemoryPlan(weight_limit + free_kv, 0, weight_limit),
    )
    # Ids stand for those of the file: here records are signed, and nobody has the peers' own keys.
    identity = identity_of(0, values.text(peer, "peer_id", where))
    facts = replace(
        plain_facts(identity, spec, values.text(peer, "name", where)[:64], kind),
        uplink_mbps=uplink_mbps,
        span_limit=values.span_or_none(peer, "span_limit", spec.layers, where),
        coordinate=values.coordinate_or_none(peer, "coordinate", where),
    )
    return Volunteer(identity, facts, kind.memory, uplink_mbps, None, spans=held)


def _profile(peer: Mapping[str, object], where: str) -> Profile:
    single_ms = values.number(peer, "layer_ms", where, least=0, most=values.MOST_MS)
    by_batch_size = values.times_ms(peer, "layer_ms_by_batch_size", where) or [(1, single_ms)]
    embed_ms, head_ms, step_ms, decode_context_ms, prefill_context_ms = (
        values.number_or(peer, key, where, 0.0)
        for key in ("embed_ms", "head_ms", "step_ms", "decode_context_ms", "prefill_context_ms")
    )
    return Profile(
        layer_latencies=tuple(LayerLatency(*one) for one in by_batch_size),
        embed_ms=embed_ms,
        head_ms=head_ms,
        load_bytes_per_s=values.number_or(peer, "load_bytes_per_s", where, _LOAD_BYTES_PER_S, most=1e15),
        prefill_latencies=tuple(
            PrefillLatency(*one) for one in values.times_ms(peer, "prefill_layer_ms", where)
        ),
        decode_context_ms=decode_context_ms,
        prefill_context_ms=prefill_context_ms,
        step_ms=step_ms,
    )


def _links(document: Mapping[str, object], ids: Mapping[str, str], name: str) -> dict[tuple[str, str], float]:
    found = {}
    for at, link in enumerate(values.objects(document, "links", name) if "links" in document else ()):
        where = f"{name}, links[{at}]"
        if "from" not in link:
            continue  # a link of this machine's own peer, as its status lists them
        ends = tuple(ids.get(values.text(link, key, where), "") for key in ("from", "to"))
        rtt_ms = values.number(link, "rtt_ms", where, least=0, most=values.MOST_MS)
        if all(ends):
            found[ends[0], ends[1]] = rtt_ms
    return found


def _announcing(
    volunteers: Sequence[Volunteer], rtt_ms: Mapping[tuple[str, str], float]
) -> tuple[Volunteer, ...]:
    """Each with the round trips that it measured among what it says of itself."""
    links: dict[str, list[LinkMeasurement]] = defaultdict(list)
    for (source, to), measured_ms in rtt_ms.items():
        links[source].append(LinkMeasurement(to, measured_ms))
    return tuple(
        replace(one, facts=replace(one.facts, links=tuple(links[one.peer_id]))) for one in volunteers
    )


def _only(models: Sequence[Mapping[str, object]], where: str) -> Mapping[str, object]:
    if len(models) != 1:
        raise SnapshotError(f"{where}: one model is needed, there are {len(models)}")
    return models[0]
