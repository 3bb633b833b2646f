"""Two holders of a span share work: one computes prompts while the other decodes, and no token changes by that."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.models.random_llama import Widths, write_random_llama
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import References

from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.session import ClientSession

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

PROMPT_TOKENS, NEW_TOKENS = 16, 400
LONG_TOKENS, AFTER_PROMPT, PROMPTS = 900, 8, 3
"""A long prompt takes longer than a session needs to go over."""
SESSIONS = 4
WITHIN_S = 240.0
MOST_ROUNDS = 5
"""On a busy machine prompts may be over before a session has gone over."""


@pytest.fixture(scope="module")
def slow_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a prompt takes a second."""
    folder = tmp_path_factory.mktemp("models") / "slow-prompts"
    write_random_llama(folder, Widths(hidden=768, inner=2048, layers=8, heads=12, key_heads=4))
    return folder


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """No two begin alike."""
    return tuple(2 + (31 * number + 7 * at * (at + number)) % 1000 for at in range(tokens))


async def begin(
    client: AsyncSwarm, prompt: Sequence[int], new_tokens: int
) -> tuple[ClientSession, "asyncio.Task[tuple[int, ...]]"]:
    """A generation that has begun, and what becomes of it."""
    known = set(client.connection.sinks)
    pieces = client.stream_events(prompt, max_new_tokens=new_tokens, ignore_eos=True, timeout_s=WITHIN_S)
    async with asyncio.timeout(WITHIN_S):
        first = await anext(pieces)
    (session,) = set(client.connection.sinks) - known
    assert isinstance(session, ClientSession)

    async def rest() -> tuple[int, ...]:
        tokens = list(first.token_ids)
        async with asyncio.timeout(WITHIN_S):
            async for piece in pieces:
                tokens += piece.token_ids
        return tuple(tokens)

    return session, asyncio.create_task(rest())


async def moves(folder: Path, roles: str, references: References) -> int:
    """How many sessions go over while long prompts come to two holders; all tokens are those of transformers."""
    async with ForkedSwarm() as swarm:
        for name in "ab":
            await swarm.join(name, "--model", str(folder), "--layers", "0:8", "--roles", roles)
        async with AsyncSwarm(str(folder), initial_peers=swarm.addresses) as client:
            begun = [
                await begin(client, prompt_of(one, PROMPT_TOKENS), NEW_TOKENS) for one in range(SESSIONS)
            ]
            answers = []
            for number in range(PROMPTS):
                _, rest = await begin(client, prompt_of(100 + number, LONG_TOKENS), AFTER_PROMPT)
                answers.append(await rest)
            results = await asyncio.gather(*(task for _, task in begun))
    for number, tokens in enumerate(results):
        assert tokens == references.greedy(folder, prompt_of(number, PROMPT_TOKENS), NEW_TOKENS)
    for number, answer in enumerate(answers):
        assert answer == references.greedy(folder, prompt_of(100 + number, LONG_TOKENS), AFTER_PROMPT)
    return sum(session.log.moves for session, _ in begun)


async def test_sessions_go_over_while_a_peer_computes_prompts_and_no_token_changes(
    anyio_backend: str, slow_prompts: Path, references: References
) -> None:
    for _ in range(MOST_ROUNDS):
        if await moves(slow_prompts, "pairs", references):
            return
    raise AssertionError("no session has gone over")


@pytest.mark.parametrize("roles", ["off", "pieces", "auto"])
async def test_tokens_are_the_same_whatever_roles_holders_may_have(
    anyio_backend: str, roles: str, slow_prompts: Path, references: References
) -> None:
    await moves(slow_prompts, roles, references)
