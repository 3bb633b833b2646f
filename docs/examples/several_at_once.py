"""Several generations at once, from asyncio: peers compute them together."""

import asyncio

from molink import AsyncSwarm


async def main() -> None:
    async with AsyncSwarm("molink/tiny-shakespeare") as swarm:
        prompts = ["ROMEO:", "JULIET:", "NURSE:", "MERCUTIO:"]
        results = await asyncio.gather(*(swarm.generate(prompt, max_new_tokens=16) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        print(prompt, result.text.splitlines()[0], f"({result.tpot_s * 1000:.1f} ms a token)")


asyncio.run(main())
