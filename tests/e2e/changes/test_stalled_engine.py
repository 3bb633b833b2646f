"""A peer's device hangs, and all else of it lives: by its own word its session goes on with its standby."""

import asyncio
import signal

import pytest
from support.chaos.chaos import StallableSwarm
from support.chaos.losses import taken_over
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.local.local_swarm import LocalPeer

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 160


class HangingSwarm(StallableSwarm):
    """A swarm whose peers' engines stand still where those of others are killed."""

    async def kill(self, peer: LocalPeer) -> None:
        peer.process.send_signal(signal.SIGUSR1)


async def go_on(peer: LocalPeer) -> None:
    peer.process.send_signal(signal.SIGUSR2)


@pytest.mark.parametrize("at", [0, 1], ids=["head", "tail"])
async def test_the_standby_of_a_peer_whose_engine_stands_still_goes_on_with_its_copy(
    at: int, anyio_backend: str, references: References
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 6)[:100]
    async with HangingSwarm() as swarm:
        await swarm.join("0-6-a", "--model", BUNDLED, "--layers", "0:6")
        others = ("0-6-b", "6-12-a", "6-12-b")
        await asyncio.gather(
            *(
                swarm.join(name, "--model", BUNDLED, "--layers", ":".join(name.split("-")[:2]))
                for name in others
            )
        )
        async with taken_over(swarm, at, prompt, NEW_TOKENS, go_on) as (_, generation, victim):
            assert victim.alive
            await go_on(victim)
    assert generation.token_ids == references.greedy(folder, prompt, NEW_TOKENS)
