"""A prompt's beginning that every hop still has is not computed again, and ends with its client's sessions only."""

from data_plane import End, asynchronous, describe, soon
from served_circuit import served_circuit
from served_peer import model, one_thread, served

from molink.peer.model import LocalModel
from molink.peer.protocol import molink_pb2 as pb
from molink.shards.prefix import block_names

__all__ = ["model", "one_thread"]

KEY = b"client"
TEXT = [(7 * at + 3) % 60 for at in range(70)]


@asynchronous
async def test_a_prompt_that_begins_as_an_earlier_one_has_the_same_tokens(model: LocalModel) -> None:
    prompts = [TEXT, [*TEXT[:40], 1, 2, 3], TEXT[:33]]
    async with served_circuit(model, (2, 4), kv_tokens=400) as circuit:
        expected = [(await circuit.generate([prompt], 6))[0] for prompt in prompts]
        assert circuit.held[1] == [0, 0, 0]
        found = []
        held = []
        for prompt in prompts:
            found += await circuit.generate([prompt], 6, KEY)
            held.append(circuit.held[1])
        assert found == expected
        assert held == [[0] * 3, [32] * 3, [32] * 3]
        assert await circuit.generate(prompts, 6, KEY) == expected
        assert [circuit.held[session] for session in (1, 2, 3)] == [[64] * 3, [32] * 3, [32] * 3]
        for peer in circuit.peers:
            pool = peer.serving.admission._backend.engine.pool
            pool.check_integrity()
            assert pool.tables == 0
            assert pool.idle_bytes > 0


@asynchronous
async def test_a_circuit_begins_where_its_least_prepared_hop_does(model: LocalModel) -> None:
    async with served_circuit(model, (2, 4), kv_tokens=400) as circuit:
        (expected,) = await circuit.generate([TEXT], 6, KEY)
        middle = circuit.peers[1].serving.admission._backend.engine
        half = middle.pool.used_bytes * 2 // 4
        middle.pool.limit(half)
        middle.pool.limit(None)
        assert await circuit.generate([TEXT], 6, KEY) == [expected]
        assert circuit.held[1] == [64, 32, 64]
        assert await circuit.generate([TEXT], 6, KEY) == [expected]
        assert circuit.held[1] == [64, 64, 64]


@asynchronous
async def test_clients_do_not_share_with_each_other(model: LocalModel) -> None:
    async with served_circuit(model, (), kv_tokens=400) as circuit, End(is_client=True) as other:
        await circuit.generate([TEXT], 2, KEY)
        circuit.links = [await other.links.to(circuit.peers[0].facts)]
        await circuit.reserve(2, len(TEXT), 2, b"".join(block_names(TEXT[:-1], KEY)))
        assert circuit.held[2] == [0]


@asynchronous
async def test_a_start_behind_tokens_that_are_not_there_is_refused(model: LocalModel) -> None:
    async with served(model) as peer:
        asked = describe([peer.hop(model.spec.whole)], spec=peer.spec)
        await peer.reserve(asked)
        await peer.ready(asked)
        start = pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9], prefix_tokens=4)
        assert peer.link.post(start)
        await soon(peer.client.handler.closed.get())


@asynchronous
async def test_prefixes_that_are_kept_take_no_more_than_weights_leave(model: LocalModel) -> None:
    async with served_circuit(model, (), kv_tokens=160) as circuit:
        (peer,) = circuit.peers
        pool = peer.serving.admission._backend.engine.pool
        for shift in range(5):
            await circuit.generate([[token + shift for token in TEXT]], 4, KEY)
            assert (
                0 < pool.used_bytes <= peer.leases.kv_limit_bytes == peer.spec.kv_bytes(peer.spec.whole, 160)
            )
        pool.check_integrity()
