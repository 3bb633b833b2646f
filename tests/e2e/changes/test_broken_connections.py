"""Connections between peers, and to their clients, break again and again: the tokens are the same, in one epoch, and no
row is computed twice, with guesses that are right and wrong."""

import asyncio
import random
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.links.cutting_proxy import CuttingProxy
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    circuit_of,
    free_ports,
    generate,
    mostly_right,
)

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.peer.wire.link.link_resources import LINK_TIMES
from molink.peer.wire.transmission.policies import POLICIES

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

THIRDS = ((0, 4), (4, 8), (8, 12))
PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 60
GENERATIONS = 20
CUTS = 50
COUNTED_WITHIN_S = 120.0


@asynccontextmanager
async def thirds(
    *options: str, metrics_ports: tuple[int, ...] = (0, 0, 0)
) -> AsyncIterator[tuple[LocalSwarm, AsyncSwarm]]:
    """Three peers with a third of the layers each, and a client whose circuit they are. 0: any metrics port."""
    async with ForkedSwarm() as swarm:
        spans = {}
        for number, ((start, stop), port) in enumerate(zip(THIRDS, metrics_ports, strict=True)):
            own = ("--layers", f"{start}:{stop}", "--metrics-port", str(port))
            peer = await swarm.join(f"third-{number}", "--model", BUNDLED, *own, *options)
            spans[peer] = (start, stop)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            with circuit_of(client, spans):
                yield swarm, client


def numbered(number: int) -> str:
    """A prompt that begins like no other, so that no peer has computed a part of it before."""
    return f"{number}: {PROMPT}"


def rows_computed(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=COUNTED_WITHIN_S) as answer:
        counted = re.search(r"^molink_rows_total (\S+)$", answer.read().decode(), re.MULTILINE)
    assert counted is not None
    return int(float(counted[1]))


async def rows_once_counted(ports: tuple[int, ...], least: int) -> list[int]:
    """What each peer has computed, once all have counted `least` rows: they count after they have sent."""
    async with asyncio.timeout(COUNTED_WITHIN_S):
        while min(rows := [await asyncio.to_thread(rows_computed, port) for port in ports]) < least:  # noqa: ASYNC110 - other processes count
            await asyncio.sleep(0.05)
    return rows


@pytest.mark.timeout(400)
async def test_generations_go_on_as_if_nothing_had_broken(
    anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    ports, folder = free_ports(len(THIRDS)), bundled_folder()
    made: list[Generation] = []
    prompts, expected = [], []
    async with CuttingProxy() as proxy:
        monkeypatch.setenv("MOLINK_HTTP_PROXY", proxy.url)
        async with thirds(metrics_ports=ports) as (_, client):
            cuts = 0

            async def cut() -> None:
                nonlocal cuts
                while True:
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    cuts += proxy.cut() > 0

            while len(made) < GENERATIONS or cuts < CUTS:
                prompts.append(references.ids(folder, numbered(len(made))))
                expected.append(references.greedy(folder, prompts[-1], NEW_TOKENS))
                predicted = mostly_right(expected[-1], wrong_every=5)
                cutting = asyncio.create_task(cut())
                try:
                    made.append(await generate(client, numbered(len(made)), NEW_TOKENS, prediction=predicted))
                finally:
                    cutting.cancel()
                    await asyncio.gather(cutting, return_exceptions=True)
            # the last token of each generation is drawn and never stepped; guesses that were wrong are
            rows = sum(len(prompt) + len(new) - 1 for prompt, new in zip(prompts, expected, strict=True))
            rows += sum(one.guessed_tokens - one.accepted_tokens for one in made)
            counted = await rows_once_counted(ports, rows)
    assert [(one.token_ids, one.epochs) for one in made] == [(new, 1) for new in expected]
    assert counted == [rows] * len(ports)
    assert 0 < sum(one.accepted_tokens for one in made) < sum(one.guessed_tokens for one in made)


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_of_transmission_gives_the_same_tokens(
    policy: str, anyio_backend: str, references: References
) -> None:
    folder = bundled_folder()
    prompts = [PROMPT, "ROMEO:", "What say you, my lord?\n" * 30]
    expected = [references.greedy(folder, references.ids(folder, prompt), 12) for prompt in prompts]
    async with thirds("--transmission-policy", policy) as (_, client):
        made = await asyncio.gather(*(generate(client, prompt, 12) for prompt in prompts))
    assert [one.token_ids for one in made] == expected


@pytest.mark.timeout(200)
async def test_a_session_whose_links_were_lost_goes_on_behind_its_caches(
    anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can take another's place, and for longer than a link waits there is no way between any two of them."""
    ports, folder, text = free_ports(len(THIRDS)), bundled_folder(), PROMPT * 4
    prompt = references.ids(folder, text)
    async with CuttingProxy() as proxy:
        monkeypatch.setenv("MOLINK_HTTP_PROXY", proxy.url)
        async with thirds(metrics_ports=ports) as (_, client):
            tokens: list[int] = []
            pieces = client.stream_events(text, max_new_tokens=200, timeout_s=FORMATION_TIMEOUT_S)
            generation = None
            async for piece in pieces:
                if len(tokens) < 20 <= len(tokens) + len(piece.token_ids):
                    proxy.refuses = True
                    proxy.cut()
                    asyncio.get_running_loop().call_later(
                        LINK_TIMES.resume_s + 0.5, setattr, proxy, "refuses", False
                    )
                tokens.extend(piece.token_ids)
                generation = piece.generation
            expected = references.greedy(folder, prompt, 200)
            least = len(prompt) + len(expected) - 1
            counted = await rows_once_counted(ports, least)
    assert tuple(tokens) == tuple(expected)
    assert generation is not None
    assert generation.epochs > 1
    refused = generation.guessed_tokens - generation.accepted_tokens
    assert all(rows < least + refused + len(prompt) / 2 for rows in counted), (counted, least, len(prompt))
