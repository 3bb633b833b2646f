"""What `molink generate` has loaded when it has asked a real swarm and printed its answer."""

import asyncio
import re
import sys

import pytest
from support.swarms.live_swarms import PROGRAM_TIMEOUT_S, References, bundled_folder

from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.anyio, pytest.mark.real]
HEAVY = frozenset(
    {
        "torch",
        "transformers",
        "accelerate",
        "huggingface_hub",
        "sympy",
        "highspy",
        "networkx",
        "matplotlib",
        "fastapi",
    }
)
"""What libp2p imports in vain has placeholders of the same names: see `tests/dht/host/test_placeholders.py`."""


@pytest.mark.portable
async def test_generate_loads_nothing_heavy_and_prints_what_transformers_says(
    wide_swarm: LocalSwarm, references: References
) -> None:
    program = "from molink.client.commands.cli import main; main()"
    asked = ("generate", "ROMEO:", "--max-new-tokens", "8", "--initial-peers", wide_swarm.addresses[0])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "importtime", "-c", program, *asked,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(PROGRAM_TIMEOUT_S):
        printed, said = await process.communicate()
    assert process.returncode == 0, said[-2000:]
    imported = set(re.findall(r"import time:[\s\d|]+?([\w.]+)$", said.decode(), re.MULTILINE))
    assert "molink.client.circuit.session" in imported
    assert imported.isdisjoint(HEAVY)
    expected = references.greedy(bundled_folder(), references.ids(bundled_folder(), "ROMEO:"), 8)
    assert printed.decode().strip() == references.text(bundled_folder(), expected).strip()
