"""What a router expects of a prompt, from what peers have announced, is what their circuit's head then computes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.links.data_plane import SPEC, asynchronous, soon
from support.models.tiny_models import VOCABULARY
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import model
from support.swarms.swarm_examples import facts_of, state_of

from molink.client.circuit.reserving import describe
from molink.client.circuit.session_request import SessionRequest, describe_session
from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts, verify_facts
from molink.dht.records.records import LinkMeasurement, PeerFacts, PeerView, ServedModel
from molink.peer.engine import stepping
from molink.peer.engine.sessions import read_plan
from molink.peer.engine.steps import StepInput, StepOutput, compute
from molink.peer.models.model import LocalModel
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import CostModel, Criteria, Route, Snapshot, plan
from molink.routing.cost.first_token import prompt_chunks
from molink.routing.cost.prefill import prefill_ms
from molink.shards.batching.engine import Engine
from molink.shards.codec import encoded_bytes
from molink.shards.spec import ModelSpec, SamplingParams, Span
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.devices.timed_profile import timed_profile

__all__ = ["model"]
PROMPT = tuple(7 * position % VOCABULARY for position in range(300))
PROFILE = timed_profile(MODEL_SHAPES["qwen2-7b"], DEVICES["rtx-4090"])
UPLINKS_MBPS = (0.5, 2.0, 1.0)
COST = CostModel()


def announced(
    peers: Sequence[tuple[Identity, PeerFacts]],
    spans: Sequence[Span],
    spec: ModelSpec,
    step_tokens: Sequence[int],
) -> dict[str, PeerView]:
    """Peers as a directory has them: with times of a large model, and lines on which the small one's rows take as long
    as that one's do on usual lines."""
    views = {}
    served = ServedModel(
        spec.model_hash, spec.content_hash, spec.name, spec.architecture, spec.dtype, "none", spec.layers
    )
    for (identity, known), span, tokens, uplink_mbps in zip(
        peers, spans, step_tokens, UPLINKS_MBPS, strict=True
    ):
        others = [other.peer_id for other, _ in peers if other is not identity]
        facts = replace(
            known, model=served, span_limit=span, layer_latencies=PROFILE.layer_latencies,
            prefill_latencies=PROFILE.prefill_latencies, step_ms=1.0, uplink_mbps=uplink_mbps, step_tokens=tokens,
            links=tuple(LinkMeasurement(other, 20.0) for other in others),
        )  # fmt: skip
        state = replace(state_of(identity), spans=(span,), sessions=0, queued=0, free_weight_bytes=0)
        record = sign_facts(facts, identity)
        views[facts.peer_id] = PeerView(verify_facts(record), state, 0.0, record)
    return views


def planned(
    views: dict[str, PeerView], spec: ModelSpec, codec: str = "none"
) -> tuple[Route, pb.SessionDescriptor]:
    """The route of the prompt, and what its hops are told."""
    asked = SessionRequest(PROMPT, SamplingParams(max_new_tokens=2), activation_codec=codec)
    template = describe_session(spec, asked, bytes(32))
    route = plan(
        Snapshot(tuple(views.values()), spec),
        template.capacity_tokens,
        prompt_tokens=len(PROMPT),
        criteria=Criteria(activation_codec=template.activation_codec),
    )
    return route, describe(template, route, views, spec, epoch=1)


def predicted(descriptor: pb.SessionDescriptor, spec: ModelSpec) -> tuple[tuple[int, ...], float]:
    """By what the head is told: the chunks, and the milliseconds that the client waits for them."""
    stages = read_plan(descriptor, spec).stages
    lengths = prompt_chunks(stages, len(PROMPT))
    service_ms = COST.head_service_ms / stages[0].facts.device.processors
    return lengths, COST.unknown_rtt_ms + service_ms + prefill_ms(stages, lengths)


@pytest.mark.parametrize("step_tokens", [(512, 512, 512), (512, 100, 512), (512, 512, 90)])
@asynchronous
async def test_the_head_computes_the_chunks_that_the_route_was_predicted_with(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, step_tokens: tuple[int, ...]
) -> None:
    computed: list[tuple[int, int]] = []

    def watched(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
        computed.extend((one.session.place.hop, one.tokens) for one in inputs if one.prefill)
        return compute(engine, inputs)

    monkeypatch.setattr(stepping, "compute", watched)
    async with served_circuit(model, (2, 4), kv_tokens=400) as circuit:
        peers = [(peer.identity, peer.facts) for peer in circuit.peers]
        route, descriptor = planned(announced(peers, circuit.spans, model.spec, step_tokens), model.spec)
        await circuit.lease(descriptor)
        start = pb.Start(session=descriptor.session, epoch=1, token_ids=PROMPT)
        assert circuit.links[0].post(start)
        await soon(circuit.peers[0].client.handler.frames.get())
    lengths, expected_ms = predicted(descriptor, model.spec)
    assert len(lengths) > 1
    for hop in range(3):
        assert tuple(tokens for at, tokens in computed if at == hop) == lengths
    assert route.ttft_ms == pytest.approx(expected_ms)


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_router_and_head_count_with_the_bytes_that_both_ends_of_a_link_have_agreed_to(codec: str) -> None:
    """The second hop takes no part: neither the link to it nor the one from it has fewer bytes."""
    identities = [Identity.generate() for _ in range(3)]
    spans = [Span(0, 2), Span(2, 4), Span(4, 6)]

    def told(*announcing: bool) -> tuple[float, list[int]]:
        peers = [
            (one, replace(facts_of(one), activation_codecs=(codec,) if takes_part else ()))
            for one, takes_part in zip(identities, announcing, strict=True)
        ]
        route, descriptor = planned(announced(peers, spans, SPEC, (512, 512, 512)), SPEC, codec)
        assert route.ttft_ms == pytest.approx(predicted(descriptor, SPEC)[1])
        return route.ttft_ms, [stage.sent_bytes for stage in read_plan(descriptor, SPEC).stages[:-1]]

    few, many = encoded_bytes(codec, 1, SPEC.hidden_size), SPEC.activation_bytes
    with_all_ms, sent_bytes = told(True, True, True)
    assert sent_bytes == [few, few]
    without_ms, sent_bytes = told(True, False, True)
    assert sent_bytes == [many, many]
    assert with_all_ms < without_ms
