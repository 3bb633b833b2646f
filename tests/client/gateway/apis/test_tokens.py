"""Text to token ids and back, ids of requests, streams that wait, and choices of one prompt."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways.gateway_keys import bearer, id_of, make_key
from support.swarms.fake_swarm import CHAT, DEADLINE_S, MODEL, TEXT, FakeSwarm, error_of, gateway

from molink.client.errors import InvalidRequest
from molink.client.gateway import generating
from molink.client.gateway.accounts.api_keys import KeyLimits


def test_a_text_and_a_chat_become_tokens(http: httpx.Client) -> None:
    said = http.post("/tokenize", json={"model": MODEL, "prompt": "But soft what light"}).json()
    assert said == {"count": 4, "max_model_len": 1024, "tokens": [0, 1, 2, 3], "token_strs": None}
    said = http.post("/tokenize", json={"messages": CHAT["messages"], "return_token_strs": True}).json()
    assert said["count"] == 5
    assert said["token_strs"] == ["<0>", "<1>", "<2>", "<3>", "<4>"]
    assert http.post("/detokenize", json={"tokens": [7, 8]}).json() == {"prompt": "<7><8>"}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a" * 500_000}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_question_is_answered_by_the_parameters_name(
    path: str, body: dict[str, Any], parameter: str, refusing: httpx.Client
) -> None:
    answer = refusing.post(path, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == parameter


MESSAGE = CHAT | {"max_tokens": 9}
WITH_TEXT: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", TEXT),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/v1/messages", MESSAGE | {"stream": True}),
    ("/v1/completions", TEXT),
]


def test_texts_take_turns_by_whose_they_are_and_those_of_this_machines_user_by_none(
    swarm: FakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(http: httpx.Client, headers: dict[str, str]) -> set[str]:
        swarm.text_askers.clear()
        for path, body in WITH_TEXT:
            assert http.post(path, json=body, headers=headers).status_code == 200
        assert len(swarm.text_askers) == 5
        return set(swarm.text_askers)

    with gateway(swarm) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        assert asked(http, {}) == {""}
        monkeypatch.setattr("molink.client.gateway.middleware.user_of", lambda _: "203.0.113.7")
        assert asked(http, {}) == {"203.0.113.7"}
    key = make_key(tmp_path)
    with (
        gateway(swarm, accounts=(None, tmp_path)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as http,
    ):
        assert asked(http, bearer(key)) == {f"key {id_of(key)}"}


def test_a_message_that_its_key_does_not_let_in_is_not_counted_first(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    key = make_key(tmp_path, limits=KeyLimits(requests_per_minute=1))
    with (
        gateway(swarm, accounts=(None, tmp_path)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=bearer(key)) as http,
    ):
        statuses = [http.post("/v1/messages", json=MESSAGE | {"stream": True}).status_code for _ in range(2)]
    assert statuses == [200, 429]
    assert len(swarm.text_askers) == 2  # the first one's count, and its generation


def test_a_message_that_cannot_be_counted_keeps_no_place_of_its_key(
    swarm: FakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> tuple[int, ...]:
        raise InvalidRequest("the messages cannot be turned into tokens", "messages")

    key = make_key(tmp_path, limits=KeyLimits(streams=1))
    with (
        gateway(swarm, accounts=(None, tmp_path)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=bearer(key)) as http,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(FakeSwarm, "tokenize_chat", refuse)
            assert http.post("/v1/messages", json=MESSAGE | {"stream": True}).status_code == 400
        assert http.post("/v1/messages", json=MESSAGE | {"stream": True}).status_code == 200


@pytest.mark.parametrize("given", ["abc-1", "x" * 200, "a b", ""])
def test_each_answer_says_which_request_it_is_of(given: str, http: httpx.Client) -> None:
    said = http.get("/healthz", headers={"x-request-id": given}).headers.get_list("x-request-id")
    assert len(said) == 1
    assert (said[0] == given) == (given == "abc-1")
    assert said[0]


def test_a_stream_says_that_it_goes_on_before_its_first_token(
    http: httpx.Client, swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "OPENS_AFTER_S", 0.0)
    monkeypatch.setattr(generating, "LOOKS_EVERY_S", 0.01)
    swarm.hangs_at = 0
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == [": waiting", "", ": waiting"]
    assert swarm.ended.acquire(timeout=DEADLINE_S)


@pytest.mark.parametrize(("words", "shares"), [(10, False), (200, True)])
def test_choices_of_a_long_prompt_share_it_and_those_of_another_prompt_do_not(
    words: int, shares: bool, http: httpx.Client, swarm: FakeSwarm
) -> None:
    prompts = ["word " * words, "other " * words]
    body = {"model": MODEL, "prompt": prompts, "n": 3}
    assert len(http.post("/v1/completions", json=body).json()["choices"]) == 6
    shared = {prompt: set[object]() for prompt in prompts}
    for (prompt, _), hints in zip(swarm.calls, swarm.hints, strict=True):
        shared[prompt].add(hints.get("shared_prompt"))
    if not shares:
        assert all(those == {None} for those in shared.values())
        return
    first, second = shared.values()
    assert (len(first), len(second), first & second, None in first | second) == (1, 1, set(), False)
    body = CHAT | {"messages": [{"role": "user", "content": "word " * words}], "n": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    (chat,) = {hints.get("shared_prompt") for hints in swarm.hints[6:]}
    assert chat is not None
