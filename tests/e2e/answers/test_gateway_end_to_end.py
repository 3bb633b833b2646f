"""The official OpenAI client against a gateway process and a swarm of peers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.gateways.forked_gateway import ForkedLocalGateway
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.api.event_streams import whole
from molink.client.api.generation import CircuitReport
from molink.client.api.running_sessions import REQUEST_TAG
from molink.client.api.swarm import AsyncSwarm
from molink.client.epochs.shared_prompt import SharedPrompt
from molink.client.local.local_swarm import LocalSwarm
from molink.shards.spec import SamplingParams
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import snapshot_setup
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.population.snapshot_file import parse_snapshot
from molink.simnet.swarm.settings import SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

pytestmark = [pytest.mark.real, pytest.mark.anyio]

STARTED_WITHIN_S = 120.0
PROMPT = "ROMEO:"
NEW_TOKENS = 24
MESSAGES = [{"role": "user", "content": "What light through yonder window breaks?"}]


@pytest.fixture(scope="module")
async def client(
    wide_swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Peers, one `molink-gateway`, and whoever knows nothing but its address."""
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from molink.client.gateway.cli import main; main()",
        "--port", "0", "--initial-peers", wide_swarm.addresses[0],
        "--state-dir", str(tmp_path_factory.mktemp("gateway")),
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
        creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0,
    )  # fmt: skip
    assert gateway.stdout is not None
    try:
        async with asyncio.timeout(STARTED_WITHIN_S):
            line = (await gateway.stdout.readline()).decode()
        assert line.startswith("Listening on http://127.0.0.1:"), line
        async with openai.AsyncOpenAI(
            base_url=f"{line.split()[-1]}/v1", api_key="any", max_retries=0, timeout=STARTED_WITHIN_S
        ) as client:
            yield client
        gateway.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)
        async with asyncio.timeout(STARTED_WITHIN_S):
            assert await gateway.wait() == 0
    finally:
        if gateway.returncode is None:
            gateway.kill()
            await gateway.wait()


def places(circuit: CircuitReport) -> list[tuple[str, int, int]]:
    """Who computes which layers."""
    return [(hop.peer_id, hop.start, hop.stop) for hop in circuit.hops]


def expected_text(references: References, prompt: tuple[int, ...], tokens: int) -> str:
    return references.text(bundled_folder(), references.greedy(bundled_folder(), prompt, tokens))


@pytest.mark.full
async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == [BUNDLED]


@pytest.mark.full
async def test_a_completion_is_the_text_of_transformers(
    client: openai.AsyncOpenAI, references: References
) -> None:
    prompt = references.ids(bundled_folder(), PROMPT)
    answer = await client.completions.create(
        model=BUNDLED, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0
    )
    assert answer.choices[0].text == expected_text(references, prompt, NEW_TOKENS)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), NEW_TOKENS)


@pytest.mark.full
async def test_a_streamed_completion_is_the_same_text(
    client: openai.AsyncOpenAI, references: References
) -> None:
    pieces = [
        chunk.choices[0].text
        async for chunk in await client.completions.create(
            model=BUNDLED, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0, stream=True
        )
        if chunk.choices
    ]
    prompt = references.ids(bundled_folder(), PROMPT)
    assert "".join(pieces) == expected_text(references, prompt, NEW_TOKENS)
    assert len(pieces) > 3


@pytest.mark.full
async def test_64_streams_at_once_are_whole_and_none_is_anothers(
    client: openai.AsyncOpenAI, references: References
) -> None:
    folder = bundled_folder()
    prompts = [references.ids(folder, f"{PROMPT} {number}, my lord?\n") for number in range(64)]

    async def streamed(prompt: tuple[int, ...]) -> str:
        answer = await client.completions.create(
            model=BUNDLED, prompt=list(prompt), max_tokens=NEW_TOKENS, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in answer if chunk.choices])

    texts = await asyncio.gather(*map(streamed, prompts))
    assert texts == [expected_text(references, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.full
async def test_texts_are_scored_as_harnesses_for_evaluation_ask_for_it(
    client: openai.AsyncOpenAI, references: References
) -> None:
    """`echo` with `logprobs` of several prompts of token ids, with a token behind them or none."""
    folder = bundled_folder()
    prompts = [references.ids(folder, text) for text in ("What light through", "yonder window breaks?")]
    for max_tokens in (0, 1):
        answer = await client.completions.create(
            model=BUNDLED, prompt=[list(ids) for ids in prompts], max_tokens=max_tokens,
            temperature=0, logprobs=1, echo=True,
        )  # fmt: skip
        for choice, ids in zip(answer.choices, prompts, strict=True):
            told, expected = choice.logprobs, references.logprobs(folder, ids)
            assert told is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            scores = [float(row[token]) for row, token in zip(expected, ids[1:], strict=True)]
            assert told.token_logprobs[0] is None
            assert told.token_logprobs[1 : len(ids)] == pytest.approx(scores, abs=1e-4)
            assert len(told.token_logprobs) == len(ids) + max_tokens
            for top, row in zip(told.top_logprobs[1 : len(ids)], expected, strict=True):
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * max_tokens


@pytest.mark.portable
async def test_a_chat_streams_what_it_answers_at_once(
    client: openai.AsyncOpenAI, references: References
) -> None:
    whole = await client.chat.completions.create(
        model=BUNDLED, messages=MESSAGES, max_tokens=NEW_TOKENS, temperature=0
    )
    pieces = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(
            model=BUNDLED, messages=MESSAGES, max_tokens=NEW_TOKENS, temperature=0, stream=True
        )
        if chunk.choices
    ]
    prompt = references.chat_ids(bundled_folder(), MESSAGES)
    assert whole.choices[0].message.content == expected_text(references, prompt, NEW_TOKENS)
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.full
async def test_all_chat_apis_have_the_same_answer_and_a_prompt_asked_again_is_not_computed(
    client: openai.AsyncOpenAI, references: References
) -> None:
    ids = references.chat_ids(bundled_folder(), MESSAGES)
    text = expected_text(references, ids, NEW_TOKENS)
    response = await client.responses.create(
        model=BUNDLED, input=MESSAGES[0]["content"], max_output_tokens=NEW_TOKENS, temperature=0
    )
    assert response.output_text == text
    async with anthropic.AsyncAnthropic(
        base_url=str(client.base_url).removesuffix("/v1/"),
        api_key="any",
        max_retries=0,
        timeout=STARTED_WITHIN_S,
    ) as other:
        counted = await other.messages.count_tokens(model=BUNDLED, messages=MESSAGES)  # type: ignore[arg-type]
        assert counted.input_tokens == len(ids)
        async with other.messages.stream(
            model=BUNDLED,
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=NEW_TOKENS,
            extra_body={"temperature": 0},
        ) as stream:
            message = await stream.get_final_message()
    assert "".join(block.text for block in message.content if block.type == "text") == text
    cached = message.usage.cache_read_input_tokens or 0
    assert 0 < cached < len(ids)
    assert cached % 16 == 0
    assert message.usage.input_tokens + cached == len(ids)


@pytest.mark.full
async def test_choices_of_a_long_prompt_compute_it_once_on_one_circuit(
    wide_swarm: LocalSwarm, references: References
) -> None:
    prompt = references.ids(bundled_folder(), "What is in a name? " * 200)[:600]
    async with AsyncSwarm(BUNDLED, initial_peers=wide_swarm.addresses[:1]) as swarm:
        shared = SharedPrompt()
        choices = [
            swarm.stream_events(
                prompt, params=SamplingParams(max_new_tokens=4, seed=seed), shared_prompt=shared
            )
            for seed in range(4)
        ]
        first, *others = await asyncio.gather(*map(whole, choices))
    assert first.cached_tokens == 0
    for other in others:
        assert other.cached_tokens == (len(prompt) - 1) // 16 * 16
        assert places(other.circuit) == places(first.circuit)
        assert other.token_ids == first.token_ids


@pytest.mark.full
async def test_tools_are_refused_where_the_template_has_no_place_for_them(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template has no place"):
        await client.chat.completions.create(
            model=BUNDLED,
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "weather"}}],
        )


@pytest.mark.full
async def test_a_wrong_request_is_an_error_of_the_client_library(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1023 at most"):
        await client.completions.create(model=BUNDLED, prompt="word " * 5000, max_tokens=4)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nobody/nothing", prompt="a", max_tokens=4)


@pytest.mark.full
async def test_what_the_gateway_tells_of_the_swarm_can_be_simulated(
    client: openai.AsyncOpenAI, wide_swarm: LocalSwarm
) -> None:
    document = await client.get("/swarm", cast_to=httpx.Response)
    live = parse_snapshot(document.text, "overview", QWEN2_7B)
    assert {name.split("\n")[1] for name in live.names.values()} == {one.peer_id for one in wide_swarm.peers}
    for one in live.volunteers:
        assert len(one.facts.layer_latencies) > 1
        assert one.facts.prefill_latencies
        assert one.facts.coordinate is not None
    settings = SwarmSettings(len(live.volunteers), duration_s=10.0, gateways=1)
    world = SwarmWorld(snapshot_setup(settings, live, (TraceRequest(0.0, 20, 10),)), settings)
    world.run()
    assert world.accounts.ended
    assert all(one.outcome is SessionOutcome.COMPLETED for one in world.accounts.ended)


@pytest.mark.full
async def test_the_circuit_of_a_running_generation_is_shown_with_its_times_and_none_of_its_text(
    wide_client: AsyncSwarm,
) -> None:
    wide_client.time_hops(wanted=True)
    REQUEST_TAG.set("mine")
    before = {peer["peer_id"]: peer["tokens_served"] for peer in (await wide_client.snapshot())["peers"]}
    seen: list[dict[str, Any]] = []
    async with aclosing(
        wide_client.stream_events(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    ) as pieces:
        async for _ in pieces:
            seen += [one for one in wide_client.circuits() if one["tag"] == "mine"]
    (ended,) = [one for one in wide_client.circuits() if one["tag"] == "mine"]
    wide_client.time_hops(wanted=False)

    assert {one["phase"] for one in seen} == {"decode"}
    assert [one["tokens"] for one in seen] == sorted(one["tokens"] for one in seen)
    assert (ended["phase"], ended["tokens"], ended["losses"]) == ("ended", NEW_TOKENS, 0)
    assert (ended["hops"][0]["start"], ended["hops"][-1]["stop"]) == (0, 12)
    assert ended["ttft_ms"] > 0
    assert ended["tpot_ms"] > 0
    assert all(hop["compute_ms"] > 0 and hop["first_compute_ms"] > 0 for hop in ended["hops"])
    assert "ROMEO" not in str(seen)
    after = {peer["peer_id"]: peer["tokens_served"] for peer in (await wide_client.snapshot())["peers"]}
    for hop in ended["hops"]:
        assert after[hop["peer_id"]] >= before[hop["peer_id"]] + NEW_TOKENS


@pytest.mark.full
async def test_the_last_peers_goodbye_makes_a_gateway_unready(tmp_path: Path) -> None:
    async with ForkedSwarm() as swarm:
        last = await swarm.join("last", "--model", BUNDLED, "--memory", "600MB")
        async with (
            ForkedLocalGateway(swarm.addresses, tmp_path / "log") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=STARTED_WITHIN_S) as http,
        ):
            assert (await http.get("/readyz")).status_code == 200
            await swarm.stop(last)
            async with asyncio.timeout(STARTED_WITHIN_S):
                while (await http.get("/readyz")).status_code == 200:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.05)
            state = (await http.get("/v1/swarm")).json()
            assert (state["ready"], state["circuits"]) == (False, [])
            async with asyncio.timeout(STARTED_WITHIN_S):
                answer = await http.post("/v1/completions", json={"model": BUNDLED, "prompt": PROMPT})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "swarm_unavailable")
            assert last.peer_id not in answer.text
            assert "127.0.0.1" not in answer.text


@pytest.mark.full
async def test_the_goodbye_of_the_only_holder_of_a_span_does_so_too(tmp_path: Path) -> None:
    async with ForkedSwarm() as swarm:
        await swarm.join("stays", "--model", BUNDLED, "--layers", "0:6")
        only = await swarm.join("only", "--model", BUNDLED, "--layers", "6:12")
        async with (
            ForkedLocalGateway(swarm.addresses[:1], tmp_path / "log") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=STARTED_WITHIN_S) as http,
        ):
            asked = {"model": BUNDLED, "prompt": PROMPT, "max_tokens": 2}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200
            await swarm.stop(only)
            async with asyncio.timeout(STARTED_WITHIN_S):
                while (answer := await http.get("/readyz")).status_code == 200:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            assert answer.json()["error"]["code"] == "not_ready"
