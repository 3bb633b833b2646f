"""Whoever speaks to a peer's port without following the protocol is turned away, and the swarm serves on."""

import asyncio
import random

import grpc
import grpc.aio
import pytest
from support.links.raw_links import TURNED_AWAY_WITHIN_S, dialled, facts_of, question_of, refusal_of
from support.swarms.live_swarms import References, check_that_it_serves

from molink.client.api.swarm import AsyncSwarm
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.handshake import prove
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import decode, encode, expect
from molink.peer.wire.protocol.packets import MAX_PACKET_BYTES

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]


async def welcomed(call: "grpc.aio.StreamStreamCall[bytes, bytes]", facts: PeerFacts) -> None:
    question = await question_of(call)
    await call.write(
        encode(
            prove(question, Identity.generate(), facts.certificate, None, link_id=bytes(16), is_client=True)
        )
    )
    data = await call.read()
    assert isinstance(data, bytes)
    assert expect(decode(data), pb.Welcome).peer_id == facts.peer_id


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_in_place_of_a_proof_are_refused(
    seed: int, wide_client: AsyncSwarm, references: References
) -> None:
    noise = random.Random(seed).randbytes((1, 40, 3000, 200_000)[seed])
    async with dialled(facts_of(wide_client)) as call:
        await question_of(call)
        await call.write(noise)
        code, _ = await refusal_of(call)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    await check_that_it_serves(wide_client, references)


async def test_a_dialler_that_proves_nothing_is_turned_away(
    wide_client: AsyncSwarm, references: References
) -> None:
    async with dialled(facts_of(wide_client)) as call:
        await question_of(call)
        code, details = await refusal_of(call)
    assert (code, details) == (grpc.StatusCode.UNAUTHENTICATED, "no proof of identity in time")
    await check_that_it_serves(wide_client, references)


async def test_a_request_before_the_proof_is_refused(wide_client: AsyncSwarm) -> None:
    async with dialled(facts_of(wide_client)) as call:
        await question_of(call)
        await call.write(encode(pb.Request(id=1, get_manifest=pb.GetManifest(model_hash="0"))))
        code, details = await refusal_of(call)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "expected Proof" in details


async def test_a_proof_with_a_wrong_signature_is_refused(
    wide_client: AsyncSwarm, references: References
) -> None:
    facts, identity = facts_of(wide_client), Identity.generate()
    async with dialled(facts) as call:
        proof = prove(
            await question_of(call), identity, facts.certificate, None, link_id=bytes(16), is_client=True
        )
        proof.public_key = Identity.generate().public_key
        await call.write(encode(proof))
        code, details = await refusal_of(call)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "the signature is not that of" in details
    await check_that_it_serves(wide_client, references)


async def test_a_proof_made_for_another_peer_is_refused(wide_client: AsyncSwarm) -> None:
    facts, elsewhere = facts_of(wide_client), facts_of(wide_client, "front")
    async with dialled(facts) as call:
        question = await question_of(call)
        proof = prove(
            question, Identity.generate(), elsewhere.certificate, None, link_id=bytes(16), is_client=True
        )
        await call.write(encode(proof))
        code, _ = await refusal_of(call)
    assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("seed", range(3))
async def test_garbage_from_a_proven_client_ends_its_link_only(
    seed: int, wide_client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(wide_client)
    async with dialled(facts) as call:
        await welcomed(call, facts)
        await call.write(random.Random(seed).randbytes(2000))
        await refusal_of(call)
    await check_that_it_serves(wide_client, references)


async def test_a_packet_over_the_limit_is_refused_before_it_is_read(
    wide_client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(wide_client)
    async with dialled(facts) as call:
        await welcomed(call, facts)
        await call.write(bytes(MAX_PACKET_BYTES + 1))
        code, _ = await refusal_of(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await check_that_it_serves(wide_client, references)


@pytest.mark.parametrize("plane", ["grpc", "libp2p"])
async def test_noise_on_the_socket_itself_does_no_harm(
    plane: str, wide_client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(wide_client)
    port = facts.grpc_addresses[0].rsplit(":", 1)[1] if plane == "grpc" else facts.addresses[0].split("/")[4]
    noise = random.Random(9)
    for opening in (b"\x16\x03\x01\x40\x00", b"", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        try:
            writer.write(opening + noise.randbytes(20_000))
            async with asyncio.timeout(TURNED_AWAY_WITHIN_S):
                await writer.drain()
                writer.write_eof()
                await reader.read()
        except OSError:
            pass  # a reset is a refusal too, and so is a socket that is no longer connected
        finally:
            writer.close()
    await check_that_it_serves(wide_client, references)
