"""A peer in a process of its own: prints its address, announces itself and stays until it is killed.

Arguments: seconds between announcements (0: the product's own timing), addresses of initial peers.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery, DiscoveryTiming


async def main(interval_s: float, initial_peers: list[str]) -> None:
    """Runs forever."""
    identity = Identity.generate()
    timing = replace(QUICK, interval_s=interval_s) if interval_s else DiscoveryTiming()
    async with Discovery(identity, initial_peers=initial_peers, timing=timing) as discovery:
        await discovery.announce(replace(facts_of(identity), addresses=()), state_of(identity))
        print(discovery.addresses[0], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), sys.argv[2:]))
