"""A scripted swarm as large as a test wants it, whose generations take their time: the page is drawn by it."""

import asyncio
import copy
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.swarms.fake_swarm import MODEL, SPEC, FakeSwarm

from molink.client.api.generation import TextPiece
from molink.client.api.running_sessions import REQUEST_TAG
from molink.client.text.tool_calls import ToolCallStream
from molink.shards.spec import SamplingParams

LAYERS = 32
_DEVICES = (
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 3060",
    "Apple M3 Max",
    "NVIDIA GeForce RTX 4070 Ti",
)
_NAMES = (
    "aster",
    "birch",
    "cedar",
    "dune",
    "ember",
    "fjord",
    "grove",
    "heron",
    "iris",
    "juniper",
    "kelp",
    "larch",
)
_CITIES = ((0, 0), (14, 4), (30, -9), (92, 20), (105, 36), (160, -40), (176, -18), (62, -70))
"""Of round trips, in milliseconds: volunteers live around some of them."""
_SPAN = 8


def peer_of(
    at: int, layers: int = LAYERS, name: str | None = None, region: str | None = None
) -> dict[str, Any]:
    """The volunteer of that number, always the same."""
    drawn = random.Random(at)
    x, y = _CITIES[drawn.randrange(len(_CITIES))]
    span = min(_SPAN, layers)
    start = (at * span) % layers
    return {
        "peer_id": f"12D3KooW{at:044d}",
        "name": name or f"{_NAMES[at % len(_NAMES)]}-{at}",
        "model": MODEL,
        "device": drawn.choice(_DEVICES),
        "region": region,
        "addresses": ["/ip4/203.0.113.7/tcp/4001"],
        "spans": [[start, min(layers, start + span)]],
        "sessions": drawn.randrange(3),
        "layer_ms": round(drawn.uniform(0.4, 1.6), 3),
        "tokens_served": round(drawn.paretovariate(0.7) * 900) % 90_000,
        "answers": True,
        "coordinate": {
            "position": [x + drawn.gauss(0, 7), y + drawn.gauss(0, 7), drawn.gauss(0, 3), drawn.gauss(0, 2)],
            "height_ms": 4.0,
            "error": 0.2,
        },
    }


def page_snapshot(peers: Sequence[dict[str, Any]], layers: int = LAYERS) -> dict[str, Any]:
    """What a gateway tells of a swarm of these peers."""
    held = {layer for peer in peers for start, stop in peer["spans"] for layer in range(start, stop)}
    is_complete = len(held) == layers
    return {
        "model": MODEL,
        "models": [{"model": MODEL, "layers": layers, "peers": len(peers), "complete": is_complete}],
        "ready": is_complete,
        "reason": "" if is_complete else "nobody holds some layers",
        "planned": {"hops": hops_of(peers, layers), "predicted_tpot_ms": 90.0} if is_complete else None,
        "circuits": [],
        "links": [],
        "peers": list(peers),
    }


def hops_of(peers: Sequence[dict[str, Any]], layers: int = LAYERS, turn: int = 0) -> list[dict[str, Any]]:
    """A circuit over some of them, with a partner for each hop that another peer could stand in for."""
    hops: list[dict[str, Any]] = []
    while (start := hops[-1]["stop"] if hops else 0) < layers:
        able = [peer for peer in peers if peer["spans"][0][0] == start]
        at = (turn * 3 + start) % len(able)
        peer, partner = able[at], able[(at + 1) % len(able)]
        hops.append(
            {
                "peer_id": peer["peer_id"],
                "name": peer["name"],
                "start": start,
                "stop": peer["spans"][0][1],
                "partner": partner["peer_id"] if len(able) > 1 else None,
                "copy_form": "inputs",
                "copy_behind_tokens": 3,
                "predicted_compute_ms": 8 * peer["layer_ms"],
                "predicted_link_ms": 6.0 + 4 * math.sin(start + turn),
                "compute_ms": round(8.3 * peer["layer_ms"], 3),
                "queue_ms": 0.4,
                "link_ms": round(11.0 + 7 * math.sin(start + turn), 3),
                "first_compute_ms": 42.0,
                "first_queue_ms": 1.0,
                "first_link_ms": 12.0,
            }
        )
    return hops


def circuit_of(hops: list[dict[str, Any]], number: int = 0, **values: object) -> dict[str, Any]:
    """A circuit in use as `RunningSession` describes it."""
    described = {
        "id": f"circuit-{number}",
        "tag": "",
        "model": MODEL,
        "phase": "decode",
        "hops": hops,
        "tokens": 1,
        "ttft_ms": 312.0,
        "tpot_ms": 87.0,
        "predicted_tpot_ms": 90.0,
        "epochs": 1,
        "moves": 0,
        "losses": 0,
    }
    return described | values


@dataclass(slots=True)
class PageSwarm(FakeSwarm):
    """A swarm whose generations take `pace_s` for each word, and are circuits in use meanwhile."""

    pace_s: float = 0.03
    prompts: list[object] = field(default_factory=list)

    @classmethod
    def of(cls, peers: int, layers: int = LAYERS, *, pace_s: float = 0.03) -> "PageSwarm":
        """As many peers, together holding all layers if there are enough of them."""
        made = cls(
            pace_s=pace_s,
            model=replace(SPEC, layers=layers, layer_bytes=(64,) * layers, kv_bytes_per_token=(32,) * layers),
        )
        made.state = page_snapshot([peer_of(at, layers) for at in range(peers)], layers)
        return made

    def run_others(self, count: int, tokens: int = 1) -> None:
        """So many circuits of other people's are in use."""
        self.running = [
            circuit_of(hops_of(self.state["peers"], turn=1 + at), at, tokens=tokens) for at in range(count)
        ]

    def circuits(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self.running)

    async def _pieces(
        self, asked: object, params: SamplingParams, timeout_s: float, calls: ToolCallStream | None = None
    ) -> AsyncIterator[TextPiece]:
        self.prompts.append(asked)
        hops = (self.state["planned"] or {"hops": []})["hops"]
        own = circuit_of(hops, len(self.prompts) + 1000, tag=REQUEST_TAG.get(), tokens=0, phase="prefill")
        self.running = [*self.running, own]
        try:
            await asyncio.sleep(self.pace_s)
            async for piece in FakeSwarm._pieces(self, asked, params, timeout_s, calls):  # noqa: SLF001 - its own base
                own["tokens"] += 1
                own["phase"] = "decode"
                yield piece
                await asyncio.sleep(self.pace_s)
        finally:
            own["phase"] = "ended"
            self.running = [*(one for one in self.running if one["phase"] != "ended"), own]
