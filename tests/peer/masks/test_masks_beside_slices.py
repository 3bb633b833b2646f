"""A session with a grammar draws what it would draw alone while prompts, its own or another's, are computed in slices:
its mask changes between two slices of one step, and each draw goes by the mask of its position."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.models.tiny_models import VOCABULARY, greedy_references
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model
from torch import Tensor

from molink.dht.records.records import LayerLatency
from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.tail_draws import TailDraws
from molink.peer.masks.mask_worker import MaskOrder, NextMask
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.serving.data_plane import OfferedCompute
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.batching.engine import Engine
from molink.shards.batching.partial_step import PartialStep, SliceBatch
from molink.shards.spec import GRAMMARS

__all__ = ["model"]

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Slices are the smallest there are: 16 tokens through a layer."""
NEW_TOKENS = 60
Opened: TypeAlias = Callable[[Sequence[int]], AbstractAsyncContextManager["Circuit"]]
"""Peers of which each holds the layers between two of these cuts."""
SHORT, LONG = [3, 1, 4], [(7 * position + 2) % VOCABULARY for position in range(150)]
GRAMMAR = pb.Grammar(regex="one in five")


def allows(tokens: Sequence[int], token: int) -> bool:
    """Whether the grammar lets this token come behind those that were generated: one in five, others each time."""
    return token % 5 == (sum(tokens) + len(tokens)) % 5


def bits(tokens: Sequence[int]) -> bytes:
    allowed = bytearray(-(-VOCABULARY // 8))
    for token in range(VOCABULARY):
        allowed[token // 8] |= allows(tokens, token) << token % 8
    return bytes(allowed)


@dataclass(slots=True)
class Masks:
    """As the worker that follows grammars."""

    seen: list[str]

    def begin(self, order: MaskOrder) -> None:
        asyncio.get_running_loop().call_soon(self._answer, order)

    def _answer(self, order: MaskOrder) -> None:
        self.seen.append("mask")
        order.done(NextMask(order.position, bits(order.generated_behind(0))))


@dataclass(slots=True)
class Circuit:
    """Peers that draw by the grammar, and what became of their sessions in order: masks, and slices."""

    served: ServedCircuit
    seen: list[str] = field(default_factory=list)

    async def start(self, session: int, prompt: list[int], *, constrained: bool) -> bytes:
        self.served.sampling = pb.Sampling(grammar=GRAMMAR) if constrained else pb.Sampling()
        asked = await self.served.reserve(session, len(prompt), NEW_TOKENS)
        if constrained:
            self.tell(session, 0, prompt)
        assert self.served.links[0].post(pb.Start(session=asked.session, epoch=1, token_ids=prompt))
        return asked.session

    def tell(self, session: int, position: int, tokens: list[int]) -> None:
        """The client says what the sequence is from there on."""
        told = pb.History(session=bytes([session]) * 16, epoch=1, position=position, token_ids=tokens)
        assert self.served.links[-1].post(told)

    async def tokens(self, *sessions: bytes) -> list[list[int]]:
        got: dict[bytes, list[int]] = {one: [] for one in sessions}
        while any(len(tokens) < NEW_TOKENS for tokens in got.values()):
            _, frame = await soon(self.served.peers[0].client.handler.frames.get())
            assert isinstance(frame.header, pb.Tokens), frame.header
            for token in frame.header.tokens:
                got[token.session].append(token.token_id)
        return list(got.values())


@pytest.fixture
def opened(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(OfferedCompute, "tail_abilities", (GRAMMARS,))

    @asynccontextmanager
    async def opened(cuts: Sequence[int]) -> AsyncIterator[Circuit]:
        served = served_circuit(model, cuts, kv_tokens=2000, cut=equal_chunks(60), profile=SLOW)
        async with served as peers:
            circuit = Circuit(peers)
            advance = Engine.advance_slice

            def advanced(
                engine: Engine, piece: SliceBatch, layers: int
            ) -> tuple[tuple[PartialStep, ...], Tensor | None]:
                circuit.seen.append("slice")
                return advance(engine, piece, layers)

            monkeypatch.setattr(Engine, "advance_slice", advanced)
            peers.peers[-1].serving.stepper.draws.masks = Masks(circuit.seen)  # type: ignore[assignment]
            yield circuit

    return opened


async def alone(opened: Opened, cuts: Sequence[int], prompt: list[int]) -> list[int]:
    async with opened(cuts) as circuit:
        (tokens,) = await circuit.tokens(await circuit.start(1, prompt, constrained=True))
    assert "slice" not in circuit.seen
    assert all(allows(tokens[:at], token) for at, token in enumerate(tokens))
    return tokens


def masks_between_slices(seen: Sequence[str]) -> int:
    first, last = seen.index("slice"), len(seen) - seen[::-1].index("slice")
    return seen[first:last].count("mask")


@pytest.mark.full
@pytest.mark.parametrize("cuts", [(), (3,)])
@pytest.mark.parametrize("constrained", [False, True])
@asynchronous
async def test_a_session_with_a_grammar_draws_the_same_tokens_beside_another_ones_prompt_in_slices(
    model: LocalModel, opened: Opened, cuts: Sequence[int], *, constrained: bool
) -> None:
    """And so does the other one, whose first token is drawn behind its last slice, by its own grammar or none."""
    expected = await alone(opened, cuts, SHORT)
    of_other = (
        await alone(opened, cuts, LONG)
        if constrained
        else greedy_references(model.folder, [LONG], NEW_TOKENS)[0]
    )
    async with opened(cuts) as circuit:
        first = await circuit.start(1, SHORT, constrained=True)
        await until(lambda: circuit.seen.count("mask") > 2)
        second = await circuit.start(2, LONG, constrained=constrained)
        assert await circuit.tokens(first, second) == [expected, of_other]
    assert masks_between_slices(circuit.seen) > 1


@pytest.mark.full
@asynchronous
async def test_what_a_client_says_between_two_slices_of_its_prompt_changes_nothing_of_that_step(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draw behind the last slice was settled before the first one."""
    expected, of_other = await alone(opened, (), SHORT), await alone(opened, (), LONG)
    begun, told = threading.Event(), threading.Event()
    async with opened(()) as circuit:
        advance, learn = Engine.advance_slice, TailDraws.learn

        def advanced(
            engine: Engine, piece: SliceBatch, layers: int
        ) -> tuple[tuple[PartialStep, ...], Tensor | None]:
            result = advance(engine, piece, layers)
            if any(step.row.logit_rows for step in piece.steps):
                begun.set()
                assert told.wait(DEADLINE_S)
            return result

        def learnt(
            draws: TailDraws,
            session: ServedSession,
            position: int,
            tokens: Sequence[int],
            *,
            is_drawn: bool = False,
        ) -> None:
            learn(draws, session, position, tokens, is_drawn=is_drawn)
            if position == len(LONG) and not is_drawn:
                told.set()

        first = await circuit.start(1, SHORT, constrained=True)
        await until(lambda: circuit.seen.count("mask") > 2)
        second = await circuit.start(2, LONG, constrained=True)
        monkeypatch.setattr(Engine, "advance_slice", advanced)
        monkeypatch.setattr(TailDraws, "learn", learnt)
        await until(begun.is_set)
        slices = circuit.seen.count("slice")
        circuit.tell(2, len(LONG), [(of_other[0] + 1) % VOCABULARY])
        assert await circuit.tokens(first, second) == [expected, of_other]
    assert circuit.seen.count("slice") > slices
