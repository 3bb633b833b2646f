"""Two peers, a client, and maybe a gateway, in whatever environment this program is started in.

It prints a JSON document per line: first what it sees of the environment, then the tokens of a generation, and of
another one for each line on its stdin, with the lines of all logs. Its arguments are one JSON
document: where everything lies, what each peer adds to the environment and to its command line, and whether there is a
gateway.
"""

import asyncio
import json
import locale
import os
import resource
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from molink.client.api.swarm import AsyncSwarm
from molink.client.local import local_gateway, local_swarm
from molink.client.local.local_gateway import LocalGateway
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.peer.device.device import machine_memory_bytes, processor_count
from molink.shards.spec import SamplingParams
from molink.signals import run_loop

MODEL = "molink/tiny-shakespeare"
LAYERS = ("0:6", "6:12")
START_S = 600.0


def say(**document: object) -> None:
    print(json.dumps(document), flush=True)


def seen() -> dict[str, object]:
    """Returns what this process sees of what a row sets up."""
    os.umask(mask := os.umask(0))
    return {
        "uid": os.getuid(),
        "umask": mask,
        "locale": locale.setlocale(locale.LC_ALL, ""),
        "charset": locale.nl_langinfo(locale.CODESET),
        "ipv6": _binds("::1"),
        "processors": processor_count(),
        "memory": machine_memory_bytes(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "sizes": {name: _size(name) for name in ("/tmp", "/dev/shm")},  # noqa: S108 - what a row mounts
        "read_only": not os.access("/dev/shm", os.W_OK),  # noqa: S108 - what a row mounts
        "folder": tempfile.gettempdir(),
        "wall_s": time.time(),
    }


def _binds(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as end:
            end.bind((host, 0))
    except OSError:
        return False
    return True


def _size(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


async def main(asked: dict[str, Any]) -> None:
    tempfile.tempdir = asked["folder"]
    local_swarm.READY_TIMEOUT_S = local_gateway.START_TIMEOUT_S = START_S  # half a core is slow
    say(**seen())
    async with AsyncExitStack() as stack:
        peers: list[LocalPeer] = []
        for layers, added in zip(LAYERS, asked["peers"], strict=True):
            swarm = await stack.enter_async_context(LocalSwarm(added))
            options = ("--model", MODEL, "--layers", layers, "--local-network", "off", *asked["options"])
            known = [peer.address for peer in peers]
            peers.append(await swarm.join(f"peer {layers[0]}", *options, initial_peers=known))
        addresses = [peer.address for peer in peers]
        logs = [peer.log for peer in peers] + [peers[0].log.with_name("gateway.log")]
        gateway = LocalGateway(addresses, logs[-1])
        if asked["gateway"]:
            await stack.enter_async_context(gateway)
        client = await stack.enter_async_context(AsyncSwarm(MODEL, initial_peers=addresses))
        while True:
            found = {"tokens": await tokens(client, asked), "text": await answer(gateway.url, asked)}
            say(**found, logs=[line for log in logs if log.exists() for line in _lines(log)])
            if not await asyncio.to_thread(sys.stdin.readline):
                break


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


async def tokens(client: AsyncSwarm, asked: dict[str, Any]) -> list[int]:
    params = SamplingParams(max_new_tokens=asked["new_tokens"], temperature=0.0)
    return list((await client.generate(asked["prompt"], params=params, timeout_s=START_S)).token_ids)


async def answer(url: str, asked: dict[str, Any]) -> str:
    """The same by the gateway; empty where there is none."""
    if not url:
        return ""
    body = {"model": MODEL, "prompt": asked["prompt"], "max_tokens": asked["new_tokens"], "temperature": 0}
    async with httpx.AsyncClient(timeout=START_S, trust_env=False) as client:
        answered = await client.post(f"{url}/v1/completions", json=body)
    return str(answered.raise_for_status().json()["choices"][0]["text"])


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    Path(arguments["folder"]).mkdir(exist_ok=True)  # here, so that its name is in the encoding of the locale
    run_loop(main(arguments))
