"""A session goes on in a new epoch on the same hops, with the same tokens and without computing again what is there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.circuits.guesses import Chance, GuessingHead
from support.links.data_plane import DEADLINE_S, asynchronous, describe, soon, until
from support.models.tiny_models import greedy_reference, greedy_references, make_tiny_model
from support.swarms import served_peer
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import PATIENT_LEASES, Served, model, opened, served

from molink.dht.records.records import LayerLatency
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.ranks.backend import RankedBackend
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.kv.prefix import block_names, common_position

__all__ = ["model"]

PROMPT = [(7 * at * at + 3 * at) % 60 for at in range(70)]
KEY = b"client"
CAPACITY = 160
SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Slices are the smallest there are: 16 tokens through a layer."""


def rows_of(peer: Served) -> int:
    """Token rows that the peer has computed."""
    return int(peer.metrics.registry.get_sample_value("molink_rows_total") or 0)


class Epochs:
    """One session that its client takes from epoch to epoch."""

    def __init__(self, circuit: ServedCircuit, prompt: Sequence[int], session: int = 1) -> None:
        self.circuit = circuit
        self.prompt_tokens = len(prompt)
        self.session = session
        self.history = list(prompt)
        self.epoch = 0
        self.positions: list[int] = []
        """Where each epoch began."""

    @property
    def drawn(self) -> list[int]:
        return self.history[self.prompt_tokens :]

    async def begin(self, new_tokens: int, capacity_tokens: int = CAPACITY) -> None:
        """The next epoch, until there are so many new tokens in all."""
        circuit, self.epoch = self.circuit, self.epoch + 1
        hops = [peer.hop(span) for peer, span in zip(circuit.peers, circuit.spans, strict=True)]
        asked = describe(hops, session=self.session, epoch=self.epoch, spec=circuit.peers[0].spec)
        asked.prompt_tokens, asked.capacity_tokens = self.prompt_tokens, capacity_tokens
        asked.sampling.max_new_tokens = new_tokens
        asked.sampling.ClearField("stop_token_ids")
        asked.prefix_blocks = b"".join(block_names(self.history[: self.prompt_tokens - 1], KEY))
        await circuit.lease(asked, self.session)
        held = [min(held, len(self.history) - 1) for held in circuit.held[self.session]]
        position = common_position(list(zip(circuit.least[self.session], held, strict=True)))
        self.positions.append(position)
        start = pb.Start(session=asked.session, epoch=self.epoch, token_ids=self.history, position=position)
        assert circuit.links[0].post(start)

    async def take(self, new_tokens: int) -> None:
        """Until there are so many new tokens in all."""
        while len(self.drawn) < new_tokens:
            _, frame = await soon(self.circuit.peers[0].client.handler.frames.get())
            assert isinstance(frame.header, pb.Tokens), frame.header
            for token in frame.header.tokens:
                if (token.session[0], token.epoch) == (self.session, self.epoch):
                    assert token.position == len(self.history)
                    self.history.append(token.token_id)

    async def end(self) -> None:
        for link in self.circuit.links:
            asked = pb.Release(session=bytes([self.session]) * 16, epoch=self.epoch)
            await link.request(pb.Request(release=asked), DEADLINE_S)


async def check_nothing_left(circuit: ServedCircuit) -> None:
    for peer in circuit.peers:
        assert not peer.leases.leases
        assert len(peer.serving.sessions) == 0
        await until(lambda peer=peer: peer.serving.stepper.is_empty)
        peer.engine.pool.check_integrity()
        assert peer.engine.pool.tables == 0


def suspend_all(circuit: ServedCircuit) -> None:
    """Nobody steps, and all caches go to the hosts' memory."""
    for peer in circuit.peers:
        for session in peer.serving.sessions:
            assert session.cache is not None
            session.cache.suspend()
            assert not session.cache.holds_blocks


@asynccontextmanager
async def circuit_of(folder: Path, *, swaps: bool = False) -> AsyncIterator[ServedCircuit]:
    swap_bytes = 2**24 if swaps else 0
    async with served_circuit(opened(folder), (2, 4), kv_tokens=400, swap_bytes=swap_bytes) as circuit:
        yield circuit


@pytest.mark.parametrize(
    ("architecture", "swaps"),
    [
        ("llama", False),
        ("qwen3_next", True),
        pytest.param("gemma2", True, marks=pytest.mark.full),
        pytest.param("falcon", True, marks=pytest.mark.full),
        *(
            pytest.param(name, False, marks=pytest.mark.full)
            for name in ("mistral", "gemma2", "falcon", "qwen3_next")
        ),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("llama", "mistral")),
    ],
)
@asynchronous
async def test_a_new_epoch_on_the_same_hops_computes_the_last_token_alone(
    tmp_path: Path, architecture: str, swaps: bool
) -> None:
    folder = make_tiny_model(architecture, tmp_path)
    expected = greedy_reference(folder, PROMPT, 40)
    async with circuit_of(folder, swaps=swaps) as circuit:
        session = Epochs(circuit, PROMPT)
        for new_tokens in (5, 6, 21, 40):
            await session.begin(new_tokens)
            if swaps:
                caches = [peer.serving.sessions.get(bytes([1]) * 16, session.epoch) for peer in circuit.peers]
                assert all(one is not None and one.cache is not None for one in caches)
            await session.take(new_tokens)
        assert session.drawn == expected
        assert session.positions == [0, 74, 75, 90]
        computed = len(PROMPT) + 40 - 1
        await until(lambda: [rows_of(peer) for peer in circuit.peers] == [computed] * 3)
        await session.end()
        await check_nothing_left(circuit)


@pytest.mark.full
@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "qwen3_next"))],
)
@asynchronous
async def test_a_circuit_that_is_left_while_it_steps_goes_on_where_its_client_is(
    tmp_path: Path, architecture: str
) -> None:
    """Hops hold tokens that their client has not seen, and each another number of them."""
    folder = make_tiny_model(architecture, tmp_path)
    expected = greedy_reference(folder, PROMPT, 80)
    async with circuit_of(folder) as circuit:
        session = Epochs(circuit, PROMPT)
        for new_tokens in (1, 2, 10, 11, 30, 55, 80):
            await session.begin(80)
            await session.take(new_tokens)
        assert session.drawn == expected[: len(session.drawn)]
        await session.take(80)
        assert session.drawn == expected
        if architecture == "llama":
            assert all(session.positions[1:])
        await session.end()
        await check_nothing_left(circuit)


@pytest.mark.full
@pytest.mark.parametrize("moments", [range(0, 24, 8), pytest.param(range(0, 24, 3), marks=pytest.mark.full)])
@asynchronous
async def test_a_prompt_that_is_left_in_slices_goes_on_behind_what_is_through(
    model: LocalModel, moments: range
) -> None:
    expected = greedy_reference(model.folder, PROMPT, 8)
    other_expected = greedy_reference(model.folder, PROMPT[5:], 40)
    async with served_circuit(model, (2, 4), kv_tokens=600, profile=SLOW) as circuit:
        for turns in moments:
            other = Epochs(circuit, PROMPT[5:], session=2)
            await other.begin(40)
            await other.take(2)
            session = Epochs(circuit, PROMPT)
            await session.begin(8)
            for _ in range(turns):
                await asyncio.sleep(0)
            await session.begin(8)
            await asyncio.sleep(0)
            await session.begin(8)
            tokens: dict[int, list[int]] = {1: session.history, 2: other.history}
            while len(session.drawn) < 8 or len(other.drawn) < 40:
                _, frame = await soon(circuit.peers[0].client.handler.frames.get())
                for token in frame.header.tokens:
                    number = token.session[0]
                    if token.epoch == (session, other)[number - 1].epoch:
                        assert token.position == len(tokens[number])
                        tokens[number].append(token.token_id)
            assert (session.drawn, other.drawn) == (expected, other_expected)
            await session.end()
            await other.end()
            await check_nothing_left(circuit)
            for peer in circuit.peers:
                peer.engine.pool.limit(0)
                peer.engine.pool.limit(None)


@asynchronous
async def test_a_client_whose_link_was_lost_goes_on_over_another_one(model: LocalModel) -> None:
    expected = greedy_reference(model.folder, PROMPT, 20)
    async with served_circuit(model, (3,), kv_tokens=200) as circuit:
        session = Epochs(circuit, PROMPT)
        await session.begin(20)
        await session.take(6)
        client = circuit.peers[0].client
        for number, peer in enumerate(circuit.peers):
            link = circuit.links[number]
            link.close("cut")
            await until(lambda peer=peer: peer.serving.links.find(client.peer_id) is None)
            circuit.links[number] = await client.links.to(peer.facts)
        await session.begin(20)
        await session.take(20)
        assert session.drawn == expected
        assert session.positions[1] >= len(PROMPT) + 5
        await session.end()
        await check_nothing_left(circuit)


@asynchronous
async def test_caches_of_a_client_that_does_not_come_back_are_freed(
    model: LocalModel,
) -> None:
    gone = replace(PATIENT_LEASES, abandoned_s=0.0)
    async with served_circuit(model, (3,), kv_tokens=200, lease_times=gone) as circuit:
        session = Epochs(circuit, PROMPT)
        await session.begin(20)
        await session.take(6)
        for link in circuit.links:
            link.close("gone")
        await until(lambda: not any(peer.leases.leases for peer in circuit.peers))
        await check_nothing_left(circuit)


@pytest.mark.full
@pytest.mark.parametrize("epochs", [40, pytest.param(200, marks=pytest.mark.full)])
@asynchronous
async def test_many_epochs_take_no_more_memory_than_two(model: LocalModel, epochs: int) -> None:
    expected = greedy_reference(model.folder, PROMPT[:8], 110)
    async with served_circuit(model, (3,), kv_tokens=200) as circuit:
        session, used = Epochs(circuit, PROMPT[:8]), []
        for epoch in range(epochs):
            new_tokens = 10 + epoch // 2
            await session.begin(110)
            await session.take(new_tokens)
            assert [len(peer.leases.leases) for peer in circuit.peers] == [1, 1]
            assert [len(peer.serving.sessions) for peer in circuit.peers] == [1, 1]
            used.append([(peer.engine.pool.used_bytes, peer.engine.pool.tables) for peer in circuit.peers])
        assert used == used[:1] * epochs
        assert session.drawn == expected[: len(session.drawn)]
        await session.end()
        await check_nothing_left(circuit)


@asynchronous
async def test_another_span_or_capacity_begins_anew_and_frees_what_was_there(model: LocalModel) -> None:
    expected = greedy_reference(model.folder, PROMPT, 12)
    async with served_circuit(model, (3,), kv_tokens=200) as circuit:
        session = Epochs(circuit, PROMPT)
        await session.begin(4)
        await session.take(4)
        for peer in circuit.peers:
            peer.engine.pool.check_integrity()
        await session.begin(8, CAPACITY - 16)
        await session.take(8)
        assert session.positions == [
            0,
            64,
        ]  # full blocks of the prompt have names, and are there for every session
        assert [peer.engine.pool.tables for peer in circuit.peers] == [1, 1]
        await session.begin(12, CAPACITY - 16)
        await session.take(12)
        assert session.positions == [0, 64, 77]
        assert session.drawn == expected
        await session.end()
        await check_nothing_left(circuit)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@asynchronous
async def test_a_peer_of_two_ranks_keeps_its_caches_too(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(make_tiny_model(architecture, tmp_path))
    expected = greedy_reference(model.folder, PROMPT, 30)
    backend = RankedBackend(model, ("cpu", "cpu"))
    monkeypatch.setattr(served_peer, "DeviceBackend", lambda *_: backend)
    async with backend, served(model) as peer:
        circuit = ServedCircuit([peer], [model.spec.whole], [peer.link])
        session = Epochs(circuit, PROMPT)
        for new_tokens in (5, 6, 21, 30):
            await session.begin(new_tokens)
            await session.take(new_tokens)
        assert session.drawn == expected
        assert session.positions == [0, 74, 75, 90]
        await until(lambda: rows_of(peer) == len(PROMPT) + 30 - 1)
        await session.end()
        assert not peer.leases.leases


@pytest.mark.full
@asynchronous
async def test_two_ranks_go_back_behind_guesses_that_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(make_tiny_model("mistral", tmp_path))
    prompts = [PROMPT, PROMPT[:9]]
    expected = greedy_references(model.folder, prompts, 30)
    head = GuessingHead(Chance, [[*prompt, *new] for prompt, new in zip(prompts, expected, strict=True)])
    backend = RankedBackend(model, ("cpu", "cpu"))
    monkeypatch.setattr(served_peer, "DeviceBackend", lambda *_: backend)
    async with backend, served(model, kv_tokens=400, guesses=head) as peer:
        circuit = ServedCircuit([peer], [model.spec.whole], [peer.link], speculates=True)
        assert await circuit.generate(prompts, 30) == expected
    assert 0 < head.accepted < head.guessed
