"""`molink-peer status` sees a real swarm from outside, or says in one line why it does not."""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.deadline import DEADLINE_S
from support.devices.brief_profile import measure_briefly
from support.models.stored_models import write_model

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import (
    PROTOCOL_VERSION,
    DeviceProperties,
    LayerLatency,
    PeerFacts,
    PeerState,
    ServedModel,
)
from molink.peer.commands.overview import print_machine
from molink.peer.commands.surveys import measure_machine
from molink.peer.device import device
from molink.peer.device.graphics_cards import Card
from molink.peer.wire.link.certificate import new_certificate
from molink.shards.spec import Span


def about(identity: Identity) -> tuple[PeerFacts, PeerState]:
    facts = PeerFacts(
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        sequence=1,
        ttl_s=600,
        protocol_version=PROTOCOL_VERSION,
        version="0.1.0",
        name="Zoë's PC",
        addresses=(),
        grpc_addresses=("127.0.0.1:4002",),
        certificate=new_certificate(identity.peer_id).der,
        device=DeviceProperties("cpu", "Processor", 1, 8_000_000_000, "Linux x86_64", 2),
        model=ServedModel("a" * 64, "b" * 64, "molink/test", "llama", "float32", "none", 8),
        span_limit=None,
        layer_latencies=(LayerLatency(1, 1.25),),
        embed_ms=0.1,
        head_ms=0.2,
        load_bytes_per_s=1e6,
    )
    return facts, PeerState(identity.peer_id, 2, 600, 1, (Span(0, 4),), 1_500_000_000, 500_000_000, 3, 1)


async def status(folder: Path, arguments: Sequence[object]) -> tuple[int, str, str]:
    program = "from molink.peer.commands import cli; cli.main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "status", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("MOLINK_INITIAL_PEERS", raising=False)


def test_a_swarm_is_shown_as_json_and_as_a_table_and_by_its_configured_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        identity = Identity.generate()
        async with Discovery(identity) as swarm:
            await swarm.announce(*about(identity))
            address = swarm.addresses[0]
            code, out, err = await status(tmp_path, ("--initial-peers", address, "--json"))
            assert (code, err) == (0, "")
            (peer,) = json.loads(out)["peers"]
            assert (peer["peer_id"], peer["name"], peer["spans"]) == (identity.peer_id, "Zoë's PC", [[0, 4]])
            assert json.loads(out)["models"][0]["missing"] == [[4, 8]]
            monkeypatch.setenv("MOLINK_INITIAL_PEERS", address)
            code, out, err = await status(tmp_path, ())
            assert (code, err) == (0, "")
            assert out.startswith("No peer runs here with ")
            assert f"Seen from outside, by the configured {address}:" in out.replace("\n", " ")
            assert "Zoë's PC" in out
            assert "nobody holds layers 4:8" in out
            assert ": 1 peer, " in out

    asyncio.run(scenario())


def test_a_private_swarm_is_shown_to_who_has_its_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity = Identity.generate()
        async with Discovery(identity, swarm_key=SwarmKey.write_new(tmp_path / "k")) as swarm:
            await swarm.announce(*about(identity))
            given = ("--json", "--swarm-key", tmp_path / "k", "--initial-peers", swarm.addresses[0])
            code, out, _ = await status(tmp_path, given)
            assert code == 0
            assert [peer["peer_id"] for peer in json.loads(out)["peers"]] == [identity.peer_id]
            (tmp_path / "other").write_text("not a key")
            (tmp_path / "other").chmod(0o600)
            given = ("--swarm-key", tmp_path / "other", "--initial-peers", swarm.addresses[0])
            code, out, err = await status(tmp_path, given)
            assert (code, out) == (1, "")
            assert "is not a swarm key" in err
            assert err.count("\n") == 1

    asyncio.run(scenario())


@pytest.mark.full
def test_a_swarm_that_nobody_answers_for_is_a_failure_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        code, out, err = asyncio.run(status(tmp_path, ("--initial-peers", address, "--json")))
    assert (code, out) == (1, "")
    assert err.startswith(f"molink-peer: none of the initial peers answered ({address}: ")
    assert err.count("\n") == 1


@pytest.mark.full
def test_a_layer_is_timed_in_every_dtype_unless_one_is_asked_for(tmp_path: Path) -> None:
    folder = str(write_model("llama", tmp_path / "llama"))
    lines: list[str] = []
    machine = measure_machine(
        folder, "cpu", "auto", torch.get_num_threads(), tmp_path, lines.append, lines.append
    )
    decode_ms = machine["decode_layer_ms_by_dtype"]
    assert isinstance(decode_ms, dict)
    assert set(decode_ms) == {"float32", "bfloat16"}
    assert min(decode_ms.values()) > 0
    assert machine["fastest_dtype"] in decode_ms
    assert [line for line in lines if " in bfloat16 " in line]
    asked = measure_machine(
        folder, "cpu", "bfloat16", torch.get_num_threads(), tmp_path, lines.append, lines.append
    )
    assert asked["dtype"] == "bfloat16"
    assert not {"decode_layer_ms_by_dtype", "fastest_dtype"} & set(asked)


@pytest.mark.full
def test_a_card_that_the_installed_torch_cannot_use_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card("NVIDIA", "NVIDIA GeForce RTX 4070", (8, 9), "580.95.05", (13, 0))
    monkeypatch.setattr(device, "seen_cards", lambda: (card,))
    monkeypatch.setattr(device, "hidden_cards", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    measure_briefly(monkeypatch)
    told: list[str] = []
    machine = measure_machine(
        "molink/tiny-shakespeare", "auto", "float32", 1, tmp_path, told.append, told.append
    )
    remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    assert sum(remedy in line for line in told) == 1
    assert machine["unused_gpu"] in told
    print_machine(machine)
    assert remedy in capsys.readouterr().out.replace("\n", "")
