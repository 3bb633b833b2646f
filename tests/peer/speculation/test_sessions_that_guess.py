"""Sessions that guess beside others, join, end in mid-trip, fill the context, and hear frames late, twice or never."""

import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.circuits.guesses import Chance, GuessingHead, LastWrong, NeverRight, Oracle
from support.links.data_plane import DEADLINE_S, End, asynchronous, soon
from support.models.tiny_models import CONTEXT, greedy_reference, greedy_references
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model

from molink.peer.engine.guessing import HeadGuesses
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.speculation.draft_model import DraftModel, DraftShape
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.peer.wire.link.link import Link, LinkHandler
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame
from molink.shards.kv.prefix import NAME_BYTES, block_names

__all__ = ["model"]

NEW_TOKENS, FEW_TOKENS = 40, 18
PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + one)] for one in range(8)]
MANY_PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(5 + 2 * one)] for one in range(20)]
FIXED = 4
"""Guesses of each trip: so that trips do not depend on what this machine takes."""
CIRCUITS = ((), (3,), (2, 4), (1, 3, 5))
"""Where the layers are cut between one, two, three and four peers."""


def whole(prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)]


async def begin(circuit: ServedCircuit, session: int, prompt: Sequence[int], new_tokens: int) -> bytes:
    """The session's key, once it has been started."""
    descriptor = await circuit.reserve(session, len(prompt), new_tokens)
    assert circuit.links[0].post(pb.Start(session=descriptor.session, epoch=1, token_ids=prompt))
    return descriptor.session


async def next_tokens(circuit: ServedCircuit) -> Sequence[pb.Token]:
    """Those of the next frame."""
    _, frame = await soon(circuit.peers[0].client.handler.frames.get())
    tokens: Sequence[pb.Token] = frame.header.tokens  # type: ignore[attr-defined] # whatever else comes fails the test
    return tokens


async def release(circuit: ServedCircuit, told: pb.Release) -> None:
    await asyncio.gather(*(link.request(pb.Request(release=told), DEADLINE_S) for link in circuit.links))


@asynchronous
async def test_eight_sessions_that_join_one_after_the_other_have_the_tokens_of_transformers(
    model: LocalModel,
) -> None:
    """Each joins while those before it decode, with guesses of different numbers."""
    expected = [tokens[:FEW_TOKENS] for tokens in greedy_references(model.folder, PROMPTS, NEW_TOKENS)]
    head = GuessingHead(Chance, whole(PROMPTS, expected), most=7)
    async with served_circuit(model, (3,), kv_tokens=600, guesses=head) as circuit:
        got: dict[bytes, list[int]] = {}
        waiting = deque(enumerate(PROMPTS, 1))
        while waiting or any(len(tokens) < FEW_TOKENS for tokens in got.values()):
            if waiting and all(len(tokens) > 2 for tokens in got.values()):
                got[await begin(circuit, *waiting.popleft(), FEW_TOKENS)] = []
            for token in await next_tokens(circuit):
                got[token.session].append(token.token_id)
        assert list(got.values()) == expected
    numbers = {guessed for source in head.sources for guessed, _ in source.records}
    assert len(numbers) > 3
    assert 0 < head.accepted < head.guessed


class Disturbed:
    """Before a peer's own handler: what its neighbours have computed, drawn and guessed comes twice, and some of it
    once more much later; guesses come late, or never."""

    def __init__(self, inner: LinkHandler, seed: int) -> None:
        self.inner = inner
        self.chance = random.Random(seed)
        self.seen: deque[tuple[Link, Frame]] = deque(maxlen=30)
        self.late: list[tuple[Link, Frame]] = []
        self.turns: Counter[str] = Counter()

    def on_frame(self, link: Link, frame: Frame) -> None:
        if not isinstance(frame.header, pb.Activations | pb.Tokens | pb.Guesses):
            self.inner.on_frame(link, frame)
            return
        turn = self.chance.choice(("at once", "at once", "late", "never"))
        if isinstance(frame.header, pb.Guesses) and turn != "at once":
            self.turns[turn] += 1
            if turn == "late":
                self.late.append((link, copied(frame)))
            return
        self.seen.append((link, copied(frame)))
        again = copied(frame)
        self.inner.on_frame(link, frame)
        self.inner.on_frame(link, again)
        for kept, where in ((self.late, 0), (self.seen, self.chance.randrange(len(self.seen)))):
            if kept and self.chance.random() < 0.5:
                self.turns["again"] += 1
                old_link, old = kept[where]
                self.inner.on_frame(old_link, copied(old))
        self.late.clear()

    async def on_request(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        return await self.inner.on_request(link, request)

    def on_closed(self, link: Link, reason: str) -> None:
        self.inner.on_closed(link, reason)


def copied(frame: Frame) -> Frame:
    """The same, whatever becomes of the other."""
    header: Any = type(frame.header)()
    header.CopyFrom(frame.header)
    return Frame(header, memoryview(bytes(frame.payload)))


@pytest.mark.full
@pytest.mark.parametrize(
    "cuts", [(2, 4), *(pytest.param(cuts, marks=pytest.mark.full) for cuts in ((3,), (1, 3, 5)))]
)
@asynchronous
async def test_frames_that_come_twice_or_late_and_guesses_that_never_come_change_no_token(
    model: LocalModel, cuts: tuple[int, ...]
) -> None:
    handlers: list[Disturbed] = []

    def wrap(inner: LinkHandler) -> LinkHandler:
        handlers.append(Disturbed(inner, len(handlers)))
        return handlers[-1]

    prompts = PROMPTS[:4]
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    head = GuessingHead(LastWrong, whole(prompts, expected))
    settings = DataPlaneSettings(copies=True, wrap=wrap)
    async with served_circuit(model, cuts, kv_tokens=600, guesses=head, settings=settings) as circuit:
        assert await circuit.generate(prompts, NEW_TOKENS) == expected
        assert all(link.closed_because is None for link in circuit.links)
    turns = sum((one.turns for one in handlers), Counter())
    assert min(turns[what] for what in ("late", "never", "again")) > 0
    assert 0 < head.accepted < head.guessed


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (LastWrong, range(4, 30, 5)),
        *[
            pytest.param(kind, range(1, 33), marks=pytest.mark.full)
            for kind in (Oracle, LastWrong, NeverRight, Chance)
        ],
    ],
)
@asynchronous
async def test_what_is_cancelled_with_a_trip_on_its_way_shares_what_was_accepted_and_no_more(
    model: LocalModel, kind: type[Oracle], lengths: Sequence[int]
) -> None:
    """The head begins the next trip before its client has the tokens of the latest one."""
    prompt = [(5 * at + 2) % 60 for at in range(20)]
    (answer,) = greedy_references(model.folder, [prompt], NEW_TOKENS)
    head = GuessingHead(kind, [])
    async with served_circuit(model, (3,), kv_tokens=600, guesses=head) as circuit:
        for length in lengths:
            head.sequences, tokens = [[*prompt, *answer]] * 2, list[int]()
            names = block_names(prompt[:-1], key := bytes([length]))  # of other lengths it shares nothing
            descriptor = await circuit.reserve(2, len(prompt), NEW_TOKENS, b"".join(names))
            assert circuit.links[0].post(pb.Start(session=descriptor.session, epoch=1, token_ids=prompt))
            while len(tokens) < length:
                tokens += [token.token_id for token in await next_tokens(circuit)]
            further = block_names([*prompt, *tokens], key)[len(descriptor.prefix_blocks) // NAME_BYTES :]
            told = pb.Release(session=descriptor.session, epoch=1, further_blocks=b"".join(further))
            told.valid_tokens = len(prompt) + len(tokens) - 1
            await release(circuit, told)
            while not circuit.peers[0].client.handler.frames.empty():
                await next_tokens(circuit)  # those of the trip that was on its way
            chat = [*prompt, *tokens, 7, 8]
            expected = greedy_references(model.folder, [chat], 6)
            head.sequences = [[*chat, *expected[0]]]
            assert await circuit.generate([chat], 6, key) == expected
            assert circuit.held[1] == [told.valid_tokens // 16 * 16] * 2
    assert (head.accepted > 0) == (kind is not NeverRight)
    assert (head.accepted < head.guessed) == (kind is not Oracle)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "new_tokens"),
    [(Oracle, 20), *[pytest.param(LastWrong, new, marks=pytest.mark.full) for new in range(1, 9)]],
)
@asynchronous
async def test_a_trip_ends_where_the_context_does(
    model: LocalModel, kind: type[Oracle], new_tokens: int
) -> None:
    prompt = [(5 * at + at * at // 7 + 2) % 60 for at in range(CONTEXT - 1 - new_tokens)]
    expected = greedy_reference(model.folder, prompt, new_tokens + 1)
    head = GuessingHead(kind, [[*prompt, *expected, 3, 4, 5, 6]])
    async with served_circuit(model, (3,), kv_tokens=CONTEXT, guesses=head) as circuit:
        circuit.sampling = pb.Sampling(max_new_tokens=100)
        descriptor = await circuit.reserve(1, len(prompt), new_tokens)
        assert descriptor.capacity_tokens == CONTEXT
        assert circuit.links[0].post(pb.Start(session=descriptor.session, epoch=1, token_ids=prompt))
        tokens: list[pb.Token] = []
        while not tokens or tokens[-1].finish == pb.NOT_FINISHED:
            tokens += await next_tokens(circuit)
        await release(circuit, pb.Release(session=descriptor.session, epoch=1))
    assert [token.token_id for token in tokens] == expected
    assert (tokens[-1].position, tokens[-1].finish) == (CONTEXT - 1, pb.LENGTH)
    assert (head.accepted > 0) == (new_tokens > (1 if kind is Oracle else 2))


@pytest.mark.full
@asynchronous
async def test_a_peer_says_of_what_it_decodes_no_token_that_was_only_guessed(model: LocalModel) -> None:
    """The step with which the generation ends has guesses behind its stop token."""
    (expected,) = greedy_references(model.folder, PROMPTS[:1], NEW_TOKENS)
    at = next(at for at in range(6, NEW_TOKENS - 4) if expected[at] not in expected[:at])
    head = GuessingHead(NeverRight, [[*PROMPTS[0], *expected]])
    async with served_circuit(model, (3,), kv_tokens=200, guesses=head) as circuit:
        circuit.sampling = pb.Sampling(stop_token_ids=[expected[at]])
        descriptor = await circuit.reserve(1, len(PROMPTS[0]), NEW_TOKENS)
        assert circuit.links[0].post(pb.Start(session=descriptor.session, epoch=1, token_ids=PROMPTS[0]))
        tokens: list[pb.Token] = []
        while not tokens or tokens[-1].finish == pb.NOT_FINISHED:
            tokens += await next_tokens(circuit)
        for peer in circuit.peers:
            assert peer.serving.roles is not None
            assert peer.serving.roles.own_load().decoding_tokens == (len(PROMPTS[0]) + at,)
        await release(circuit, pb.Release(session=descriptor.session, epoch=1))
    assert head.guessed > 0


@pytest.mark.full
@asynchronous
async def test_of_two_clients_with_one_text_neither_is_guessed_for_from_what_the_other_generated(
    model: LocalModel,
) -> None:
    prompt, head = PROMPTS[0], HeadGuesses(tables=True, fixed=FIXED)
    expected = greedy_references(model.folder, [prompt], NEW_TOKENS)
    async with (
        served_circuit(model, (3,), kv_tokens=400, guesses=head) as circuit,
        End(is_client=True) as end,
    ):
        first, *others = circuit.peers
        links = [await end.links.to(peer.facts) for peer in circuit.peers]
        other = ServedCircuit([replace(first, client=end), *others], circuit.spans, links, speculates=True)
        trips, tables = [], []
        for client in (circuit, circuit, other, other):
            before = head.counts.trips, head.counts.accepted.get("table", 0)
            assert await client.generate([prompt], NEW_TOKENS) == expected
            trips.append(head.counts.trips - before[0])
            tables.append(head.counts.accepted.get("table", 0) - before[1])
    assert trips[1] < trips[0], "the first client's own generation is known by then"
    assert (trips[2:], tables[2:]) == (trips[:2], tables[:2]), "the other's begins as if there had been none"


@pytest.mark.parametrize(
    ("source", "cuts", "prompts"),
    [
        ("prediction", (3,), MANY_PROMPTS[:2]),
        *[
            pytest.param(source, cuts, MANY_PROMPTS, marks=pytest.mark.full)
            for source in ("lookup", "tables", "prediction", "draft")
            for cuts in CIRCUITS
        ],
    ],
)
@asynchronous
async def test_with_each_source_greedy_tokens_are_those_of_transformers(
    model: LocalModel, source: str, cuts: tuple[int, ...], prompts: list[list[int]]
) -> None:
    """Of draft models a small one; those on the head's device are in `test_drafted_circuits`."""
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    draft = draft_without_a_layer(model) if source == "draft" else None
    head = HeadGuesses(tables=source == "tables", draft=draft, fixed=FIXED)

    def guesses(session: Any, start: pb.Start) -> SessionGuesses | None:  # noqa: ANN401 - a served session
        if source == "prediction":
            tokens = expected[session.key.session[0] - 1]
            start.prediction.extend([*tokens[:1], (tokens[1] + 1) % 60, *tokens[2:]])
        return head(session, start)

    async with served_circuit(model, cuts, kv_tokens=100 * len(prompts), guesses=guesses) as circuit:
        for _ in range(2):  # what is in tables was generated before
            assert await circuit.generate(prompts, NEW_TOKENS) == expected
    name = source.removesuffix("s")
    assert 0 < head.counts.accepted[name] < head.counts.guessed[name]


def draft_without_a_layer(model: LocalModel) -> DraftModel:
    """The served model but for its last layer, which guesses many of its tokens."""
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    shape = DraftShape(
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // heads,
        config["rms_norm_eps"],
        10_000.0,
        CONTEXT,
    )
    tensors = load_file(model.folder / "model.safetensors")
    return DraftModel.of(shape, config["num_hidden_layers"] - 1, tensors)
