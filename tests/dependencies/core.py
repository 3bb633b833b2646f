"""Imports every module of the installed package, and lets two peers generate. Runs in the environment that is tried."""

import asyncio
import importlib
import pkgutil

import molink
from molink import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

MODEL = "molink/tiny-shakespeare"
NOT_IMPORTED = ("__main__", "triton_", "paged_triton", "migrations.", "models.train_")
"""Parts of names: programs, and kernels that need Triton."""


def import_all() -> int:
    """Imports every module. Returns their number."""
    names = [
        module.name
        for module in pkgutil.walk_packages(molink.__path__, "molink.")
        if not any(part in module.name for part in NOT_IMPORTED)
    ]
    for name in names:
        importlib.import_module(name)
    return len(names)


async def generate() -> str:
    """Text of two peers, each with half of the layers."""
    shared = ("--model", MODEL, "--device", "cpu", "--dtype", "float32")
    async with LocalSwarm() as local:
        for name, layers in (("first", "0:6"), ("second", "6:12")):
            await local.join(name, *shared, "--layers", layers)
        async with AsyncSwarm(MODEL, initial_peers=local.addresses) as swarm:
            return (await swarm.generate("ROMEO:", max_new_tokens=16)).text


if __name__ == "__main__":
    print(f"{import_all()} modules imported; two peers wrote {asyncio.run(generate())!r}")
