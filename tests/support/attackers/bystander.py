"""Honest users beside an attack: they generate all the while, and nothing that they see may go wrong."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
from support.swarms.live_swarms import References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

MEMORY_BYTES = 600 * 1000 * 1000
"""What `--memory` grants the peers that are attacked."""
BEYOND_BYTES = 256 * 1024 * 1024
"""Most that a peer's process may take beyond that, and beyond what it takes before it serves anybody."""
LOADED_BYTES = 400 * 1024 * 1024
"""The latter: libraries, which forked peers share, and what they keep of a start: 330 to 430 MiB were seen."""
RECOVERY_S = 120.0
"""Within which, after the end of an attack, all is as before."""
PROMPTS = ("ROMEO:", "JULIET:", "First Citizen:\nBefore we proceed", "KING RICHARD III:")
TOKENS = 12


@dataclass(slots=True)
class Bystander:
    """What the honest user has seen so far."""

    generations: int = 0
    tpot_s: list[float] = field(default_factory=list)

    @property
    def median_tpot_s(self) -> float:
        """Seconds a token; call it after one generation at least."""
        return statistics.median(self.tpot_s)

    async def generate(self, client: AsyncSwarm, references: References, prompt: str = PROMPTS[0]) -> None:
        """One generation, whose tokens must be those of transformers."""
        folder = bundled_folder()
        generation = await generate(client, prompt, TOKENS)
        assert generation.token_ids == references.greedy(folder, references.ids(folder, prompt), TOKENS)
        self.generations += 1
        if generation.tpot_s is not None:
            self.tpot_s.append(generation.tpot_s)


def resident_bytes(peer: LocalPeer) -> int:
    """Memory that the peer's process holds."""
    return int(psutil.Process(peer.process.pid).memory_info().rss)


def require_alive(peers: Sequence[LocalPeer]) -> None:
    """Fails with the last words of a peer that has ended."""
    for peer in peers:
        assert peer.alive, f"peer {peer.name} has ended: {peer.log.read_text(errors='replace')[-2000:]}"


@asynccontextmanager
async def bystander(
    swarm: LocalSwarm, client: AsyncSwarm, references: References, *, growth_bytes: int | None = None
) -> AsyncIterator[Bystander]:
    """Generates while the block runs, and at least once before and once after it.

    At its end every peer lives, every generation had transformers' tokens, a newcomer has got in and generated, and no
    peer has taken more than LOADED_BYTES and BEYOND_BYTES beyond its `--memory`, or has grown by more than
    `growth_bytes`.
    """
    honest = Bystander()
    await honest.generate(client, references)
    before = {peer: resident_bytes(peer) for peer in swarm.peers}
    most = dict(before)
    ended = asyncio.Event()

    async def use() -> None:
        while not ended.is_set():
            await honest.generate(client, references, PROMPTS[honest.generations % len(PROMPTS)])
            for peer in swarm.peers:
                if peer.alive:
                    most[peer] = max(most.get(peer, 0), resident_bytes(peer))

    using = asyncio.create_task(use(), name="honest user")
    try:
        yield honest
        ended.set()
        async with asyncio.timeout(RECOVERY_S):
            await using
            require_alive(swarm.peers)
            await honest.generate(client, references)
            async with AsyncSwarm(initial_peers=swarm.addresses) as newcomer:
                await honest.generate(newcomer, references)
    finally:
        require_alive(swarm.peers)
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)
    for peer, bytes_before in before.items():
        limit = (
            bytes_before + growth_bytes
            if growth_bytes is not None
            else LOADED_BYTES + MEMORY_BYTES + BEYOND_BYTES
        )
        taken = most[peer]
        assert taken <= limit, (
            f"peer {peer.name} took {taken / 2**20:.0f} MiB, {bytes_before / 2**20:.0f} before"
        )
