"""The case `peers`: a real swarm of two processes on one device."""

import asyncio

from gpu.gpu_findings import Context, Findings
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

SPEECH = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
)
LENGTHS = (1, 2, 16, 17, 100, 300)
SMALL_LENGTHS = (1, 17)
NEW_TOKENS = 24
LAYERS = 12


def two_peers(context: Context, findings: Findings) -> None:
    """Each holds half of the bundled model; sessions alone and all at once."""
    asyncio.run(_two_peers(context, findings))


async def _two_peers(context: Context, findings: Findings) -> None:
    references = References()
    speech = references.ids(bundled_folder(), SPEECH * 8)
    lengths = SMALL_LENGTHS if context.small else LENGTHS
    prompts = [speech[3 * index : 3 * index + length] for index, length in enumerate(lengths)]
    expected = [references.greedy(bundled_folder(), prompt, NEW_TOKENS) for prompt in prompts]
    options = ("--model", BUNDLED, "--device", context.device, "--memory", "2GB")
    async with LocalSwarm() as swarm:
        front = await swarm.join("front", *options, "--layers", f"0:{LAYERS // 2}")
        back = await swarm.join("back", *options, "--layers", f"{LAYERS // 2}:{LAYERS}")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            with circuit_of(client, {front: (0, LAYERS // 2), back: (LAYERS // 2, LAYERS)}):
                alone = [await generate(client, prompt, NEW_TOKENS) for prompt in prompts]
                together = await asyncio.gather(*(generate(client, one, NEW_TOKENS) for one in prompts))
        for name, found in (("one after the other", alone), ("all at once", together)):
            same = sum(one.token_ids == tokens for one, tokens in zip(found, expected, strict=True))
            hops = {len(one.circuit.hops) for one in found}
            text = f"{same} of {len(prompts)} are transformers'"
            findings.hold(f"{name}: generations", same == len(prompts) and hops == {2}, text)
        for peer in (front, back):
            status = await swarm.stop(peer)
            findings.hold(f"{peer.name}: leaves", status == 0, f"exit status {status}")
