"""A hop whose standby keeps a false copy spoils that generation at most: later prompts are as of a fresh swarm."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.chaos.losses import span_of, taken_over
from support.swarms.forked_peers import ForkedSwarm, fork_peer
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate

from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 300
LATER_TOKENS = 24
FALSE_COPIER = Path(__file__).parents[2] / "support" / "attackers" / "false_copier.py"


class LyingSwarm(ForkedSwarm):
    """A swarm whose every peer lies in the copies that it sends."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        return await fork_peer(arguments, self.environment, log, FALSE_COPIER)  # type: ignore[return-value]


@pytest.fixture(params=[LyingSwarm, ForkedSwarm], ids=["lying", "honest"])
async def halves(request: pytest.FixtureRequest) -> AsyncIterator[LocalSwarm]:
    async with request.param() as swarm:
        await swarm.join("0-6-a", "--model", BUNDLED, "--layers", "0:6")
        others = [("0-6-b", "0:6"), ("6-12-a", "6:12"), ("6-12-b", "6:12")]
        await asyncio.gather(
            *(swarm.join(name, "--model", BUNDLED, "--layers", span) for name, span in others)
        )
        yield swarm


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [0, 1], ids=["head", "tail"])
async def test_prompts_that_begin_as_one_that_has_gone_over_are_answered_as_by_a_fresh_swarm(
    at: int, halves: LocalSwarm, references: References
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 6)[:100]

    async def back(victim: LocalPeer) -> None:
        await halves.join(victim.name, "--model", BUNDLED, "--layers", span_of(victim))

    async with taken_over(halves, at, prompt, NEW_TOKENS, back) as (client, generation, victim):
        is_right = generation.token_ids == references.greedy(folder, prompt, NEW_TOKENS)
        assert is_right == (type(halves) is ForkedSwarm), "copies are false where they are to be"
        whole = (*prompt, *generation.token_ids[:-1])
        for again in (prompt, whole, (*prompt[:64], *whole[80:120])):
            for _ in range(2):
                later = await generate(client, again, LATER_TOKENS)
                assert victim.peer_id not in [hop.peer_id for hop in later.circuit.hops]
                assert later.token_ids == references.greedy(folder, again, LATER_TOKENS)
