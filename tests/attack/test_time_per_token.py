"""An honest user's tokens take at most twice their time while the swarm is attacked, by each attack of this folder.

A ratio within one run: generations before each attack, and during it. The user has a process of its own. What the
attackers compute they compute on the same machine, which a real one would not have to bear.
"""

import asyncio
import statistics
import time

import pytest
from attack.all_attacks import Attacks
from support.attackers.bystander import require_alive
from support.attackers.honest_user import PROMPT, TOKENS, HonestUser
from support.swarms.live_swarms import References, bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.attack, pytest.mark.anyio]

QUIET_S, BEGINS_S, ATTACKED_S = 1.5, 1.5, 4.0
MOST_TIMES = 2.0


async def tpot_s(user: HonestUser, expected: tuple[int, ...], during_s: float) -> float:
    """The median over the generations of so many seconds, each of which must be right."""
    found, ends_s = [], time.monotonic() + during_s
    while time.monotonic() < ends_s:
        tokens, each_s = await user.generate()
        assert tokens == expected
        found.append(each_s)
    return statistics.median(found)


@pytest.mark.timeout(600)
async def test_no_attack_makes_a_token_take_more_than_twice_its_time(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    folder = bundled_folder()
    expected = references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
    attacks = Attacks(attacked, client)
    times: dict[str, float] = {}
    async with HonestUser(attacked.addresses) as user:
        await user.generate()
        for attack in attacks.each:
            quiet_s = await tpot_s(user, expected, QUIET_S)
            raging = asyncio.create_task(attacks.again_and_again(attack))
            try:
                await asyncio.sleep(BEGINS_S)
                attacked_s = await tpot_s(user, expected, ATTACKED_S)
                assert not raging.done(), raging.exception()
            finally:
                raging.cancel()
                await asyncio.gather(raging, return_exceptions=True)
            require_alive(attacked.peers)
            times[attack.__name__] = attacked_s / quiet_s
            print(f"{attack.__name__}: {1000 * attacked_s:.1f} ms a token, {1000 * quiet_s:.1f} before it")
    assert max(times.values()) <= MOST_TIMES, times
