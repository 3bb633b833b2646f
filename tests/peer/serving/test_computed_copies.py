"""A standby computes, from what came in to its hop, what its hop has; what cannot be computed costs the copy alone."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
import torch
from support.circuits.guesses import GuessingHead, LastWrong, Oracle
from support.links.data_plane import DEADLINE_S, asynchronous, until
from support.models.tiny_models import greedy_reference, make_tiny_model
from support.pairwise import usually
from support.swarms.copied_circuit import CopiedCircuit, ask, ask_until_ready, copied_circuit, copying_of
from support.swarms.served_peer import model, opened

from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass
from molink.routing.routes.copy_forms import CopyForm, copied_bytes_per_token
from molink.shards.kv.prefix import common_position

__all__ = ["model"]

PROMPT = [(7 * at + 3) % 60 for at in range(40)]
NEW_TOKENS = 16


async def begun(circuit: CopiedCircuit, tokens: int = 3) -> tuple[pb.SessionDescriptor, list[int]]:
    """A generation whose standbys compute, of which so many tokens have come."""
    descriptor = await circuit.circuit.reserve(1, len(PROMPT), NEW_TOKENS)
    for response in await circuit.keep(descriptor, computed=True):
        assert response.HasField("reserved"), response
    return descriptor, await circuit.start(descriptor, PROMPT, tokens)


def behind(gate: Event, function: Callable[..., object]) -> Callable[..., object]:
    """The function, once the gate is open."""

    def call(*arguments: object) -> object:
        gate.wait(DEADLINE_S)
        return function(*arguments)

    return call


async def go_on_with_standby(
    circuit: CopiedCircuit, descriptor: pb.SessionDescriptor, at: int, history: Sequence[int]
) -> tuple[list[int], int]:
    """The rest of the tokens, from the circuit with the standby in the place of hop `at`, and where it began."""
    descriptor.epoch, descriptor.sampling.max_new_tokens = 3, NEW_TOKENS
    descriptor.hops[at].CopyFrom(circuit.standbys[at].hop(circuit.circuit.spans[at]))
    links = list(circuit.circuit.links)
    links[at] = circuit.links[at]
    asked = [
        pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop, ready_within_ms=4000))
        for hop in range(len(links))
    ]
    answers = await asyncio.gather(*map(ask_until_ready, links, asked))
    assert all(answer.readiness.ready for answer in answers), answers
    held = [(one.readiness.least_held_tokens, one.readiness.held_tokens) for one in answers]
    position = min(common_position(held), len(history) - 1)
    assert links[0].post(pb.Start(session=descriptor.session, epoch=3, token_ids=history, position=position))
    frames, found = circuit.circuit.peers[0].client.handler.frames, []
    while len(history) - len(PROMPT) + len(found) < NEW_TOKENS:
        async with asyncio.timeout(DEADLINE_S):
            _, frame = await frames.get()
        if isinstance(frame.header, pb.Tokens):
            found += [token.token_id for token in frame.header.tokens if token.epoch == 3]
    return found, position


@pytest.mark.parametrize(
    ("kind", "at", "guesses"),
    usually(
        [("llama", 0, None), ("qwen3_next", 1, None), ("llama", 1, LastWrong)],
        [
            ("llama", 1, None), ("mistral", 0, None), ("mistral", 1, None), ("gemma2", 0, None),
            ("gemma2", 1, None),
            ("qwen3_next", 0, None), ("llama", 0, Oracle), ("mistral", 1, LastWrong), ("gemma2", 0, LastWrong),
            ("qwen3_next", 0, LastWrong), ("qwen3_next", 1, LastWrong), ("falcon_alibi", 1, LastWrong),
        ],
    ),
)  # fmt: skip
def test_a_standby_that_has_computed_its_copy_goes_on_with_the_tokens_of_transformers(
    kind: str, at: int, guesses: type[Oracle] | None, tmp_path: Path
) -> None:
    """From token ids (0) or inputs (1); of layers where all tokens are seen, in one window, in two kinds of layers, and
    where states are kept; and where the head guesses."""
    folder = make_tiny_model(kind, tmp_path)
    expected = greedy_reference(folder, PROMPT, NEW_TOKENS)
    head = None if guesses is None else GuessingHead(guesses, [[*PROMPT, *expected]], most=2)

    @asynchronous
    async def go_on() -> None:
        async with copied_circuit(opened(folder), (3,), guesses=head) as circuit:
            descriptor = await circuit.circuit.reserve(1, len(PROMPT), NEW_TOKENS)
            descriptor.epoch, descriptor.sampling.max_new_tokens = 2, 6
            await circuit.circuit.lease(descriptor)
            await circuit.keep(descriptor, computed=True)
            first = await circuit.start(descriptor, PROMPT, 6)
            await circuit.copied(descriptor)
            history = [*PROMPT, *first]
            found, position = await go_on_with_standby(circuit, descriptor, at, history)
            assert position >= len(PROMPT), "the prompt is not computed again"
            assert first + found == expected
            standby = circuit.standbys[at].serving.sessions.get(descriptor.session, 3)
            assert standby is not None
            assert not standby.shares
            assert standby.inputs is not None
            assert standby.inputs.start == 0, "what came as a copy can be copied on"
            assert not circuit.standbys[at].leases.copies

    go_on()
    assert head is None or all(source.records for source in head.sources)


@pytest.mark.full
@asynchronous
async def test_a_copy_from_inputs_takes_the_bytes_that_are_predicted_and_no_keys_and_values(
    model: LocalModel,
) -> None:
    async with copied_circuit(model, (2, 4)) as circuit:
        descriptor, _ = await begun(circuit)
        await circuit.tokens(NEW_TOKENS - 3)
        await circuit.copied(descriptor)
        for at, peer in enumerate(circuit.circuit.peers):
            span, sender = circuit.circuit.spans[at], copying_of(peer).sender
            form = CopyForm.INPUTS if at else CopyForm.TOKEN_IDS
            tokens = sender.sent_tokens[form]
            assert tokens == sum(sender.sent_tokens.values()) == len(PROMPT) + NEW_TOKENS - 1
            predicted = copied_bytes_per_token(peer.spec, span, form, peer.spec.dtype)
            assert sender.sent_bytes == tokens * predicted
            held, kept = (
                torch.frombuffer(bytearray(content), dtype=torch.float32)
                for content in circuit.content(descriptor, at)
            )
            torch.testing.assert_close(kept, held, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@asynchronous
async def test_rows_in_int8_are_copied_as_they_came(model: LocalModel) -> None:
    settings = DataPlaneSettings(copies=True, activation_codecs=("int8",))
    async with copied_circuit(model, (3,), settings=settings) as circuit:
        descriptor = await circuit.circuit.reserve(1, len(PROMPT), NEW_TOKENS)
        descriptor.epoch, descriptor.activation_codec = 2, "int8"
        await circuit.circuit.lease(descriptor)
        await circuit.keep(descriptor, computed=True)
        await circuit.start(descriptor, PROMPT, NEW_TOKENS)
        await circuit.copied(descriptor)
        sender = copying_of(circuit.circuit.peers[1]).sender
        predicted = copied_bytes_per_token(model.spec, circuit.circuit.spans[1], CopyForm.INPUTS, "int8")
        assert sender.sent_bytes == sender.sent_tokens[CopyForm.INPUTS] * predicted
        held, kept = (
            torch.frombuffer(bytearray(content), dtype=torch.float32)
            for content in circuit.content(descriptor, 1)
        )
        torch.testing.assert_close(kept, held, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@asynchronous
async def test_what_is_no_longer_logged_is_copied_as_keys_and_values(model: LocalModel) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor = await circuit.circuit.reserve(1, len(PROMPT), NEW_TOKENS)
        first = await circuit.start(descriptor, PROMPT, 3)
        session = circuit.circuit.peers[1].serving.sessions.get(descriptor.session, 1)
        assert session is not None
        assert session.inputs is not None
        session.inputs.drop()
        lost = session.inputs.start
        assert lost >= len(PROMPT)
        await circuit.keep(descriptor, computed=True)
        await circuit.tokens(NEW_TOKENS - 3)
        await circuit.copied(descriptor)
        sent = copying_of(circuit.circuit.peers[1]).sender.sent_tokens
        assert sent[CopyForm.KEYS_AND_VALUES] == lost
        assert sent[CopyForm.INPUTS] == len(PROMPT) + NEW_TOKENS - 1 - lost
        assert len(first) == 3


@pytest.mark.full
@asynchronous
async def test_a_copy_that_a_busy_standby_does_not_compute_goes_on_as_keys_and_values_where_it_is(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor, _ = await begun(circuit)
        is_free = Event()
        for standby in circuit.standbys:
            monkeypatch.setattr(standby.engine, "step", behind(is_free, standby.engine.step))
        await circuit.tokens(NEW_TOKENS - 3)
        senders = [copying_of(peer).sender for peer in circuit.circuit.peers]
        whole = len(PROMPT) + NEW_TOKENS - 1
        await until(lambda: all(sum(one.sent_tokens.values()) == whole for one in senders))
        for response in await circuit.keep(descriptor):
            assert response.HasField("reserved"), response
        is_free.set()
        await circuit.copied(descriptor)
        for sender, standby in zip(senders, circuit.standbys, strict=True):
            computed = copying_of(standby).keeper.writer.computed_tokens
            assert computed < whole
            assert sender.sent_tokens[CopyForm.KEYS_AND_VALUES] == whole - computed


def part(
    descriptor: pb.SessionDescriptor, start: int, tokens: int, payload: bytes, form: CopyForm
) -> pb.CopyPart:
    size = len(payload)
    value = pb.CopyForm.ValueType(form)
    return pb.CopyPart(
        session=descriptor.session, epoch=1, start=start, tokens=tokens, payload_bytes=size, form=value
    )


@pytest.mark.full
@asynchronous
async def test_a_hop_that_sends_what_nobody_could_compute_from_loses_the_copy_and_nobody_else_anything(
    model: LocalModel,
) -> None:
    row, ids = model.spec.activation_bytes, CopyForm.TOKEN_IDS
    beyond = model.spec.vocabulary_size.to_bytes(4, "little")
    cases: list[tuple[int, int, int, bytes, CopyForm]] = [
        (0, 1, 1, bytes(4), ids),
        (0, 0, 2, bytes(4), ids),
        (0, 0, 1, bytes(5), ids),
        (0, 0, 0, b"", ids),
        (0, 0, 1, beyond, ids),
        (0, 0, 1, bytes(row), CopyForm.INPUTS),
        (0, 0, 10**6, bytes(4), ids),
        (1, 0, 1, bytes(4), ids),
        (1, 0, 1, bytes(row - 4), CopyForm.INPUTS),
        (1, 0, 2, bytes(row), CopyForm.INPUTS),
        (1, 3, 1, bytes(row), CopyForm.INPUTS),
        (1, 0, 1, b"\xff" * row, CopyForm.INPUTS),
    ]
    async with copied_circuit(model, (3,)) as circuit:
        (expected,) = await circuit.circuit.generate([PROMPT], NEW_TOKENS)
        for number, (at, start, tokens, payload, form) in enumerate(cases, 1):
            descriptor = await circuit.circuit.reserve(number, len(PROMPT), 20)
            for response in await circuit.keep(descriptor, computed=True):
                assert response.HasField("reserved"), response
            link = await circuit.circuit.peers[at].serving.links.to(circuit.standbys[at].facts)
            header = pb.CopyParts(parts=[part(descriptor, start, tokens, payload, form)])
            assert link.post(header, payload, TrafficClass.REPLICATION)
            books = [standby.leases.copies for standby in circuit.standbys]
            await until(lambda: books[at].of_session(descriptor.session) is None)  # noqa: B023
            assert books[1 - at].of_session(descriptor.session) is not None
            assert link.closed_because is None
            for one in (*circuit.circuit.links, circuit.links[1 - at]):
                await ask(one, pb.Request(release=pb.Release(session=descriptor.session, epoch=1)))
        descriptor, first = await begun(circuit, NEW_TOKENS)
        assert first == expected
        await circuit.copied(descriptor)


@asynchronous
async def test_a_descriptor_in_which_a_copy_has_a_form_that_its_hop_cannot_have_is_refused(
    model: LocalModel,
) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor = await circuit.circuit.reserve(1, len(PROMPT), 20)
        await circuit.keep(descriptor)
        for at, form in ((0, pb.INPUTS), (1, pb.TOKEN_IDS), (1, pb.CopyForm.ValueType(9))):
            wrong = pb.SessionDescriptor()
            wrong.CopyFrom(descriptor)
            wrong.hops[at].standby_form = form
            asked = pb.Request(reserve=pb.Reserve(descriptor=wrong, hop=at, copy=True))
            refusal = (await ask(circuit.links[at], asked)).refusal
            assert refusal.code == "request"
            assert "form" in refusal.detail


@pytest.mark.full
@asynchronous
async def test_logs_are_bounded_and_end_with_their_sessions(model: LocalModel) -> None:
    async with copied_circuit(model, (3,)) as circuit:
        descriptor, _ = await begun(circuit)
        await circuit.tokens(NEW_TOKENS - 3)
        await circuit.copied(descriptor)
        everyone = (*circuit.circuit.peers, *circuit.standbys)
        assert all(copying_of(peer).logs.used_bytes > 0 for peer in everyone)
        for link in (*circuit.circuit.links, *circuit.links):
            await ask(link, pb.Request(release=pb.Release(session=descriptor.session, epoch=1)))
        assert all(copying_of(peer).logs.used_bytes == 0 for peer in everyone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "most"),
    usually(
        [({"num_key_value_heads": 4}, 0.2)], [({"num_attention_heads": 8, "num_key_value_heads": 1}, 0.6)]
    ),
)
def test_of_eight_layers_the_bytes_of_inputs_on_the_wire_are_a_part_of_those_of_keys_and_values(
    heads: dict[str, int], most: float, tmp_path: Path
) -> None:
    """Heads in groups of as many as those of Llama-2-7B and -70B."""
    tiny = opened(make_tiny_model("llama", tmp_path, num_hidden_layers=16, **heads))

    @asynchronous
    async def count() -> None:
        async with copied_circuit(tiny, (8,)) as circuit:
            sender, sent = copying_of(circuit.circuit.peers[1]).sender, [0]
            for session, computed in enumerate((False, True), 1):
                descriptor = await circuit.circuit.reserve(session, len(PROMPT), NEW_TOKENS)
                await circuit.keep(descriptor, computed=computed)
                await circuit.start(descriptor, PROMPT, NEW_TOKENS)
                await circuit.copied(descriptor)
                sent.append(sender.sent_bytes)
                for link in (*circuit.circuit.links, *circuit.links):
                    await ask(link, pb.Request(release=pb.Release(session=descriptor.session, epoch=1)))
            start, lines, both = sent
            assert 0 < both - lines <= most * (lines - start)

    count()
