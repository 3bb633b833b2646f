"""Responses that are kept: requests go on from them by their id, keys have their own, and they end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from support.gateways.gateway_keys import bearer, in_database
from support.swarms.fake_swarm import DEADLINE_S, MODEL, PRIVATE_WORD, FakeSwarm, error_of, gateway

from molink.client.gateway.accounts.api_keys import ApiKey, KeyLimits, KeyScope, key_text
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.errors import UnknownResponse
from molink.client.gateway.accounts.gatekeeper import ANYBODY, Caller
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.apis import kept_responses
from molink.client.gateway.apis.kept_responses import KeptResponses, ResponseTooLong

SAID = "But soft!"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@contextmanager
def keeping(swarm: FakeSwarm, folder: Path) -> Iterator[OpenAI]:
    swarm.keep_hours = 1.0
    with (
        gateway(swarm, accounts=(None, folder)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        yield client


def ask(client: OpenAI, **more: Any) -> Any:  # noqa: ANN401 - of the client's own types
    return client.responses.create(**{"model": MODEL, "input": "Who is there?"} | more)


def messages_of(swarm: FakeSwarm) -> Any:  # noqa: ANN401 - whatever the swarm was asked
    return swarm.calls[-1][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_on_from_a_response(swarm: FakeSwarm, tmp_path: Path, stream: bool) -> None:
    with keeping(swarm, tmp_path) as client:
        first = ask(client, instructions="Be brief.", stream=stream)
        if stream:
            first = next(event for event in first if event.type == "response.completed").response
        assert first.store is True
        second = ask(client, input="And now?", previous_response_id=first.id, instructions="Be long.")
        assert messages_of(swarm) == [
            {"role": "system", "content": "Be long."},
            {"role": "user", "content": "Who is there?"},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": "And now?"},
        ]
        assert second.previous_response_id == first.id
        ask(client, input="Still?", previous_response_id=second.id, store=False)
        assert [message["role"] for message in messages_of(swarm)] == ["user", "assistant"] * 2 + ["user"]


def test_calls_of_tools_are_part_of_the_conversation(swarm: FakeSwarm, tmp_path: Path) -> None:
    swarm.words = (CALL,)
    with keeping(swarm, tmp_path) as client:
        first = ask(client, tools=[WEATHER])
        call = first.output[0]
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        ask(client, input=[answer], previous_response_id=first.id, tools=[WEATHER])
        _, called, answered = messages_of(swarm)
        assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
        assert answered == {"role": "tool", "tool_call_id": call.call_id, "content": "rain"}


def test_it_can_be_read_and_dropped_and_outlives_a_gateway(swarm: FakeSwarm, tmp_path: Path) -> None:
    with keeping(swarm, tmp_path) as client:
        first = ask(client)
    with keeping(swarm, tmp_path) as client:
        assert client.responses.retrieve(first.id).output_text == SAID
        client.responses.delete(first.id)
        for again in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="There is no response"):
                again(first.id)
        with pytest.raises(openai.NotFoundError):
            ask(client, previous_response_id=first.id)


def test_what_is_not_to_be_kept_is_not(swarm: FakeSwarm, tmp_path: Path) -> None:
    with keeping(swarm, tmp_path) as client:
        first = ask(client, store=False, input=PRIVATE_WORD)
        assert first.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    assert not any(PRIVATE_WORD.encode() in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize("more", [{"store": True}, {"previous_response_id": "resp_1"}])
def test_without_being_told_nothing_is_kept_and_that_is_said(
    http: httpx.Client, more: dict[str, object]
) -> None:
    response = http.post("/v1/responses", json={"model": MODEL, "input": "a"} | more)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, next(iter(more)))
    assert http.get("/v1/responses/resp_1").status_code in (404, 405)


def test_a_key_has_its_own(swarm: FakeSwarm, tmp_path: Path) -> None:
    async def make(database: Database) -> list[tuple[ApiKey, str]]:
        store = KeyStore(database)
        return [
            await store.create(name, scopes=frozenset({KeyScope.USE}), limits=KeyLimits())
            for name in ("a", "b")
        ]

    mine, others = (
        key_text(key.id, secret) for key, secret in asyncio.run(in_database(None, tmp_path, make))
    )
    swarm.keep_hours = 1.0
    with gateway(swarm, accounts=(None, tmp_path)) as url, httpx.Client(base_url=url) as http:
        asked = {"model": MODEL, "input": "a"}
        kept = http.post("/v1/responses", json=asked, headers=bearer(mine)).json()["id"]
        assert http.get(f"/v1/responses/{kept}", headers=bearer(mine)).status_code == 200
        assert http.get(f"/v1/responses/{kept}", headers=bearer(others)).status_code == 404
        assert http.delete(f"/v1/responses/{kept}", headers=bearer(others)).status_code == 404
        goes_on = asked | {"previous_response_id": kept}
        assert http.post("/v1/responses", json=goes_on, headers=bearer(others)).status_code == 404
        assert http.post("/v1/responses", json=goes_on, headers=bearer(mine)).status_code == 200


def test_they_end_and_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "MOST_OF_ONE", 3)
    monkeypatch.setattr(kept_responses, "MAX_KEPT_BYTES", 200)

    async def keep(database: Database) -> None:
        kept, gone = KeptResponses(database, 1.0), KeptResponses(database, -1.0)
        await gone.keep(ANYBODY, {"id": "gone"}, [])
        for number in range(5):
            await kept.keep(ANYBODY, {"id": f"r{number}"}, [{"role": "user", "content": str(number)}])
        for name in ("gone", "r0", "r1"):
            with pytest.raises(UnknownResponse):
                await kept.get(ANYBODY, name)
        assert (await kept.get(ANYBODY, "r4")).messages == ({"role": "user", "content": "4"},)
        with pytest.raises(ResponseTooLong):
            await kept.keep(Caller(), {"id": "long"}, [{"content": "a" * 200}])

    asyncio.run(in_database(None, tmp_path, keep))
