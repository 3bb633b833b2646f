"""A standby has, byte for byte, what its hop has; whatever it or a hop does wrong costs the copy alone."""

import asyncio

import pytest
from support.circuits.guesses import GuessingHead, LastWrong
from support.links.data_plane import DEADLINE_S, asynchronous, until
from support.swarms.copied_circuit import CopiedCircuit, ask, ask_until_ready, copied_circuit, copying_of
from support.swarms.served_peer import model

from molink.peer.models.model import LocalModel
from molink.peer.redundancy.pair_roles import WORTH_TOKENS, Roles
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.kv.prefix import block_names
from molink.shards.spec import Span

__all__ = ["model"]

PROMPT = [(7 * at + 3) % 60 for at in range(70)]


async def begun(circuit: CopiedCircuit, tokens: int = 20, session: int = 1) -> pb.SessionDescriptor:
    """A generation with copies, of which a few tokens have come."""
    descriptor = await circuit.circuit.reserve(session, len(PROMPT), tokens)
    for response in await circuit.keep(descriptor):
        assert response.HasField("reserved"), response
    await circuit.start(descriptor, PROMPT, 3)
    return descriptor


@asynchronous
async def test_every_standby_has_what_its_hop_has(model: LocalModel) -> None:
    async with copied_circuit(model, (2, 4)) as circuit:
        descriptor = await begun(circuit)
        await circuit.tokens(17)
        await circuit.copied(descriptor)
        for at in range(3):
            held, kept = circuit.content(descriptor, at)
            assert len(held) > 0
            assert held == kept
            assert circuit.standbys[at].leases.leases == ()
            assert len(circuit.standbys[at].leases.copies) == 1
        for link in (*circuit.circuit.links, *circuit.links):
            release = pb.Release(session=descriptor.session, epoch=1)
            assert (await ask(link, pb.Request(release=release))).HasField("released")
        for standby in circuit.standbys:
            assert len(standby.leases.copies) == 0
            await until(lambda: standby.engine.pool.used_bytes == 0)  # noqa: B023


@pytest.mark.full
@asynchronous
async def test_holders_that_share_work_copy_short_generations_only_once_somebody_waits_for_them(
    model: LocalModel,
) -> None:
    settings = DataPlaneSettings(copies=True, roles=Roles.PAIRS)
    async with copied_circuit(model, (3,), settings=settings) as circuit:
        short, long = await begun(circuit, WORTH_TOKENS // 2), await begun(circuit, WORTH_TOKENS, session=2)

        def kept_tokens(descriptor: pb.SessionDescriptor) -> list[int]:
            found = [copying_of(standby).keeper.find(descriptor.session) for standby in circuit.standbys]
            return [0 if kept is None else kept.intake.kept_tokens for kept in found]

        await until(lambda: min(kept_tokens(long)) >= len(PROMPT))
        assert kept_tokens(short) == [0, 0]
        for at, link in enumerate(circuit.circuit.links):
            told = pb.Reserve(descriptor=short, hop=at, hand_over=True)
            await ask(link, pb.Request(reserve=told))
        await circuit.copied(short)


@pytest.mark.full
@pytest.mark.parametrize("guesses", [False, True])
@asynchronous
async def test_sessions_that_begin_later_are_copied_too_and_tokens_stay_the_same(
    model: LocalModel, *, guesses: bool
) -> None:
    """Without guesses that were refused."""
    head = GuessingHead(LastWrong, [], most=3)
    async with copied_circuit(model, (3,), guesses=head if guesses else None) as circuit:
        circuit.circuit.speculates = False
        (expected,) = await circuit.circuit.generate([PROMPT], 12)
        circuit.circuit.speculates, head.sequences = guesses, [[*PROMPT, *expected]] * 2
        descriptor = await circuit.circuit.reserve(2, len(PROMPT), 12)
        first = await circuit.start(descriptor, PROMPT, 6)
        await circuit.keep(descriptor)
        assert first + await circuit.tokens(12 - len(first)) == expected
        await circuit.copied(descriptor)
        for at in range(2):
            held, kept = circuit.content(descriptor, at)
            assert held == kept


@asynchronous
async def test_a_copy_makes_way_for_a_session_and_its_hop_and_client_hear_of_it(model: LocalModel) -> None:
    async with copied_circuit(model, (3,), standby_tokens=100) as circuit:
        descriptor = await begun(circuit)
        await circuit.copied(descriptor)
        standby, link = circuit.standbys[0], circuit.links[0]
        rival = standby.alone(session=9)
        rival.capacity_tokens, rival.prompt_tokens = 90, 5
        response = await standby.reserve(rival)
        assert response.HasField("reserved"), response
        assert len(standby.leases.copies) == 0
        frames = circuit.circuit.peers[0].client.handler.frames
        while True:
            async with asyncio.timeout(DEADLINE_S):
                peer_id, frame = await frames.get()
            if isinstance(frame.header, pb.Failed):
                break
        assert (peer_id, frame.header.code) == (link.peer_id, "copy")
        await until(lambda: len(copying_of(circuit.circuit.peers[0]).sender) == 0)
        assert len(copying_of(circuit.circuit.peers[1]).sender) == 1


@asynchronous
async def test_the_loss_of_a_standby_changes_nothing_for_the_session(model: LocalModel) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        (expected,) = await circuit.circuit.generate([PROMPT], 20)
        descriptor = await circuit.circuit.reserve(2, len(PROMPT), 20)
        await circuit.keep(descriptor)
        found = await circuit.start(descriptor, PROMPT, 3)
        await circuit.standbys[0].serving.links.close()
        assert found + await circuit.tokens(17) == expected
        await until(lambda: len(copying_of(circuit.circuit.peers[0]).sender) == 0)


@asynchronous
async def test_only_the_standby_that_the_client_named_gets_a_copy(model: LocalModel) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor = await begun(circuit)
        hop = circuit.circuit.peers[0]
        stranger = circuit.standbys[1]  # it is the other hop's
        link = await stranger.serving.links.to(hop.facts)
        asked = pb.CopyKept(session=descriptor.session, epoch=1, tokens=0)
        assert link.post(pb.CopiesKept(copies=[asked]))
        assert (
            await ask(
                circuit.links[0], pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=1, copy=True))
            )
        ).refusal.code == "request"
        await circuit.copied(descriptor)
        assert len(copying_of(hop).sender) == 1
        assert len(stranger.leases.copies) == 1


def part(descriptor: pb.SessionDescriptor, start: int, tokens: int, size: int, **fields: int) -> pb.CopyPart:
    asked = {"epoch": 1, "start": start, "tokens": tokens, "payload_bytes": size, **fields}
    return pb.CopyPart(session=descriptor.session, **asked)  # type: ignore[arg-type]


@asynchronous
async def test_a_hop_that_sends_what_is_no_copy_loses_it_and_nobody_else_anything(model: LocalModel) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        spec = circuit.standbys[0].spec
        size = sum(spec.kv_bytes_per_token[0:3])
        nan = b"\xff" * size
        cases = {
            "a gap": (1, 1, bytes(size)),
            "too many": (0, 10**6, bytes(size)),
            "none": (0, 0, bytes(size)),
            "another size": (0, 1, bytes(size - 4)),
            "other layers": (0, 1, bytes(2 * size)),
            "no numbers": (0, 1, nan),
        }
        for number, (start, tokens, payload) in enumerate(cases.values(), 1):
            descriptor = await circuit.circuit.reserve(number, len(PROMPT), 20)
            for response in await circuit.keep(descriptor):
                assert response.HasField("reserved"), response
            link = await circuit.circuit.peers[0].serving.links.to(circuit.standbys[0].facts)
            header = pb.CopyParts(parts=[part(descriptor, start, tokens, len(payload))])
            assert link.post(header, payload, TrafficClass.REPLICATION)
            await until(lambda: circuit.standbys[0].leases.copies.of_session(descriptor.session) is None)  # noqa: B023
            assert circuit.standbys[1].leases.copies.of_session(descriptor.session) is not None
            assert link.closed_because is None
            for one in (*circuit.circuit.links, circuit.links[1]):
                await ask(one, pb.Request(release=pb.Release(session=descriptor.session, epoch=1)))


@pytest.mark.full
@asynchronous
async def test_parts_of_old_epochs_and_of_strangers_are_not_heeded_and_a_wrong_sum_closes_the_link(
    model: LocalModel,
) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor = await begun(circuit)
        await circuit.copied(descriptor)
        standby, size = circuit.standbys[0], sum(circuit.standbys[0].spec.kv_bytes_per_token[0:3])
        hop = circuit.circuit.peers[0].serving.links.find(standby.facts.peer_id)
        other = await circuit.circuit.peers[1].serving.links.to(standby.facts)
        assert hop is not None
        old = pb.CopyParts(parts=[part(descriptor, 0, 1, size, epoch=7)])
        assert hop.post(old, bytes(size), TrafficClass.REPLICATION)
        assert other.post(pb.CopyParts(parts=[part(descriptor, 0, 1, size)]), bytes(size))
        await circuit.tokens(17)
        await circuit.copied(descriptor)
        assert other.post(pb.CopyParts(parts=[part(descriptor, 0, 1, size)]), bytes(size + 1))
        await until(lambda: other.closed_because is not None)
        await circuit.copied(descriptor)


@asynchronous
async def test_a_copy_that_is_promoted_goes_on_with_the_same_tokens_and_shares_nothing(
    model: LocalModel,
) -> None:
    async with copied_circuit(model, ()) as circuit:
        (expected,) = await circuit.circuit.generate([PROMPT], 20)
        descriptor = await circuit.circuit.reserve(2, len(PROMPT), 20)
        await circuit.keep(descriptor)
        first = await circuit.start(descriptor, PROMPT, 8)
        await circuit.copied(descriptor)
        standby, link = circuit.standbys[0], circuit.links[0]
        descriptor.epoch = 2
        descriptor.hops[0].CopyFrom(standby.hop(Span(0, 6)))
        asked = pb.Request(reserve=pb.Reserve(descriptor=descriptor, ready_within_ms=2000))
        response = await ask_until_ready(link, asked)
        held = response.readiness.held_tokens
        assert len(PROMPT) + 7 <= held <= len(PROMPT) + 20
        assert len(standby.leases.leases) == 1
        history = [*PROMPT, *first]
        known = min(held, len(history) - 1)
        start = pb.Start(session=descriptor.session, epoch=2, token_ids=history, position=known)
        before = standby.metrics.registry.get_sample_value("molink_rows_total") or 0.0
        assert link.post(start)
        frames, found = circuit.circuit.peers[0].client.handler.frames, []
        while len(found) < 12:
            async with asyncio.timeout(DEADLINE_S):
                peer_id, frame = await frames.get()
            if peer_id == link.peer_id and isinstance(frame.header, pb.Tokens):
                found += [token.token_id for token in frame.header.tokens]
        assert first + found == expected
        rows = standby.metrics.registry.get_sample_value("molink_rows_total") or 0.0
        assert rows - before <= len(history) - known + 12


@asynchronous
async def test_a_hop_that_stays_forgets_the_prompt_s_names_where_its_client_names_none(
    model: LocalModel,
) -> None:
    """What it computes from there on is upon what a standby has sent."""
    async with copied_circuit(model, ()) as circuit:
        names = block_names(PROMPT[:-1], b"client")
        descriptor = await circuit.circuit.reserve(1, len(PROMPT), 20, b"".join(names))
        descriptor.epoch, descriptor.prefix_blocks = 2, b""
        link = circuit.circuit.links[0]
        asked = pb.Request(reserve=pb.Reserve(descriptor=descriptor, ready_within_ms=2000))
        assert (await ask_until_ready(link, asked)).readiness.ready
        await circuit.start(descriptor, PROMPT, 6)
        await ask(link, pb.Request(release=pb.Release(session=descriptor.session, epoch=2)))
        held = await circuit.circuit.reserve(2, len(PROMPT), 20, b"".join(names))
        assert held.epoch == 1
        assert circuit.circuit.held[2] == [0]
