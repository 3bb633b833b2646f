"""Whoever speaks to a peer's port without following the protocol is turned away, and the swarm serves on."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from live_swarms import BUNDLED, References, bundled_folder, generate, run_program

from molink.client.errors import SwarmUnavailable
from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm
from molink.dht.certificate import server_name
from molink.dht.identity import Identity
from molink.dht.records import PeerFacts
from molink.peer.handshake import prove
from molink.peer.links import LINK_METHOD
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import MAX_FRAME_BYTES, decode, encode, expect

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

TURNED_AWAY_WITHIN_S = 10.0


async def check_that_it_serves(client: AsyncSwarm, references: References) -> None:
    folder = bundled_folder()
    generation = await generate(client, "ROMEO:", 8)
    assert generation.token_ids == references.greedy(folder, references.ids(folder, "ROMEO:"), 8)


def facts_of(client: AsyncSwarm, name: str = "whole") -> PeerFacts:
    connection, _, _ = client._open()
    return next(view.facts for view in connection.snapshot() if view.facts.name == name)


@asynccontextmanager
async def dialled(facts: PeerFacts) -> AsyncIterator["grpc.aio.StreamStreamCall[bytes, bytes]"]:
    """An open call to the peer, whose certificate is pinned, before anything is proven."""
    pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
    options = [
        ("grpc.ssl_target_name_override", server_name(facts.peer_id)),
        ("grpc.max_send_message_length", -1),
    ]
    credentials = grpc.ssl_channel_credentials(root_certificates=pinned)
    async with grpc.aio.secure_channel(facts.grpc_addresses[0], credentials, options=options) as channel:
        call = channel.stream_stream(LINK_METHOD)()
        try:
            yield call
        finally:
            call.cancel()


async def question_of(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> pb.Challenge:
    data = await call.read()
    assert isinstance(data, bytes)
    return expect(decode(data), pb.Challenge)


async def refusal_of(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> tuple[grpc.StatusCode, str]:
    """How the peer ended the call; it has to within TURNED_AWAY_WITHIN_S."""
    async with asyncio.timeout(TURNED_AWAY_WITHIN_S):
        with suppress(grpc.aio.AioRpcError):  # as its code and details say
            while isinstance(await call.read(), bytes):
                pass  # what was on its way before
        return await call.code(), await call.details()


async def welcomed(call: "grpc.aio.StreamStreamCall[bytes, bytes]", facts: PeerFacts) -> None:
    question = await question_of(call)
    await call.write(encode(prove(question, Identity.generate(), facts.certificate, None, is_client=True)))
    data = await call.read()
    assert isinstance(data, bytes)
    assert expect(decode(data), pb.Welcome).peer_id == facts.peer_id


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_in_place_of_a_proof_are_refused(
    seed: int, wide_client: AsyncSwarm, references: References
) -> None:
    noise = random.Random(seed).randbytes((1, 40, 3000, 300_000)[seed])
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
        proof = prove(await question_of(call), identity, facts.certificate, None, is_client=True)
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
        proof = prove(question, Identity.generate(), elsewhere.certificate, None, is_client=True)
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


async def test_a_frame_over_the_limit_is_refused_before_it_is_read(
    wide_client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(wide_client)
    async with dialled(facts) as call:
        await welcomed(call, facts)
        await call.write(bytes(MAX_FRAME_BYTES + 1))
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
        except ConnectionError:
            pass  # a reset is a refusal too
        finally:
            writer.close()
    await check_that_it_serves(wide_client, references)


async def test_a_private_swarm_serves_with_its_key_and_refuses_on_both_planes_without(
    tmp_path: Path, references: References
) -> None:
    key, wrong_key = tmp_path / "swarm.key", tmp_path / "other.key"
    for file in (key, wrong_key):
        made = await run_program("molink.peer", "swarm-key", str(file))
        assert (made.status, made.err) == (0, "")
    async with LocalSwarm() as swarm:
        await swarm.join("front", "--model", BUNDLED, "--layers", "0:6", "--swarm-key", str(key))
        await swarm.join("back", "--model", BUNDLED, "--layers", "6:12", "--swarm-key", str(key))
        for swarm_key in (None, wrong_key):
            with pytest.raises(SwarmUnavailable, match="swarm key"):
                async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses, swarm_key=swarm_key):
                    pass
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses, swarm_key=key) as client:
            facts = facts_of(client, "front")
            async with dialled(facts) as call:
                question = await question_of(call)
                proof = prove(question, Identity.generate(), facts.certificate, None, is_client=True)
                await call.write(encode(proof))
                code, details = await refusal_of(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "this swarm is private" in details
            await check_that_it_serves(client, references)
