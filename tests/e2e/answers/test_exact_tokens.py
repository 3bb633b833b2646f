"""Whatever the circuit, tokens and log-probabilities of prompts are those of transformers."""

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch
from support.pairwise import usually
from support.swarms.live_swarms import References, bundled_folder, circuit_of, generate

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.anyio]

NEW_TOKENS = 16
LIKELIEST = 5
TOLERANCE = 1e-4
"""Of natural logarithms, in float32."""
LENGTHS = (1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 32, 33, 63, 64, 100, 129, 300, 513, 700, 1000)
"""In tokens; the longest prompts go through the circuit in chunks."""
SOME = {1: (16, 1000), 2: (5, 513), 3: (2, 129), 4: (1, 16, 33, 129, 1000)}
"""Of these, by the number of hops: those on both sides of a block and of a chunk go round the longest circuit."""
SPEECH = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
Who is already sick and pale with grief,
That thou her maid art far more fair than she.

JULIET:
O gentle lady, do not put me to't, for I am nothing if not critical.

KING RICHARD III:
Now is the winter of our discontent made glorious summer by this sun of York.
"""
CIRCUITS = {
    1: {"whole": (0, 12)},
    2: {"front": (0, 6), "back": (6, 12)},
    3: {"front": (0, 4), "middle": (4, 8), "back": (8, 12)},
    4: {"front": (0, 3), "middle": (3, 6), "whole": (6, 9), "back": (9, 12)},
}


def make_prompts(references: References, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    speech = references.ids(bundled_folder(), SPEECH * 8)
    return [speech[7 * number : 7 * number + length] for number, length in enumerate(lengths)]


def spans_by_peer(swarm: LocalSwarm, hops: int) -> dict[LocalPeer, tuple[int, int]]:
    peers = {peer.name: peer for peer in swarm.peers}
    return {peers[name]: span for name, span in CIRCUITS[hops].items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("hops", "lengths", "new_tokens"),
    [
        *((hops, lengths, NEW_TOKENS) for hops, lengths in SOME.items()),
        *(pytest.param(hops, LENGTHS, 24, marks=pytest.mark.full) for hops in CIRCUITS),
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
async def test_prompts_of_any_length_give_the_tokens_of_transformers(
    hops: int,
    lengths: Sequence[int],
    new_tokens: int,
    wide_swarm: LocalSwarm,
    wide_client: AsyncSwarm,
    references: References,
) -> None:
    prompts = make_prompts(references, lengths)
    assert [len(prompt) for prompt in prompts] == list(lengths)
    with circuit_of(wide_client, spans_by_peer(wide_swarm, hops)):
        for prompt in prompts:
            generation = await generate(wide_client, prompt, new_tokens)
            assert len(generation.circuit.hops) == hops
            expected = references.greedy(bundled_folder(), prompt, new_tokens)
            assert generation.token_ids == expected, len(prompt)


@pytest.mark.parametrize("hops", usually([1, 4], [2, 3]))
async def test_8_generations_at_once_give_the_tokens_of_transformers(
    hops: int, wide_swarm: LocalSwarm, wide_client: AsyncSwarm, references: References
) -> None:
    prompts = make_prompts(references, LENGTHS)[2:18:2]
    with circuit_of(wide_client, spans_by_peer(wide_swarm, hops)):
        generations = await asyncio.gather(*(generate(wide_client, prompt, NEW_TOKENS) for prompt in prompts))
    assert [len(generation.circuit.hops) for generation in generations] == [hops] * 8
    assert [generation.token_ids for generation in generations] == [
        references.greedy(bundled_folder(), prompt, NEW_TOKENS) for prompt in prompts
    ]


def check(generation: Generation, prompt: Sequence[int], references: References) -> None:
    told, expected = generation.prompt_logprobs, references.logprobs(bundled_folder(), prompt)
    assert [one.token_id for one in told] == list(prompt)
    assert (told[0].logprob, told[0].top) == (None, ())
    for one, row in zip(told[1:], expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=TOLERANCE)
        best = row.topk(LIKELIEST).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=TOLERANCE)
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).sum()
    assert math.fsum(one.logprob or 0.0 for one in told) == pytest.approx(float(chosen), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("hops", [1, 2, 3])
async def test_a_prompt_is_scored_as_transformers_scores_it_again_and_again(
    hops: int, wide_swarm: LocalSwarm, wide_client: AsyncSwarm, references: References
) -> None:
    prompt = references.ids(bundled_folder(), SPEECH)
    with circuit_of(wide_client, spans_by_peer(wide_swarm, hops)):
        for _ in range(
            2
        ):  # the second finds the prompt's keys and values at its hops, and has them computed again
            generation = await generate(wide_client, prompt, 4, prompt_logprobs=LIKELIEST)
            assert len(generation.circuit.hops) == hops
            check(generation, prompt, references)
            assert generation.token_ids == references.greedy(bundled_folder(), prompt, 4)
        plain = await generate(wide_client, prompt, 4)
    assert (plain.token_ids, plain.prompt_logprobs) == (generation.token_ids, ())


@pytest.mark.full
async def test_long_prompts_are_scored_in_slices_beside_others_that_decode(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm, references: References
) -> None:
    folder = bundled_folder()
    short, long = (
        references.ids(folder, SPEECH),
        references.ids(folder, SPEECH * 8)[: wide_client.model.context_length - 64],
    )
    with circuit_of(wide_client, spans_by_peer(wide_swarm, 2)):
        answers = await asyncio.gather(
            *(generate(wide_client, short[at:], 48) for at in range(3)),
            generate(wide_client, long, 2, prompt_logprobs=LIKELIEST, repetition_penalty=1.1),
            generate(wide_client, long[5:], 1, prompt_logprobs=LIKELIEST),
        )
    check(answers[3], long, references)
    check(answers[4], long[5:], references)
    for at in range(3):
        assert answers[at].token_ids == references.greedy(folder, short[at:], 48)


@pytest.mark.full
async def test_a_prompt_of_one_token_has_nothing_before_it(wide_client: AsyncSwarm) -> None:
    generation = await generate(wide_client, [5], 1, prompt_logprobs=0)
    [only] = generation.prompt_logprobs
    assert (only.token_id, only.logprob, only.top) == (5, None, ())
