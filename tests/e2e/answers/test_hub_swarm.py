"""Peers that serve a model of a hub: each fetches its own layers, and together they are the model."""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.models.fake_hub import Answer, Asked, FakeHub, fake_hub, files_of
from support.models.tiny_models import make_tiny_model
from support.swarms.forked_peers import ForkedSwarm, run_forked
from support.swarms.live_swarms import PROGRAM_TIMEOUT_S, References, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import SwarmUnavailable
from molink.client.local.local_swarm import LocalSwarm
from molink.commands import EXIT_INTERRUPTED
from molink.shards.checkpoint.safetensors_header import read_header

pytestmark = [pytest.mark.real, pytest.mark.anyio]

MODEL = "someone/some-model"
PROMPT = (5, 9, 200, 31, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("hub"), max_shard_size="300KB")


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with fake_hub(MODEL, files_of(folder)) as made:
        yield made


@pytest.fixture
async def swarm(hub: FakeHub, tmp_path: Path, anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }
    async with ForkedSwarm(environment) as made:
        yield made


def options(tmp_path: Path, store: str, layers: str | None) -> tuple[str, ...]:
    span = () if layers is None else ("--layers", layers)
    return ("--model", MODEL, "--store-dir", str(tmp_path / store), "--dtype", "float32", *span)


def bytes_of(folder: Path, *parts: str) -> set[tuple[str, int]]:
    """Where in the files the tensors lie whose names hold one of `parts`."""
    return {
        (path.name, at)
        for path in folder.glob("*.safetensors")
        for tensor in read_header(path)
        if any(part in tensor.name for part in parts)
        for at in range(tensor.start, tensor.stop)
    }


def fetched(hub: FakeHub) -> set[tuple[str, int]]:
    ranges = hub.weight_ranges()
    return {(name, at) for name, own in ranges.items() for start, stop in own for at in range(start, stop)}


def layers(start: int, stop: int) -> list[str]:
    return [f"layers.{layer}." for layer in range(start, stop)]


async def check_tokens(swarm: LocalSwarm, folder: Path, references: References) -> None:
    async with AsyncSwarm(MODEL, initial_peers=swarm.addresses) as client:
        generation = await generate(client, PROMPT, 24)
    assert len(generation.circuit.hops) == 2
    assert generation.token_ids == references.greedy(folder, PROMPT, 24)


async def test_each_peer_fetches_its_own_layers_and_together_they_are_the_model(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path, references: References
) -> None:
    await swarm.join("front", *options(tmp_path, "front", "0:2"))
    read = {asked.name for asked in hub.asked if asked.host == "content" and asked.stop > 2**16}
    assert read == {name for name in hub.files if name.endswith(".safetensors")}  # it had to know the model
    assert fetched(hub) == set()  # and kept its own layers on the way
    back = await swarm.join("back", *options(tmp_path, "back", "3:6"))
    assert fetched(hub) == bytes_of(folder, *layers(3, 6), "model.norm", "lm_head")
    await swarm.stop(back)
    await swarm.join("back", *options(tmp_path, "back", "2:6"))
    assert fetched(hub) == bytes_of(folder, *layers(2, 3))
    await check_tokens(swarm, folder, references)


@pytest.mark.full
async def test_a_peer_that_chooses_for_itself_fetches_what_it_chose_and_shares_the_store(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    await swarm.join("first", *options(tmp_path, "shared", "0:6"))
    fetched(hub)
    await swarm.join("second", *options(tmp_path, "shared", None))
    assert fetched(hub) == set()


@pytest.mark.full
async def test_the_first_ctrl_c_ends_a_peer_that_waits_for_its_weights_and_another_try_goes_on(
    swarm: LocalSwarm, hub: FakeHub, tmp_path: Path, anyio_backend: str
) -> None:
    names = sorted(name for name in hub.files if name.endswith(".safetensors"))
    gone = threading.Event()
    digests = tmp_path / "store" / "notes" / "digests"

    def hold(asked: Asked, answer: Answer) -> Answer:
        """The last file does not come, but for its header."""
        if asked.name == names[-1] and asked.stop > 2**16:
            gone.wait(10 * PROGRAM_TIMEOUT_S)
        return answer

    hub.fault = hold
    join = ("join", "--new-swarm", "--state-dir", str(tmp_path / "state"))
    process = await swarm.launch((*join, *options(tmp_path, "store", "0:2")), tmp_path / "said")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            while len(list(digests.glob("*"))) < len(names) - 1:  # noqa: ASYNC110 - no other sign is given
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            said = await process.stdout.read()
            await process.wait()
    finally:
        gone.set()
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == EXIT_INTERRUPTED
    assert "Leaving before anything was served" in said.decode().splitlines()
    hub.fault = None
    hub.asked.clear()
    await swarm.join("front", *options(tmp_path, "store", "0:2"))
    whole = [
        asked.name
        for asked in hub.asked
        if asked.host == "content" and asked.stop > 2**16 and not asked.start
    ]
    assert whole == names[-1:]


def check_headers_alone(hub: FakeHub) -> None:
    asked = [one for one in hub.asked if one.host == "content" and one.method == "GET"]
    assert asked
    assert all(one.start == 0 and one.stop <= 2**16 for one in asked)


@pytest.mark.full
async def test_a_machine_is_measured_with_a_model_of_which_no_weights_are_fetched(
    swarm: LocalSwarm, hub: FakeHub, tmp_path: Path, anyio_backend: str
) -> None:
    asked = ("profile", "--state-dir", str(tmp_path / "state"), "--model", MODEL, "--json")
    done = await run_forked(asked, tmp_path / "said", swarm.environment)
    assert done.status == 0, done.err
    machine = json.loads(done.out)
    assert machine["layer_ms"]["1"] > 0
    assert (machine["model"], machine["model_hash"]) == (MODEL, None)
    check_headers_alone(hub)


@pytest.mark.full
async def test_a_model_is_emulated_of_which_no_weights_are_fetched(
    swarm: LocalSwarm, hub: FakeHub, tmp_path: Path, anyio_backend: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,generated_tokens\n0,20,5\n")
    line = ("--peers", "2", "--bandwidth-mbps", "1000", "--delay-ms", "1", "--policy", "molink")
    load = ("--rate", "1", "--warm-up", "0", "--duration", "1", "--trace", str(trace))
    arguments = ("emulate", "--compute", "real", *line, *load)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from molink.simnet.cli import main; main()"),
        *(*arguments, "--model", MODEL, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=swarm.environment,
    )
    async with asyncio.timeout(2 * PROGRAM_TIMEOUT_S):
        out, _ = await process.communicate()
    assert process.returncode == 0
    (row,) = json.loads(out)["rows"]
    assert (row["requests"], row["failed"]) == (1, 0)
    check_headers_alone(hub)


@pytest.mark.full
async def test_what_the_hub_has_changed_meanwhile_is_not_mixed_with_what_is_served(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    await swarm.join("front", *options(tmp_path, "front", "0:2"))
    for name in [name for name in hub.files if name.endswith(".safetensors")]:
        hub.files[name] = hub.files[name][:-1] + bytes([hub.files[name][-1] ^ 1])
    with pytest.raises(SwarmUnavailable, match="not those of the model that is served"):
        await swarm.join("back", *options(tmp_path, "back", "2:6"))
    hub.gated = True
    with pytest.raises(SwarmUnavailable, match="accepted its terms"):
        await swarm.join("gated", *options(tmp_path, "gated", "2:6"))
