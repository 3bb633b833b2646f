"""Examples of the documents, run as they stand against a swarm of real peers and a gateway."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.swarms.live_swarms import PROGRAM_TIMEOUT_S

from molink.client.local.local_gateway import LocalGateway
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
PAGES = (DOCS.parent / "README.md", DOCS / "QUICKSTART.md", DOCS / "USING.md")
BLOCKS = [
    (path.name, block)
    for path in PAGES
    for block in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    if "with Swarm(" in block
]


@pytest.fixture(scope="module")
async def environment(
    wide_swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, str]]:
    """What says where swarm and gateway are."""
    async with LocalGateway(wide_swarm.addresses, tmp_path_factory.mktemp("gateway") / "log") as gateway:
        yield os.environ | {
            "MOLINK_INITIAL_PEERS": wide_swarm.addresses[0],
            "OPENAI_BASE_URL": f"{gateway.url}/v1",
            "OPENAI_API_KEY": "any",
            "ANTHROPIC_BASE_URL": gateway.url,
            "ANTHROPIC_API_KEY": "any",
            "OMP_NUM_THREADS": "1",
        }


async def run(program: str | Path, environment: dict[str, str]) -> str:
    """Its output; it has to end well."""
    arguments = ("-c", program) if isinstance(program, str) else (program,)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
async def test_each_example_runs_as_it_stands(example: Path, environment: dict[str, str]) -> None:
    assert (await run(example, environment)).strip()


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda value: value if value.endswith(".md") else "")
async def test_python_in_the_pages_runs_as_it_stands(
    page: str, block: str, environment: dict[str, str]
) -> None:
    assert await run(block, environment), page


def test_each_page_shows_python() -> None:
    assert {page for page, _ in BLOCKS} == {path.name for path in PAGES}
