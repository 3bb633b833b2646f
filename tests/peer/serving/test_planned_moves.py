"""A session goes over to standbys of some of its hops between two tokens: none is lost, doubled, or computed again."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest
from support.circuits.guesses import GuessingHead, LastWrong, Oracle
from support.links.data_plane import DEADLINE_S, asynchronous, until
from support.pairwise import usually
from support.swarms.copied_circuit import CopiedCircuit, ask, ask_until_ready, copied_circuit, copying_of
from support.swarms.served_peer import PATIENT, Served, model

from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import CopyForm

__all__ = ["model"]

PROMPT = [(7 * at + 3) % 60 for at in range(70)]
NEW_TOKENS = 40
GUESSED_TOKENS = 100
"""Of a generation that takes few trips, and has to last until it has moved."""
LONG = 300
"""Of a generation that is under way whatever else takes its time."""
CUTS = (2, 4)


async def begun(
    circuit: CopiedCircuit, tokens: int = 3, new_tokens: int = NEW_TOKENS
) -> pb.SessionDescriptor:
    """A generation with copies, of which a few tokens have come."""
    descriptor = await circuit.circuit.reserve(2, len(PROMPT), new_tokens)
    for response in await circuit.keep(descriptor):
        assert response.HasField("reserved"), response
    assert circuit.circuit.links[0].post(
        pb.Start(session=descriptor.session, epoch=1, token_ids=PROMPT, position=0)
    )
    await taken(circuit, tokens)
    return descriptor


async def taken(circuit: CopiedCircuit, count: int) -> list[pb.Token]:
    """So many more tokens, as they come."""
    found: list[pb.Token] = []
    while len(found) < count:
        async with asyncio.timeout(DEADLINE_S):
            _, frame = await circuit.circuit.peers[0].client.handler.frames.get()
        assert not isinstance(frame.header, pb.Failed), frame.header
        if isinstance(frame.header, pb.Tokens):
            found += frame.header.tokens
    return found


def next_epoch(
    circuit: CopiedCircuit, descriptor: pb.SessionDescriptor, moved: Collection[int]
) -> tuple[pb.SessionDescriptor, list[Link], list[Served]]:
    """The session's next epoch, with standbys in the places of these hops; its hops, and links to them."""
    upcoming = pb.SessionDescriptor()
    upcoming.CopyFrom(descriptor)
    upcoming.epoch = descriptor.epoch + 1
    links, peers = list(circuit.circuit.links), list(circuit.circuit.peers)
    for at, hop in enumerate(upcoming.hops):
        if at in moved:
            hop.peer_id, hop.facts = circuit.standbys[at].identity.peer_id, hop.standby_facts
            links[at], peers[at] = circuit.links[at], circuit.standbys[at]
        hop.standby_facts = b""
    return upcoming, links, peers


async def prepare(links: list[Link], upcoming: pb.SessionDescriptor) -> list[pb.Response]:
    """Returns what the hops answer once each is ready, or has refused."""
    asked = [
        pb.Reserve(descriptor=upcoming, hop=at, prepare=True, ready_within_ms=5000)
        for at in range(len(links))
    ]
    return await asyncio.gather(
        *(ask_until_ready(link, pb.Request(reserve=one)) for link, one in zip(links, asked, strict=True))
    )


def move(descriptor: pb.SessionDescriptor, upcoming: pb.SessionDescriptor) -> pb.Move:
    return pb.Move(
        session=descriptor.session,
        epoch=descriptor.epoch,
        next_epoch=upcoming.epoch,
        peer_id=upcoming.hops[0].peer_id,
    )


async def move_to(
    circuit: CopiedCircuit, descriptor: pb.SessionDescriptor, moved: Collection[int]
) -> list[Served]:
    """Has the session go over to the standbys of these hops; returns the hops from then on."""
    upcoming, links, peers = next_epoch(circuit, descriptor, moved)
    for at in moved:
        told = pb.Reserve(descriptor=descriptor, hop=at, hand_over=True)
        await ask(circuit.circuit.links[at], pb.Request(reserve=told))
    for at, response in enumerate(await prepare(links, upcoming)):
        assert response.readiness.ready, response
        assert (response.readiness.held_tokens >= len(PROMPT)) is (at in moved), "standbys say what they have"
    assert circuit.circuit.links[0].post(move(descriptor, upcoming))
    return peers


async def end(circuit: CopiedCircuit, descriptor: pb.SessionDescriptor) -> None:
    """The client gives everything back, and nothing is left."""
    for link in (*circuit.circuit.links, *circuit.links):
        for epoch in (1, 2):
            await ask(link, pb.Request(release=pb.Release(session=descriptor.session, epoch=epoch)))
    for peer in (*circuit.circuit.peers, *circuit.standbys):
        assert not peer.leases.leases
        await until(lambda: peer.serving.stepper.is_empty)  # noqa: B023


def rows_of(peer: Served) -> int:
    """Token rows that the peer has computed."""
    return int(peer.metrics.registry.get_sample_value("molink_rows_total") or 0)


@pytest.mark.parametrize("moved", usually([[1], [0, 2]], [[], [0], [2], [0, 1, 2]]))
@asynchronous
async def test_hops_are_left_between_two_tokens_and_nothing_is_computed_twice(
    model: LocalModel, moved: list[int]
) -> None:
    async with copied_circuit(model, CUTS) as circuit:
        (expected,) = await circuit.circuit.generate([PROMPT], NEW_TOKENS)
        before = [rows_of(peer) for peer in circuit.circuit.peers]
        descriptor = await begun(circuit)
        peers = await move_to(circuit, descriptor, moved)
        tokens = await taken(circuit, NEW_TOKENS - 3)
        tokens.sort(key=lambda token: token.position)
        assert [token.position for token in tokens] == list(range(len(PROMPT) + 3, len(PROMPT) + NEW_TOKENS))
        assert [token.token_id for token in tokens] == expected[3:]
        epochs = [token.epoch for token in tokens]
        assert epochs == sorted(epochs)
        assert set(epochs) == {1, 2}
        for at, peer in enumerate(circuit.circuit.peers):
            computed = rows_of(peer) - before[at] + (rows_of(peers[at]) if at in moved else 0)
            assert computed == len(PROMPT) + NEW_TOKENS - 1
        for at in moved:
            assert copying_of(circuit.standbys[at]).keeper.taken_over == 1
        await end(circuit, descriptor)


@pytest.mark.full
@pytest.mark.parametrize("moved", usually([[0, 2]], [[], [0], [1], [2], [0, 1, 2]]))
@pytest.mark.parametrize("kind", [LastWrong, pytest.param(Oracle, marks=pytest.mark.full)])
@asynchronous
async def test_hops_are_left_behind_what_was_accepted_of_guesses(
    model: LocalModel, moved: list[int], kind: type[Oracle]
) -> None:
    head = GuessingHead(kind, [])
    async with copied_circuit(model, CUTS, guesses=head) as circuit:
        circuit.circuit.speculates = False
        (expected,) = await circuit.circuit.generate([PROMPT], GUESSED_TOKENS)
        circuit.circuit.speculates, head.sequences = True, [[*PROMPT, *expected]] * 2
        descriptor = await begun(circuit, 1, GUESSED_TOKENS)
        (source,) = head.sources
        await move_to(circuit, descriptor, moved)
        tokens: list[pb.Token] = []
        while not tokens or tokens[-1].position < len(PROMPT) + GUESSED_TOKENS - 1:
            tokens += await taken(circuit, 1)
        tokens.sort(key=lambda token: token.position)
        assert [token.token_id for token in tokens] == expected[-len(tokens) :]
        assert {token.epoch for token in tokens} >= {2}
        guesses = any(token.guessed for token in tokens if token.epoch == 2)
        assert guesses == (0 not in moved), "another head guesses once it has been told the sequence"
        assert all((right == guessed) == (kind is Oracle) for guessed, right in source.records)
        await end(circuit, descriptor)


@pytest.mark.full
@pytest.mark.parametrize("kind", [LastWrong, pytest.param(Oracle, marks=pytest.mark.full)])
@asynchronous
async def test_another_head_guesses_on_once_the_client_has_told_it_the_sequence(
    model: LocalModel, kind: type[Oracle]
) -> None:
    head = GuessingHead(kind, [], most=2)
    async with copied_circuit(model, CUTS, guesses=head) as circuit:
        circuit.circuit.speculates = False
        (expected,) = await circuit.circuit.generate([PROMPT], LONG)
        circuit.circuit.speculates, head.sequences = True, [[*PROMPT, *expected]] * 2
        descriptor = await begun(circuit, 1, LONG)
        await move_to(circuit, descriptor, [0])
        tokens: list[pb.Token] = []
        while not any(token.epoch == 2 for token in tokens):
            tokens += await taken(circuit, 1)
        known = max(token.position for token in tokens) + 1
        told = pb.History(session=descriptor.session, epoch=2, guess_scope=b"ada", prediction=[7])
        told.token_ids.extend(head.sequences[0][:known])
        for _ in range(2):  # told again it has no effect
            assert circuit.links[0].post(told)
        while tokens[-1].position < len(PROMPT) + LONG - 1:
            tokens += await taken(circuit, 1)
        tokens.sort(key=lambda token: token.position)
        assert [token.token_id for token in tokens] == expected[-len(tokens) :]
        before, after = head.sources
        assert (bytes(head.starts[1].guess_scope), list(head.starts[1].prediction)) == (b"ada", [7])
        assert after.known[: len(PROMPT) + LONG // 2] == head.sequences[0][: len(PROMPT) + LONG // 2]
        assert any(token.guessed for token in tokens if token.epoch == 2)
        for source in (before, after):
            assert source.records
            assert all((right == guessed) == (kind is Oracle) for guessed, right in source.records)
        await end(circuit, descriptor)


@pytest.mark.full
@asynchronous
async def test_a_peer_that_takes_all_layers_over_hears_what_it_draws_by_and_what_it_guesses_from(
    model: LocalModel,
) -> None:
    """It is the tail, whose draws depend on the tokens before, and the head. Each step brings two tokens, so that what
    was sent of the copy is always behind."""
    head = GuessingHead(LastWrong, [], most=2)
    async with copied_circuit(model, (), guesses=head) as circuit:
        circuit.circuit.sampling = pb.Sampling(repetition_penalty=1.3)
        circuit.circuit.speculates = False
        (expected,) = await circuit.circuit.generate([PROMPT], 2 * GUESSED_TOKENS)
        circuit.circuit.speculates, head.sequences = True, [[*PROMPT, *expected]] * 2
        descriptor = await begun(circuit, 1, 2 * GUESSED_TOKENS)
        upcoming, links, _ = next_epoch(circuit, descriptor, [0])
        told = pb.Reserve(descriptor=descriptor, hop=0, hand_over=True)
        await ask(circuit.circuit.links[0], pb.Request(reserve=told))
        for response in await prepare(links, upcoming):
            assert response.readiness.ready, response
        key = {"session": descriptor.session, "epoch": 2}
        assert circuit.circuit.links[0].post(move(descriptor, upcoming))
        tokens: list[pb.Token] = []
        is_told = False
        while not tokens or tokens[-1].position < len(PROMPT) + 2 * GUESSED_TOKENS - 1:
            new = await taken(circuit, 1)
            tokens += new
            if new[0].epoch == 1:  # the tail has not drawn it; it may have begun by then
                known = 0 if not is_told else new[0].position
                history = pb.History(
                    **key, position=known, token_ids=head.sequences[0][known : new[-1].position + 1]
                )
                assert links[0].post(history)
                is_told = True
            elif len(head.starts) == 1:
                assert links[0].post(
                    pb.History(**key, token_ids=head.sequences[0][: new[-1].position + 1], guess_scope=b"ada")
                )
            assert links[0].closed_because is None
        assert [token.token_id for token in tokens] == expected[-len(tokens) :]
        assert bytes(head.starts[1].guess_scope) == b"ada"
        assert any(token.guessed for token in tokens if token.epoch == 2)
        await end(circuit, descriptor)


WRONG = [
    pb.History(position=1, token_ids=PROMPT),
    pb.History(token_ids=[*PROMPT, 10**6]),
    pb.History(token_ids=PROMPT * 40),
    pb.History(token_ids=PROMPT, prediction=[10**6]),
    pb.History(token_ids=PROMPT, guess_scope=bytes(17)),
]


@pytest.mark.full
@pytest.mark.parametrize("wrong", usually(WRONG[:1], WRONG[1:]))
@asynchronous
async def test_what_cannot_be_the_sequence_costs_its_teller_the_link(
    model: LocalModel, wrong: pb.History
) -> None:
    head = GuessingHead(Oracle, [[*PROMPT, *([1] * LONG)]] * 2)
    async with copied_circuit(model, CUTS, guesses=head) as circuit:
        circuit.circuit.speculates = True
        descriptor = await begun(circuit, 1, LONG)
        await move_to(circuit, descriptor, [0])
        while (await taken(circuit, 1))[0].epoch != 2:
            pass
        wrong.session, wrong.epoch = descriptor.session, 2
        assert circuit.links[0].post(wrong)
        await until(lambda: circuit.links[0].closed_because is not None)


@asynchronous
async def test_a_copy_that_is_not_whole_in_time_ends_the_move_and_its_client_hears_of_it(
    model: LocalModel,
) -> None:
    hasty = DataPlaneSettings(copies=True, timeouts=replace(PATIENT, whole_s=0.1))
    async with copied_circuit(model, CUTS, settings=hasty) as circuit:
        descriptor = await begun(circuit, new_tokens=LONG)
        upcoming, links, _ = next_epoch(circuit, descriptor, (1,))
        for response in await prepare(links, upcoming):
            assert response.readiness.ready, response
        left = circuit.circuit.peers[1]
        session = left.serving.sessions.find(descriptor.session)
        assert session is not None
        copying_of(left).sender.assign(session, None, CopyForm.KEYS_AND_VALUES)
        assert circuit.circuit.links[0].post(move(descriptor, upcoming))
        while True:
            async with asyncio.timeout(DEADLINE_S):
                peer_id, frame = await circuit.circuit.peers[0].client.handler.frames.get()
            if isinstance(frame.header, pb.Failed) and frame.header.code == "move":
                break
        assert peer_id == circuit.standbys[1].identity.peer_id
        assert frame.header.epoch == upcoming.epoch


@pytest.mark.full
@asynchronous
async def test_who_has_nothing_of_a_session_is_told_of_no_epoch(model: LocalModel) -> None:
    async with copied_circuit(model, CUTS) as circuit:
        descriptor = await begun(circuit)
        upcoming, links, _ = next_epoch(circuit, descriptor, (1,))
        upcoming.session = bytes(16)
        for response in await prepare(links, upcoming):
            assert response.refusal.code == "epoch"
        stale, links, _ = next_epoch(circuit, descriptor, ())
        stale.epoch = 1
        for response in await prepare(links, stale):
            assert response.refusal.code == "epoch"
        await taken(circuit, NEW_TOKENS - 3)


@pytest.mark.full
@asynchronous
async def test_an_epoch_whose_client_is_gone_does_not_begin(model: LocalModel) -> None:
    async with copied_circuit(model, CUTS) as circuit:
        descriptor = await begun(circuit, new_tokens=LONG)
        upcoming, links, peers = next_epoch(circuit, descriptor, (0,))
        for response in await prepare(links, upcoming):
            assert response.readiness.ready, response
        asked = pb.Request(await_ready=pb.AwaitReady(session=upcoming.session, epoch=upcoming.epoch))
        for link in links:
            assert (await ask(link, asked)).HasField("readiness")
            link.close("the client is gone")
        client = circuit.circuit.peers[0].client
        for peer in peers:
            again = await client.links.to(peer.facts)
            async with asyncio.timeout(DEADLINE_S):
                while (answer := await ask(again, asked)).HasField("readiness"):
                    pass
            assert answer.refusal.code == "epoch"


@pytest.mark.full
@asynchronous
async def test_an_epoch_that_was_prepared_and_given_up_changes_nothing(model: LocalModel) -> None:
    async with copied_circuit(model, CUTS) as circuit:
        (expected,) = await circuit.circuit.generate([PROMPT], NEW_TOKENS)
        descriptor = await begun(circuit)
        upcoming, links, _ = next_epoch(circuit, descriptor, (0,))
        await prepare(links, upcoming)
        for link in links:
            await ask(link, pb.Request(release=pb.Release(session=descriptor.session, epoch=2)))
        tokens = await taken(circuit, NEW_TOKENS - 3)
        assert [token.token_id for token in tokens] == expected[3:]
        assert {token.epoch for token in tokens} == {1}
        await circuit.copied(descriptor)
