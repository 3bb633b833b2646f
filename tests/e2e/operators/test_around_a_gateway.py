"""What stands around a gateway, with the files of docs/deploy: nginx before it; Prometheus, which asks it and peers."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from support.deployment.distribution import answers_at, folder_of_its_own, program, started
from support.swarms.fake_swarm import CHAT, DEADLINE_S, MODEL, PRIVATE_WORD, TEXT, FakeSwarm, gateway
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, FORMATION_TIMEOUT_S, free_ports

from molink.client.local.local_gateway import LocalGateway

pytestmark = [pytest.mark.real, pytest.mark.full]

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
NGINX = """
pid {folder}/nginx.pid;
error_log stderr;
daemon off;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {site}
}}
"""


@contextmanager
def behind_nginx(gateway_url: str) -> Iterator[str]:
    """The URL of nginx, before that gateway."""
    nginx, (port,) = program("nginx", "nginx-light"), free_ports(1)
    with folder_of_its_own() as folder:
        site = (DEPLOY / "nginx/molink.conf").read_text("utf-8")
        assert site.count("127.0.0.1:8000") == site.count("listen 80;") == 1
        site = site.replace("127.0.0.1:8000", gateway_url.removeprefix("http://"))
        site = site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace(
            "swarm.example.org", "localhost"
        )
        file = folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, site=site), "utf-8")
        url = f"http://localhost:{port}"
        with started([nginx, "-p", folder, "-c", file], folder, lambda: answers_at(f"{url}/healthz")):
            yield url


def test_a_stream_passes_nginx_word_by_word_and_ends_when_its_client_leaves() -> None:
    swarm = FakeSwarm(hangs_at=1)
    with gateway(swarm) as inner, behind_nginx(inner) as url:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=TEXT | {"stream": True}, timeout=DEADLINE_S
        ) as answer:
            assert answer.status_code == 200
            first = next(line for line in answer.iter_lines() if line.startswith("data: "))
            assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == swarm.words[0]
            assert swarm.hanging.wait(DEADLINE_S)  # the word is here, and the next one does not come
        assert swarm.ended.acquire(timeout=DEADLINE_S)


def test_openais_client_the_page_and_the_swarms_events_pass_nginx() -> None:
    with gateway(FakeSwarm()) as inner, behind_nginx(inner) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S) as client:
            pieces = client.chat.completions.create(**CHAT, stream=True)
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "But soft!"
        assert "<html" in httpx.get(f"{url}/", timeout=DEADLINE_S).text
        with httpx.stream("GET", f"{url}/v1/swarm/events", timeout=DEADLINE_S) as events:
            assert next(line for line in events.iter_lines() if line)
        assert httpx.get(f"{url}/metrics", timeout=DEADLINE_S).status_code == 404
        too_much = httpx.post(
            f"{url}/v1/completions", json=TEXT | {"prompt": "a" * 2**21}, timeout=DEADLINE_S
        )
        assert too_much.status_code == 413
        assert PRIVATE_WORD not in too_much.text


@pytest.mark.anyio
async def test_prometheus_scrapes_a_gateway_and_a_peer(tmp_path: Path) -> None:
    prometheus, (port,) = program("prometheus", "prometheus"), free_ports(1)
    async with ForkedSwarm() as swarm:
        peer = await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12", "--metrics-port", "0")
        told = next(line.split()[-1] for line in peer.lines if line.startswith("Metrics: "))
        async with LocalGateway(swarm.addresses, tmp_path / "gateway.log") as front:
            async with httpx.AsyncClient(base_url=front.url, timeout=FORMATION_TIMEOUT_S) as http:
                body = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 4}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
            targets = (
                front.url.removeprefix("http://"),
                told.removeprefix("http://").removesuffix("/metrics"),
            )
            await asyncio.to_thread(_scraped, prometheus, port, targets)


def _scraped(prometheus: str, port: int, targets: tuple[str, str]) -> None:
    """Starts Prometheus, and asks it until it has seen both."""
    url = f"http://127.0.0.1:{port}"
    with folder_of_its_own() as folder:
        text = (DEPLOY / "prometheus/prometheus.yml").read_text("utf-8").replace("15s", "1s")
        for shipped, actual in zip(("127.0.0.1:8000", "127.0.0.1:9100"), targets, strict=True):
            assert text.count(shipped) == 1
            text = text.replace(shipped, actual)
        (folder / "prometheus.yml").write_text(text, "utf-8")
        (folder / "alerts.yml").write_text((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"), "utf-8")
        command = [
            prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with started(command, folder, lambda: answers_at(f"{url}/-/ready", well=True)):
            assert _value(url, 'up{job="molink-gateway"}') == 1
            assert _value(url, 'up{job="molink-peer"}') == 1
            tokens = f'molink_gateway_tokens_total{{model="{MODEL}", kind="generated"}}'
            assert _value(url, tokens) == 4
            assert _value(url, 'molink_rows_total{job="molink-peer"}') >= 4
            assert _value(url, "count(molink_peer_info) + count(molink_gateway_info)") == 2
            rules = httpx.get(f"{url}/api/v1/rules", timeout=DEADLINE_S).json()["data"]["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}


def _value(url: str, query: str) -> float:
    """What Prometheus knows of a series, once it knows something."""
    ends_s = time.monotonic() + DEADLINE_S
    while True:
        asked = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=DEADLINE_S)
        found = asked.json()["data"]["result"]
        if found:
            return float(found[0]["value"][1])
        assert time.monotonic() < ends_s, query
        time.sleep(0.1)
