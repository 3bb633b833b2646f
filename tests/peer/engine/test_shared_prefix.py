"""A prompt's beginning that every hop still has is not computed again, and ends with its client's sessions only."""

from dataclasses import replace

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, describe, soon, until
from support.models.circuit_runs import ready_tokens
from support.models.tiny_models import make_tiny_model
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import Served, model, opened, served

from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.kv.prefix import block_names, names_at
from molink.shards.spec import Span

__all__ = ["model"]

KEY = b"client"
TEXT = [(7 * at + 3) % 60 for at in range(70)]


def rows_of(peer: Served) -> float:
    """Token rows that the peer has computed."""
    return peer.metrics.registry.get_sample_value("molink_rows_total") or 0.0


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
            pool = peer.engine.pool
            pool.check_integrity()
            assert pool.tables == 0
            assert pool.used_bytes > 0


@asynchronous
async def test_a_circuit_begins_where_its_least_prepared_hop_does(model: LocalModel) -> None:
    async with served_circuit(model, (2, 4), kv_tokens=400) as circuit:
        (expected,) = await circuit.generate([TEXT], 6, KEY)
        middle = circuit.peers[1].engine
        half = middle.pool.used_bytes * 2 // 4
        middle.pool.limit(half)
        middle.pool.limit(None)
        assert await circuit.generate([TEXT], 6, KEY) == [expected]
        assert circuit.held[1] == [64, 32, 64]
        assert await circuit.generate([TEXT], 6, KEY) == [expected]
        assert circuit.held[1] == [64, 64, 64]


async def turn(circuit: ServedCircuit, chat: list[int]) -> tuple[list[int], int]:
    """The answer to a chat, and how many of its tokens were there before: every hop computes the others alone."""
    before = [rows_of(peer) for peer in circuit.peers]
    (answer,) = await circuit.generate([chat], 30, KEY)
    known = circuit.held[1][0]
    assert circuit.held[1] == [known] * len(circuit.peers)
    computed = len(chat) - known + 29
    await until(lambda: [rows_of(peer) for peer in circuit.peers] == [rows + computed for rows in before])
    return answer, known


@pytest.mark.full
@asynchronous
async def test_a_chat_goes_on_behind_its_answers(model: LocalModel) -> None:
    async with served_circuit(model, (2, 4), kv_tokens=400) as circuit:
        for text in (TEXT[:21], TEXT[3:12]):
            chat = text
            for number in range(2):
                (expected,) = await circuit.generate([chat], 30)
                answer, known = await turn(circuit, chat)
                assert answer == expected
                assert number == 0 or known == (len(chat) - 5) // 16 * 16
                chat = [*chat, *answer, 3, 1, 4, 1]
        for peer in circuit.peers:
            pool = peer.engine.pool
            pool.check_integrity()
            assert pool.tables == 0


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gemma3", pytest.param("mistral", marks=pytest.mark.full)])
@asynchronous
async def test_windows_share_over_several_hops(
    tmp_path_factory: pytest.TempPathFactory, architecture: str
) -> None:
    model = opened(make_tiny_model(architecture, tmp_path_factory.mktemp("windows")))
    chat = [(7 * at + 3) % 60 for at in range(600)]
    async with served_circuit(model, (2, 4), kv_tokens=1600) as circuit:
        for wanted in ([0, 0, 0], [608, 608, 608]):
            (expected,) = await circuit.generate([chat], 20)
            assert await circuit.generate([chat], 20, KEY) == [expected]
            assert circuit.held[1] == wanted
            chat += [*expected, 5, 6]
        middle = circuit.peers[1].engine
        names = names_at(
            block_names(chat, KEY),
            circuit.peers[0].client.peer_id,
            [(circuit.peers[0].identity.peer_id, circuit.spans[0], model.spec.dtype)],
        )
        longest = ready_tokens(middle, Span(2, 4), names)
        (expected,) = await circuit.generate([chat], 4)
        while ready_tokens(middle, Span(2, 4), names) == longest:
            middle.pool.limit(middle.pool.used_bytes - 1)
        middle.pool.limit(None)
        shorter = ready_tokens(middle, Span(2, 4), names)
        assert await circuit.generate([chat], 4, KEY) == [expected]
        assert circuit.held[1] == [longest, shorter, longest]
        if shorter:
            assert 0 < circuit.least[1][0] <= shorter < longest
        for peer in circuit.peers:
            peer.engine.pool.check_integrity()


@asynchronous
async def test_names_that_are_none_or_too_many_are_refused(model: LocalModel) -> None:
    async with served_circuit(model, (), kv_tokens=400) as circuit:
        descriptor = await circuit.reserve(1, 40, 20, b"".join(block_names(TEXT[:39], KEY)))
        key = {"session": descriptor.session, "epoch": 1}
        for names in (bytes(15), bytes(16 * 2)):
            asked = pb.Request(release=pb.Release(**key, further_blocks=names))
            response, _ = await circuit.links[0].request(asked, DEADLINE_S)
            assert response.refusal.code == "request"
        response, _ = await circuit.links[0].request(
            pb.Request(release=pb.Release(**key, further_blocks=bytes(16))), DEADLINE_S
        )
        assert response.HasField("released")
        (peer,) = circuit.peers
        assert not peer.leases.leases


@asynchronous
async def test_clients_do_not_share_with_each_other(model: LocalModel) -> None:
    async with served_circuit(model, (), kv_tokens=400) as circuit, End(is_client=True) as other:
        await circuit.generate([TEXT], 2, KEY)
        circuit.links = [await other.links.to(circuit.peers[0].facts)]
        await circuit.reserve(2, len(TEXT), 2, b"".join(block_names(TEXT[:-1], KEY)))
        assert circuit.held[2] == [0]


@asynchronous
async def test_what_was_computed_from_one_peer_s_rows_is_not_found_behind_another(model: LocalModel) -> None:
    """Who lies to the next hop spoils nothing there of circuits without him."""
    async with served_circuit(model, (3,), kv_tokens=400) as circuit, served(model, kv_tokens=400) as other:
        client = circuit.peers[0].client
        (expected,) = await circuit.generate([TEXT], 4, KEY)
        over_other = replace(
            circuit,
            peers=[replace(other, client=client), circuit.peers[1]],
            links=[await client.links.to(other.facts), circuit.links[1]],
        )
        for known in (0, 64):
            assert await over_other.generate([TEXT], 4, KEY) == [expected]
            assert over_other.held[1] == [known, known]
        assert await circuit.generate([TEXT], 4, KEY) == [expected]
        assert circuit.held[1] == [64, 64]


@asynchronous
async def test_what_was_computed_from_rounded_rows_is_not_found_by_who_asks_for_exact_ones(
    model: LocalModel,
) -> None:
    """A head has computed the same either way."""
    settings = DataPlaneSettings(copies=True, activation_codecs=("int8",))
    async with served_circuit(model, (3,), kv_tokens=400, settings=settings) as circuit:
        (expected,) = await circuit.generate([TEXT], 4)
        for codec, held in (("int8", [0, 0]), ("", [64, 0]), ("", [64, 64]), ("int8", [64, 64])):
            circuit.codec = codec
            (tokens,) = await circuit.generate([TEXT], 4, KEY)
            assert circuit.held[1] == held
            assert codec or tokens == expected


@asynchronous
async def test_a_start_behind_tokens_that_are_not_there_is_refused(model: LocalModel) -> None:
    async with served(model) as peer:
        asked = describe([peer.hop(model.spec.whole)], spec=peer.spec)
        await peer.reserve(asked)
        await peer.ready(asked)
        start = pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9], position=4)
        assert peer.link.post(start)
        await soon(peer.client.handler.closed.get())


@asynchronous
async def test_prefixes_that_are_kept_take_no_more_than_weights_leave(model: LocalModel) -> None:
    async with served_circuit(model, (), kv_tokens=160) as circuit:
        (peer,) = circuit.peers
        pool = peer.engine.pool
        for shift in range(5):
            await circuit.generate([[token + shift for token in TEXT]], 4, KEY)
            assert (
                0 < pool.used_bytes <= peer.leases.kv_limit_bytes == peer.spec.kv_bytes(peer.spec.whole, 160)
            )
        pool.check_integrity()
