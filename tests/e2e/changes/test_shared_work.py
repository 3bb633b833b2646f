"""Two holders of a span share work: one computes prompts while the other decodes, and no token changes by that."""

import asyncio

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.session import ClientSession

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.full]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
LONG_PROMPT = "GLOUCESTER:\nI do mistake my person all this while.\n" * 24
NEW_TOKENS, COMPARED_TOKENS, AFTER_PROMPT = 960, 200, 8
SESSIONS, PROMPTS = 4, 3
WITHIN_S = 120.0


async def _watched(
    client: AsyncSwarm, prompt: str, new_tokens: int
) -> tuple[ClientSession, "asyncio.Task[list[int]]"]:
    """A generation that has begun, and what becomes of it."""
    known = set(client.connection.sinks)
    pieces = client.stream_events(prompt, max_new_tokens=new_tokens, ignore_eos=True)
    async with asyncio.timeout(WITHIN_S):
        first = await anext(pieces)
    (session,) = set(client.connection.sinks) - known
    assert isinstance(session, ClientSession)

    async def rest() -> list[int]:
        tokens = list(first.token_ids)
        async with asyncio.timeout(WITHIN_S):
            async for piece in pieces:
                tokens += piece.token_ids
        return tokens

    return session, asyncio.create_task(rest())


async def _run(roles: str, references: References) -> None:
    """Sessions that decode while a long prompt comes; all tokens are those of transformers."""
    folder = bundled_folder()
    async with ForkedSwarm() as swarm:
        for name in "ab":
            await swarm.join(name, "--model", BUNDLED, "--layers", "0:12", "--roles", roles)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            begun = [await _watched(client, PROMPT, NEW_TOKENS) for _ in range(SESSIONS)]
            answers = []
            for number in range(PROMPTS):
                _, rest = await _watched(client, f"{number}. {LONG_PROMPT}", AFTER_PROMPT)
                answers.append(tuple(await rest))
            results = await asyncio.gather(*(task for _, task in begun))
    expected = references.greedy(folder, references.ids(folder, PROMPT), COMPARED_TOKENS)
    for tokens in results:
        assert tokens == results[0]
        assert tuple(tokens[:COMPARED_TOKENS]) == expected
        assert len(tokens) == NEW_TOKENS
    for number, answer in enumerate(answers):
        ids = references.ids(folder, f"{number}. {LONG_PROMPT}")
        assert answer == references.greedy(folder, ids, AFTER_PROMPT)
    for session, _ in begun:
        assert session.log.losses == []


@pytest.mark.parametrize("roles", ["off", "pieces", "auto", "pairs"])
async def test_tokens_are_the_same_whatever_holders_share(
    anyio_backend: str, roles: str, references: References
) -> None:
    await _run(roles, references)
