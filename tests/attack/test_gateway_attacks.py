"""A real `molink-gateway` in front of real peers, and users who mean harm: the others notice nothing of it."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.gateway.server import ENDS_AFTER_S, STOP_TIMEOUT_S
from molink.client.local.local_gateway import LocalGateway
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.anyio]

DEADLINE_S = 120.0
PROMPT = "ROMEO:"
TOKENS = 8
LONG = {"model": BUNDLED, "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UNFINISHED = HEAD + b"Content-Length: 100\r\n\r\n{"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWTH_BYTES = 256 * 2**20
both_forms = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.attack)])


@pytest.fixture(scope="module")
async def gateway(
    attacked: LocalSwarm, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalGateway]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    async with LocalGateway(attacked.addresses, log) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
async def http(gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=DEADLINE_S) as client:
        yield client


async def generate(http: httpx.AsyncClient, references: References, **headers: str) -> None:
    """One honest generation, whose text must be that of transformers."""
    folder = bundled_folder()
    body = {"model": BUNDLED, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    ids = references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
    assert answer.json()["choices"][0]["text"] == references.text(folder, ids)


@asynccontextmanager
async def honest(http: httpx.AsyncClient, references: References, **headers: str) -> AsyncIterator[None]:
    """Somebody generates while the block runs, with a connection of his own each time, and never fails."""
    ended = asyncio.Event()

    async def use() -> None:
        while True:
            async with httpx.AsyncClient(base_url=http.base_url, timeout=DEADLINE_S) as fresh:
                await generate(fresh, references, **headers)
            if ended.is_set():
                return

    using = asyncio.create_task(use(), name="honest user")
    try:
        yield
        ended.set()
        async with asyncio.timeout(DEADLINE_S):
            await using
    finally:
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """So many may be open in this process meanwhile."""
    if sys.platform == "win32":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, before[0]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def held(
    http: httpx.AsyncClient, count: int, sent: bytes
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many connections on which that much was sent."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(count):
            pair = await asyncio.open_connection(http.base_url.host, http.base_url.port, limit=2**10)
            opened.append(pair)
            pair[1].write(sent)
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


def resident_bytes(gateway: LocalGateway) -> int:
    """Memory that the gateway and the processes that it started hold."""
    assert gateway.process_id is not None
    own = psutil.Process(gateway.process_id)
    return sum(int(one.memory_info().rss) for one in (own, *own.children(recursive=True)))


@both_forms
async def test_connections_on_which_nothing_comes_keep_nobody_out(
    many: bool, http: httpx.AsyncClient, gateway: LocalGateway, references: References
) -> None:
    count = 3000 if many else 300
    before = resident_bytes(gateway)
    with descriptors(count + 500):
        async with honest(http, references), held(http, count, b""), held(http, count // 10, b"GET /"):
            await generate(http, references)
            assert resident_bytes(gateway) - before < GROWTH_BYTES


@pytest.mark.full
@both_forms
async def test_unfinished_bodies_hold_no_place(
    many: bool, http: httpx.AsyncClient, references: References
) -> None:
    async with honest(http, references), held(http, 700 if many else 70, UNFINISHED):
        await generate(http, references)


@pytest.mark.full
@both_forms
async def test_long_texts_of_many_choices_hold_up_nobody(
    many: bool, http: httpx.AsyncClient, references: References
) -> None:
    texts = ("x" * 1_000_000, "word " * 26_000)
    async with honest(http, references), asyncio.timeout(DEADLINE_S):
        for _ in range(10 if many else 1):
            asked = [http.post("/v1/completions", json=LONG | {"prompt": text, "n": 16}) for text in texts]
            for answer in await asyncio.gather(*asked):
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.full
@both_forms
async def test_streams_that_one_user_does_not_read_leave_places_to_others(
    many: bool, http: httpx.AsyncClient, references: References
) -> None:
    body = json.dumps(LONG | {"max_tokens": 900 if many else 100}).encode()
    asked = HEAD + b"X-Forwarded-For: 198.51.100.7\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with held(http, 32, asked), honest(http, references, **{"X-Forwarded-For": "203.0.113.7"}):
        await generate(http, references, **{"X-Forwarded-For": "203.0.113.8"})


@pytest.mark.full
async def test_a_name_that_points_here_and_a_body_of_two_lengths_are_refused(http: httpx.AsyncClient) -> None:
    rebound = await http.get("/v1/swarm", headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "host_not_allowed")
    twice = HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n"
    async with held(http, 1, twice) as [(reader, _)], asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def events_of(streamed: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line]


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_time_and_each_stream_says_how_it_ended(
    number: signal.Signals, attacked: LocalSwarm, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with (
        LocalGateway(attacked.addresses, log) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=DEADLINE_S) as http,
        asyncio.TaskGroup() as tasks,
    ):
        reading = []
        for _ in range(4):
            request = http.build_request("POST", "/v1/completions", json=LONG | {"n": 4})
            reading.append(tasks.create_task(events_of(await http.send(request, stream=True))))
        assert gateway.process_id is not None
        os.kill(gateway.process_id, number)
        async with asyncio.timeout(STOP_TIMEOUT_S + ENDS_AFTER_S + 2):
            assert await gateway.wait() == 0
        for events in await asyncio.gather(*reading):
            assert events[-1] == "[DONE]" or json.loads(events[-1])["error"]["code"] == "stopping"
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.attack
async def test_a_template_that_loops_fails_its_own_requests_and_keeps_no_gateway_from_ending(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(bundled_folder(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LOOP)
    log = tmp_path / "log"
    async with (
        ForkedSwarm() as swarm,
        LocalGateway([(await swarm.join("own", "--model", str(folder))).address], log) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=DEADLINE_S) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        chats = [
            asyncio.create_task(
                http.post(
                    "/v1/chat/completions",
                    json={"model": name, "messages": [{"role": "user", "content": str(number)}]},
                )
            )
            for number in range(6)
        ]
        answer = await asyncio.wait_for(chats[0], DEADLINE_S)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "did not end within 5 s" in answer.text
        assert (await http.get("/healthz")).status_code == 200
        assert not all(chat.done() for chat in chats), "the other loops still run"
        assert gateway.process_id is not None
        workers = psutil.Process(gateway.process_id).children(recursive=True)
        assert workers
        os.kill(gateway.process_id, signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S + ENDS_AFTER_S + 2):
            assert await gateway.wait() == 0
        outcomes = await asyncio.gather(*chats, return_exceptions=True)
        assert {one.status_code for one in outcomes if isinstance(one, httpx.Response)} <= {400, 429, 503}
    assert not [worker for worker in workers if worker.is_running()]
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.attack
async def test_few_descriptors_make_it_refuse_and_it_goes_on(
    attacked: LocalSwarm, tmp_path: Path, references: References
) -> None:
    log = tmp_path / "log"
    async with LocalGateway(attacked.addresses, log) as gateway:
        assert gateway.process_id is not None
        if sys.platform == "linux":  # where it can be done to a process that runs
            import resource

            resource.prlimit(gateway.process_id, resource.RLIMIT_NOFILE, (150, 150))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=DEADLINE_S) as http:
            async with held(http, 400, b""):
                async with asyncio.timeout(DEADLINE_S):
                    await generate(http, references)
            await generate(http, references)
    assert "Traceback" not in log.read_text(), log.read_text()
    assert len(log.read_text().splitlines()) < 5
