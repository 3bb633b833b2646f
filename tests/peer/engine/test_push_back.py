"""Under more prefill than lines and later hops take, prompts wait where they are and nothing fails; decode goes on."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, describe, hop_of, soon, until
from support.models.tiny_models import VOCABULARY, greedy_references
from support.swarms.served_circuit import ServedCircuit
from support.swarms.served_peer import HIGH, LOW, Served, failures_told, model, served

from molink.peer.engine.steps import StepFrame
from molink.peer.hop import session as hop_session
from molink.peer.hop.frames import HeldFrames
from molink.peer.models.model import LocalModel
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transport import shared_uplink
from molink.peer.wire.transport.line_quality import LineQuality
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.spec import Span
from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.shaping import ShapedPort

__all__ = ["model"]

NEW_TOKENS = 4
CHUNK_TOKENS = 50
SLOW_MBPS = 0.25
"""So slow that a very busy machine still computes prompts faster than the line takes them: 4 s for all of them."""
QUEUE_BYTES = 32 * 1024
"""Of which prefill has five eighths; each of the prompts below is more."""


def prompt_of(tokens: int) -> list[int]:
    return [(7 * position + tokens) % VOCABULARY for position in range(tokens)]


@asynccontextmanager
async def slow_circuit(model: LocalModel) -> AsyncIterator[ServedCircuit]:
    """Three peers, of which the second and the third are reached through slow lines."""
    async with AsyncExitStack() as stack:
        shaper = stack.enter_context(Shaper())
        cut = equal_chunks(CHUNK_TOKENS)
        peers = [
            await stack.enter_async_context(
                served(model, kv_tokens=3000, settings=DataPlaneSettings(cut=cut))
            )
            for _ in range(3)
        ]
        for peer in peers[1:]:
            target = ("127.0.0.1", peer.serving.port)
            port = stack.enter_context(ShapedPort(shaper, target, Line(SLOW_MBPS), Line()))
            peer.facts = replace(peer.facts, grpc_addresses=(f"127.0.0.1:{port.port}",))
        links = [await peers[0].client.links.to(peer.facts) for peer in peers]
        yield ServedCircuit(peers, [Span(0, 2), Span(2, 4), Span(4, 6)], links)


@pytest.mark.full
@asynchronous
async def test_prompts_that_a_line_is_too_slow_for_wait_and_all_get_their_tokens(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_uplink, "MAX_PARTIAL_BYTES", QUEUE_BYTES)
    found_full: list[str] = []
    hold = HeldFrames.hold

    def watched(held: HeldFrames, frame: StepFrame) -> None:
        found_full.append(frame.peer_id)
        hold(held, frame)
        sessions = Counter(one.session.key for frame in held.of_peer(frame.peer_id) for one in frame.steps)
        assert max(sessions.values()) <= 2

    monkeypatch.setattr(HeldFrames, "hold", watched)
    prompts = [prompt_of(tokens) for tokens in (200, 180, 150)]
    async with slow_circuit(model) as circuit:
        tokens = await circuit.generate(prompts, NEW_TOKENS)
        assert {peer.serving.stepper.queued for peer in circuit.peers} == {0}
        await until(lambda: all(peer.serving.stepper.is_empty for peer in circuit.peers))
    assert tokens == greedy_references(model.folder, prompts, NEW_TOKENS)
    assert found_full


@asynchronous
async def test_narrow_windows_and_full_queues_together_lose_no_token(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_uplink, "MAX_PARTIAL_BYTES", QUEUE_BYTES)
    window_bytes = CHUNK_TOKENS * model.spec.activation_bytes
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_bytes))
    monkeypatch.setattr(hop_session, "ReceiveWindow", partial(ReceiveWindow, window_bytes))
    prompts = [prompt_of(tokens) for tokens in (200, 30, 150)]
    async with slow_circuit(model) as circuit:
        tokens = await circuit.generate(prompts, NEW_TOKENS)
    assert tokens == greedy_references(model.folder, prompts, NEW_TOKENS)


async def ready(peer: Served, tail: End, session: int) -> pb.SessionDescriptor:
    asked = describe(
        [peer.hop(LOW), hop_of(tail.identity, HIGH, tail.facts)], session=session, spec=peer.spec
    )
    assert (await peer.reserve(asked)).HasField("reserved")
    assert (await peer.ready(asked)).readiness.ready
    return asked


async def steps_at(tail: End) -> list[tuple[int, int]]:
    """Session and step of each row of the next frame that reaches the tail."""
    _, frame = await soon(tail.handler.frames.get())
    return [(row.session[0], row.step) for row in frame.header.rows]


def token_of(session: int, step: int, position: int) -> pb.Tokens:
    return pb.Tokens(
        tokens=[pb.Token(session=bytes([session]) * 16, epoch=1, step=step, position=position, token_id=3)]
    )


@asynchronous
async def test_a_head_sends_no_more_than_a_window_until_the_next_hop_has_stepped_and_decodes_meanwhile(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_steps=2))
    async with served(model, settings=DataPlaneSettings(cut=equal_chunks(1))) as peer, End() as tail:
        decoding, waiting = [(await ready(peer, tail, session)).session for session in (1, 2)]
        assert peer.link.post(pb.Start(session=decoding, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        link = None
        for step in range(5):
            assert await steps_at(tail) == [(1, step)]
            link = tail.links.find(peer.identity.peer_id)
            assert link is not None
            stepped = pb.SteppedTo(session=decoding, epoch=1, step=step)
            assert link.post(pb.Stepped(sessions=[stepped]))
        assert link is not None
        assert peer.link.post(pb.Start(session=waiting, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert [await steps_at(tail) for _ in range(2)] == [[(2, 0)], [(2, 1)]]
        for step in range(5, 10):
            assert link.post(token_of(1, step - 1, step))
            assert await steps_at(tail) == [(1, step)]
        assert peer.serving.stepper.queued == 3
        stepped = pb.SteppedTo(session=waiting, epoch=1, step=1)
        assert link.post(pb.Stepped(sessions=[stepped]))
        assert [await steps_at(tail) for _ in range(2)] == [[(2, 2)], [(2, 3)]]
        assert peer.serving.stepper.queued == 1


@asynchronous
async def test_a_session_that_ends_while_it_waits_leaves_nothing_and_others_go_on(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_steps=1))
    async with served(model, settings=DataPlaneSettings(cut=equal_chunks(1))) as peer, End() as tail:
        first, second = [await ready(peer, tail, session) for session in (1, 2)]
        assert peer.link.post(pb.Start(session=first.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert await steps_at(tail) == [(1, 0)]
        await until(lambda: peer.serving.stepper.queued == 4)
        await peer.release(first)
        assert peer.serving.stepper.queued == 0
        assert peer.link.post(pb.Start(session=second.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert await steps_at(tail) == [(2, 0)]


@asynchronous
async def test_a_hop_that_does_not_keep_to_the_window_loses_the_session_and_is_named(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "ReceiveWindow", partial(ReceiveWindow, window_steps=0))
    async with served(model) as peer, End() as head:
        failures = failures_told(peer)
        hops = [hop_of(head.identity, LOW, head.facts), peer.hop(HIGH)]
        asked = describe(hops, spec=peer.spec)
        assert (await peer.reserve(asked, 1)).HasField("reserved")
        assert (await peer.ready(asked)).readiness.ready
        row = pb.ActivationRow(session=asked.session, epoch=1, step=0, rows=5, prefill=True)
        header = pb.Activations(rows=[row], hidden_size=peer.spec.hidden_size, dtype="float32")
        link = await head.linked(peer.identity.peer_id)
        link.post(header, bytes(5 * peer.spec.hidden_size * 4))
        failed = await soon(failures.get())
        assert (failed.peer_id, failed.code) == (head.peer_id, "protocol")
        assert "as much prefill waited here as may" in failed.detail
        assert link.closed_because is None


@asynchronous
async def test_only_the_next_hop_says_what_it_has_stepped(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_steps=1))
    async with (
        served(model, settings=DataPlaneSettings(cut=equal_chunks(1))) as peer,
        End() as tail,
        End() as stranger,
    ):
        asked = await ready(peer, tail, 1)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert await steps_at(tail) == [(1, 0)]
        link = await stranger.links.to(peer.facts)
        stepped = pb.Stepped(sessions=[pb.SteppedTo(session=asked.session, epoch=1, step=0)])
        assert link.post(stepped)
        await link.request(pb.Request(get_manifest=pb.GetManifest(model_hash="")), DEADLINE_S)
        assert tail.handler.frames.empty()
        own = tail.links.find(peer.identity.peer_id)
        assert own is not None
        assert own.post(stepped)
        assert await steps_at(tail) == [(1, 1)]


@asynchronous
async def test_a_token_before_the_end_of_the_prompt_ends_the_session_and_names_the_tail(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_steps=1))
    async with served(model, settings=DataPlaneSettings(cut=equal_chunks(1))) as peer, End() as tail:
        failures = failures_told(peer)
        asked = await ready(peer, tail, 1)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert await steps_at(tail) == [(1, 0)]
        link = tail.links.find(peer.identity.peer_id)
        assert link is not None
        assert link.post(token_of(1, 0, 5))
        failed = await soon(failures.get())
        assert failed.peer_id == tail.peer_id
        assert "before the whole prompt" in failed.detail


@asynchronous
async def test_a_head_whose_line_has_prompts_for_longer_than_clients_wait_refuses_more_of_them(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_session, "SendWindow", partial(SendWindow, window_steps=1))
    row_bytes = model.spec.activation_bytes
    async with served(model, settings=DataPlaneSettings(cut=equal_chunks(1))) as peer, End() as tail:
        links = peer.serving.links
        monkeypatch.setattr(links, "line_quality", lambda: LineQuality(row_bytes / 10, ()))
        first, second = [await ready(peer, tail, session) for session in (1, 2)]
        assert peer.link.post(pb.Start(session=first.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        assert await steps_at(tail) == [(1, 0)]
        await until(lambda: peer.serving.stepper.prompt_wait_s == 30.0)
        asked = describe(second.hops, session=3, spec=peer.spec)
        assert (await peer.reserve(asked)).HasField("reserved")
        monkeypatch.setattr(links, "line_quality", lambda: LineQuality(row_bytes / 20, ()))
        refusal = (await peer.reserve(describe(second.hops, session=4, spec=peer.spec))).refusal
        assert (refusal.code, refusal.retry_after_ms) == ("busy", 30_000)
        assert (await peer.reserve(second)).HasField("reserved")
        assert (await peer.reserve(peer.alone(session=5))).HasField("reserved")
