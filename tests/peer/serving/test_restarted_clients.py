"""A client that is there again under its identity finds its prompts' beginnings, and its old leases in nobody's way."""

import asyncio
from dataclasses import replace

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, until
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model

from molink.peer.models.model import LocalModel
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.kv.prefix import block_names

__all__ = ["model"]

KEY = b"client"
PROMPT = [(7 * at + 3) % 60 for at in range(70)]
NEW_TOKENS = 29


def is_full(circuit: ServedCircuit) -> bool:
    """Whether some peer has no room for another session."""
    room = [peer.leases.free_kv_bytes for peer in circuit.peers]
    needed = [peer.spec.kv_bytes(span, 100) for peer, span in zip(circuit.peers, circuit.spans, strict=True)]
    return any(has < needs for has, needs in zip(room, needed, strict=True))


async def begin(circuit: ServedCircuit, session: int) -> None:
    """A generation of which the first token has come."""
    names = b"".join(block_names(PROMPT[:-1], KEY))
    descriptor = await circuit.reserve(session, len(PROMPT), NEW_TOKENS, names)
    start = pb.Start(
        session=descriptor.session, epoch=1, token_ids=PROMPT, position=min(circuit.held[session])
    )
    assert circuit.links[0].post(start)
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance((await circuit.peers[0].client.handler.frames.get())[1].header, pb.Tokens):
            pass


@pytest.mark.full
@pytest.mark.parametrize("is_known_to_be_gone", [True, False], ids=["closed", "silent"])
@asynchronous
async def test_a_request_that_is_asked_again_after_a_restart_begins_behind_its_prompt(
    model: LocalModel, is_known_to_be_gone: bool
) -> None:
    async with served_circuit(model, (3,), kv_tokens=120) as circuit:
        ((*expected,),) = await circuit.generate([PROMPT], NEW_TOKENS)
        count = 0
        while not is_full(circuit):
            count += 1
            await begin(circuit, 100 + count)
        before, old = circuit.peers[0].client, circuit.links
        if is_known_to_be_gone:
            for link in old:
                link.close("the process was killed")
            await until(lambda: not any(peer.serving.links.find(before.peer_id) for peer in circuit.peers))
        async with End(is_client=True, identity=before.identity) as after:
            circuit.links = [await after.links.to(peer.facts) for peer in circuit.peers]
            circuit.peers[0] = replace(circuit.peers[0], client=after)
            await until(lambda: all(link.closed_because is not None for link in old))
            assert all(len(peer.leases.leases) == count for peer in circuit.peers), "they are kept"
            assert not is_full(circuit), "for nobody else's loss"
            for _ in range(count):
                assert await circuit.generate([PROMPT], NEW_TOKENS, KEY) == [expected]
                assert circuit.held[1] == [64, 64]
            assert await circuit.generate([PROMPT] * count, NEW_TOKENS, KEY) == [expected] * count
            for peer in circuit.peers:
                peer.engine.pool.check_integrity()
                assert not peer.leases.leases, "what was in the way has gone"
