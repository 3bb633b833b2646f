"""Whatever is guessed, a circuit's tokens are those that it gives without guesses, and its caches hold no others."""

import asyncio
import gc
import random
from collections.abc import Sequence

import pytest
from support.circuits.guesses import Chance, GuessingHead, LastWrong, NeverRight, Oracle
from support.deadline import DEADLINE_S
from support.links.data_plane import asynchronous, soon
from support.live_tensors import live_tensor_bytes
from support.models.tiny_models import greedy_references, make_tiny_model
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model, opened

from molink.client.circuit.session_request import needs_history
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb

__all__ = ["model"]

NEW_TOKENS = 40
PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + 4 * one)] for one in range(4)]
MANY_PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(5 + 2 * one)] for one in range(20)]
KEY = b"client"
MOST_GROWTH_BYTES = 2**20
"""Of tensors in 400 sessions: less than a token of each."""
MOST_OBJECTS = 40_000
"""That 400 sessions leave: 100 each."""
HALVES_ROUNDING = 0.2
"""What log-probabilities of a tiny model in bfloat16 differ by at most when it is computed in other rows."""


def whole(prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)]


def check_pools(circuit: ServedCircuit) -> None:
    """Nothing is left of sessions that have ended."""
    for peer in circuit.peers:
        peer.engine.pool.check_integrity()
        assert peer.engine.pool.tables == 0


@pytest.mark.parametrize(
    ("kind", "cuts", "prompts"),
    [
        (Oracle, (3,), PROMPTS),
        (LastWrong, (2, 4), PROMPTS),
        (NeverRight, (), PROMPTS),
        (Chance, (2, 4), PROMPTS),
        *[
            pytest.param(kind, cuts, MANY_PROMPTS, marks=pytest.mark.full)
            for kind in (Oracle, LastWrong, NeverRight, Chance)
            for cuts in ((), (3,), (2, 4), (1, 3, 5))
        ],
    ],
)
@asynchronous
async def test_greedy_tokens_are_those_of_transformers(
    model: LocalModel, kind: type[Oracle], cuts: tuple[int, ...], prompts: list[list[int]]
) -> None:
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    head = GuessingHead(kind, whole(prompts, expected))
    async with served_circuit(model, cuts, kv_tokens=100 * len(prompts), guesses=head) as circuit:
        assert await circuit.generate(prompts, NEW_TOKENS) == expected
        check_pools(circuit)
    assert (head.accepted > 0) == (kind is not NeverRight)
    assert (head.accepted < head.guessed) == (kind is not Oracle)


@pytest.mark.full
@pytest.mark.parametrize(
    "architecture",
    [
        "mistral",
        *[
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen2_sliding", "gemma3", "mixtral", "deepseek_v3", "gpt_oss", "falcon", "opt")
        ],
    ],
)
@asynchronous
async def test_so_they_are_with_windows_experts_latents_and_padding(
    tmp_path_factory: pytest.TempPathFactory, architecture: str
) -> None:
    model = opened(make_tiny_model(architecture, tmp_path_factory.mktemp(architecture)))
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    head = GuessingHead(Chance, whole(PROMPTS, expected), most=7)
    async with served_circuit(model, (2, 4), kv_tokens=600, guesses=head) as circuit:
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
        check_pools(circuit)
    assert 0 < head.accepted < head.guessed


@pytest.mark.full
@asynchronous
async def test_so_they_are_in_a_tenth_of_the_memory_that_sessions_want(model: LocalModel) -> None:
    prompts = [[(7 * at + 3 * one + 1) % 60 for at in range(50 + one)] for one in range(8)]
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    head = GuessingHead(Chance, whole(prompts, expected))
    served = served_circuit(model, (3,), kv_tokens=200, swap_bytes=2**22, guesses=head)
    async with served as circuit:
        assert await circuit.generate(prompts, NEW_TOKENS) == expected
        check_pools(circuit)
    assert 0 < head.accepted < head.guessed


SAMPLING = [
    pb.Sampling(temperature=0.8, top_p=0.9, seed=7, logprobs=2),
    pb.Sampling(temperature=1.2, top_k=20, top_p=1.0, seed=3, logit_bias={5: 2.0, 9: -4.0}, min_p=0.02),
    pb.Sampling(top_p=1.0, min_tokens=12, stop_token_ids=list(range(0, 256, 9))),
    pb.Sampling(top_p=1.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
    pb.Sampling(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.5, logprobs=1),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling", [SAMPLING[0], SAMPLING[3], *(pytest.param(one, marks=pytest.mark.full) for one in SAMPLING)]
)
@asynchronous
async def test_tokens_and_log_probabilities_are_those_without_guesses_for_the_same_seed(
    model: LocalModel, sampling: pb.Sampling
) -> None:
    async with served_circuit(model, (3,), kv_tokens=600) as circuit:
        circuit.sampling = sampling
        expected = [await whole_answer(circuit, one, prompt) for one, prompt in enumerate(PROMPTS, 1)]
    sequences = whole(PROMPTS, [[token.token_id for token in answer] for answer in expected])
    head = GuessingHead(Chance, sequences)
    async with served_circuit(model, (3,), kv_tokens=600, guesses=head) as circuit:
        circuit.sampling = sampling
        found = [await whole_answer(circuit, one, prompt) for one, prompt in enumerate(PROMPTS, 1)]
    for answer, without in zip(found, expected, strict=True):
        assert [(one.token_id, one.position, one.finish) for one in answer] == [
            (one.token_id, one.position, one.finish) for one in without
        ]
        assert [one.logprob for one in answer] == pytest.approx([one.logprob for one in without], abs=1e-4)
        assert [[top.token_id for top in one.top] for one in answer] == [
            [top.token_id for top in one.top] for one in without
        ]
    assert 0 < head.accepted < head.guessed


async def whole_answer(circuit: ServedCircuit, session: int, prompt: list[int]) -> list[pb.Token]:
    """All tokens of a generation, up to the one that ends it."""
    descriptor = await circuit.reserve(session, len(prompt), NEW_TOKENS)
    if needs_history(descriptor.sampling):
        told = pb.History(session=descriptor.session, epoch=1, token_ids=prompt)
        assert circuit.links[-1].post(told)
    assert circuit.links[0].post(pb.Start(session=descriptor.session, epoch=1, token_ids=prompt))
    tokens: list[pb.Token] = []
    while not tokens or tokens[-1].finish == pb.NOT_FINISHED:
        _, frame = await soon(circuit.peers[0].client.handler.frames.get())
        tokens.extend(frame.header.tokens)
    release = pb.Request(release=pb.Release(session=descriptor.session, epoch=1))
    await asyncio.gather(*(link.request(release, DEADLINE_S) for link in circuit.links))
    return tokens


@pytest.mark.full
@asynchronous
async def test_in_bfloat16_tokens_are_the_same_as_long_as_the_second_best_is_further_off_than_rounding(
    model: LocalModel,
) -> None:
    halves = opened(model.folder, "bfloat16")
    async with served_circuit(halves, (3,), kv_tokens=600) as circuit:
        circuit.sampling = pb.Sampling(logprobs=2)
        expected = [await whole_answer(circuit, one, prompt) for one, prompt in enumerate(PROMPTS, 1)]
    head = GuessingHead(Chance, whole(PROMPTS, [[token.token_id for token in one] for one in expected]))
    async with served_circuit(halves, (3,), kv_tokens=600, guesses=head) as circuit:
        found = [await whole_answer(circuit, one, prompt) for one, prompt in enumerate(PROMPTS, 1)]
    compared = 0
    for answer, without in zip(found, expected, strict=True):
        for token, other in zip(answer, without, strict=True):
            if token.token_id != other.token_id:
                best, second = other.top
                assert best.logprob - second.logprob < HALVES_ROUNDING
                break  # what follows is another text
            compared += 1
    assert compared > 2 * len(PROMPTS)
    assert 0 < head.accepted < head.guessed


@pytest.mark.parametrize("place", [2, *(pytest.param(one, marks=pytest.mark.full) for one in (0, 4))])
@asynchronous
async def test_a_stop_id_ends_a_trip_where_it_stands(model: LocalModel, place: int) -> None:
    """As the first of a trip's tokens, in its middle, and as the one behind all guesses. The first token comes of the
    prompt, and each trip from there on has five."""
    (expected,) = greedy_references(model.folder, PROMPTS[:1], NEW_TOKENS)
    at = next(at for at in range(6 + place, NEW_TOKENS, 5) if expected[at] not in expected[:at])
    head = GuessingHead(Oracle, [[*PROMPTS[0], *expected]])
    async with served_circuit(model, (3,), kv_tokens=200, guesses=head) as circuit:
        circuit.sampling = pb.Sampling(stop_token_ids=[expected[at]])
        tokens = await whole_answer(circuit, 1, PROMPTS[0])
    assert [token.token_id for token in tokens] == expected[: at + 1]
    assert tokens[-1].finish == pb.STOP
    assert head.accepted > 0


@pytest.mark.parametrize(
    "new_tokens", [6, *(pytest.param(one, marks=pytest.mark.full) for one in (1, 2, 5, 7))]
)
@asynchronous
async def test_the_last_token_that_was_asked_for_ends_a_trip(model: LocalModel, new_tokens: int) -> None:
    (expected,) = greedy_references(model.folder, PROMPTS[:1], NEW_TOKENS)
    head = GuessingHead(Oracle, [[*PROMPTS[0], *expected]])
    async with served_circuit(model, (3,), kv_tokens=200, guesses=head) as circuit:
        assert await circuit.generate(PROMPTS[:1], new_tokens) == [expected[:new_tokens]]
    assert head.accepted == max(0, new_tokens - 2 - (new_tokens - 2) // 5)


@asynchronous
async def test_a_trip_says_with_its_first_token_how_many_were_guessed(model: LocalModel) -> None:
    (expected,) = greedy_references(model.folder, PROMPTS[:1], NEW_TOKENS)
    head = GuessingHead(LastWrong, [[*PROMPTS[0], *expected]])
    async with served_circuit(model, (2, 4), kv_tokens=200, guesses=head) as circuit:
        tokens = await whole_answer(circuit, 1, PROMPTS[0])
    trips: dict[int, list[pb.Token]] = {}
    for token in tokens:
        trips.setdefault(token.step, []).append(token)
    told = [(trip[0].guessed, len(trip) - 1) for trip in trips.values()]
    assert [one for one in told if one[0]] == head.sources[0].records
    assert all(token.guessed == 0 for trip in trips.values() for token in trip[1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (NeverRight, range(11, 15)),
        *[
            pytest.param(kind, range(8, 25), marks=pytest.mark.full)
            for kind in (NeverRight, LastWrong, Chance)
        ],
    ],
)
@asynchronous
async def test_a_block_whose_last_row_is_a_refused_guess_is_shared_under_no_name(
    model: LocalModel, kind: type[Oracle], lengths: Sequence[int]
) -> None:
    """A chat goes on behind answers that end at every place of a block."""
    prompt = [(5 * at + 2) % 60 for at in range(20)]
    (answer,) = greedy_references(model.folder, [prompt], NEW_TOKENS)
    head = GuessingHead(kind, [[*prompt, *answer]])
    async with served_circuit(model, (3,), kv_tokens=600, guesses=head) as circuit:
        for new_tokens in lengths:
            assert await circuit.generate([prompt], new_tokens, KEY) == [answer[:new_tokens]]
            chat = [*prompt, *answer[:new_tokens], 7, 8]
            expected = greedy_references(model.folder, [chat], 6)
            head.sequences = [[*chat, *expected[0]]]
            assert await circuit.generate([chat], 6, KEY) == expected
            assert circuit.held[1] == [(len(chat) - 3) // 16 * 16] * 2
            head.sequences = [[*prompt, *answer]]
    assert head.accepted < head.guessed


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("qwen3_next", Chance),
        *[
            pytest.param(name, kind, marks=pytest.mark.full)
            for name in ("qwen3_next",)
            for kind in (LastWrong, NeverRight, Oracle)
        ],
    ],
)
@asynchronous
async def test_so_they_are_where_layers_keep_states_which_do_not_go_back(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, kind: type[Oracle]
) -> None:
    """What was accepted is computed again from the states before the step."""
    model = opened(make_tiny_model(architecture, tmp_path_factory.mktemp("states")))
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    head = GuessingHead(kind, whole(PROMPTS, expected))
    async with served_circuit(model, (3,), kv_tokens=600, guesses=head) as circuit:
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
        check_pools(circuit)
    assert (head.accepted > 0) == (kind is not NeverRight)
    assert (head.accepted < head.guessed) == (kind is not Oracle)


@pytest.mark.full
@asynchronous
async def test_guesses_with_activations_in_int8_change_no_token(model: LocalModel) -> None:
    """What neighbouring rows are does not change how a row is rounded."""
    settings = DataPlaneSettings(copies=True, activation_codecs=("int8",))
    answers = []
    head = GuessingHead(Chance, [])
    for guesses in (None, head):
        async with served_circuit(
            model, (2, 4), kv_tokens=400, settings=settings, guesses=guesses
        ) as circuit:
            circuit.codec = "int8"
            answers.append(await circuit.generate(PROMPTS, NEW_TOKENS))
        head.sequences = whole(PROMPTS, answers[0])
    assert answers[0] == answers[1]
    assert 0 < head.accepted < head.guessed


@pytest.mark.full
@asynchronous
async def test_many_sessions_that_guess_and_are_cancelled_leave_nothing(model: LocalModel) -> None:
    """Those that are not cancelled have all of their tokens, in a pool that is too small for all at once, and memory
    stays as it was after the first ones."""
    draw = random.Random(11)
    prompts = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + one)] for one in range(12)]
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    complete, rounds, numbered = 0, 42, 21  # some 500 sessions; what comes late of one is of no other
    head = GuessingHead(Chance, whole(prompts, expected) * numbered, most=6)
    served = served_circuit(model, (3,), kv_tokens=250, swap_bytes=2**22, guesses=head)
    held: list[tuple[int, int]] = []
    async with served as circuit:
        for round_ in range(rounds):
            started: dict[bytes, list[int]] = {}
            for one, prompt in enumerate(prompts, 1 + len(prompts) * (round_ % numbered)):
                descriptor = await circuit.reserve(one, len(prompt), NEW_TOKENS)
                start = pb.Start(session=descriptor.session, epoch=1, token_ids=prompt)
                assert circuit.links[0].post(start)
                started[descriptor.session] = []
            left = set(started)
            while left:
                _, frame = await soon(circuit.peers[0].client.handler.frames.get())
                for token in frame.header.tokens:
                    if token.session not in started:
                        continue  # of one that was cancelled before with tokens on their way
                    got = started[token.session]
                    got.append(token.token_id)
                    is_over = len(got) == NEW_TOKENS or draw.random() < 0.02
                    if is_over and token.session in left:
                        left.remove(token.session)
                        complete += len(got) == NEW_TOKENS
                        release = pb.Request(release=pb.Release(session=token.session, epoch=1))
                        await asyncio.gather(*(link.request(release, DEADLINE_S) for link in circuit.links))
            for session, got in started.items():
                assert got == expected[(session[0] - 1) % len(prompts)][: len(got)]
            gc.collect()
            held.append((live_tensor_bytes(), len(gc.get_objects())))
        check_pools(circuit)
        (bytes_before, objects_before), (bytes_after, objects_after) = held[rounds // 6], held[-1]
        assert bytes_after - bytes_before < MOST_GROWTH_BYTES
        assert objects_after - objects_before < MOST_OBJECTS
        assert all(peer.serving.stepper.is_empty for peer in circuit.peers)
    assert complete > 100
    assert 0 < head.accepted < head.guessed
