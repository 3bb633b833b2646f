"""One gateway serves all models of a swarm: each is opened when it is first asked for, once, over one connection."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from support.swarms.fake_swarm import DEADLINE_S, MODEL, SPEC, FakeSwarm, error_of, gateway

from molink.client.errors import ModelNotFound, SwarmUnavailable
from molink.client.gateway.accounts.api_keys import ApiKey, KeyLimits
from molink.client.gateway.accounts.errors import NotPermitted
from molink.client.gateway.accounts.gatekeeper import ANYBODY, Caller
from molink.client.gateway.models.opened_models import MOST_OPEN
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.slots import GatewayBusy

OTHER = "somebody/other-model"
OTHER_SPEC = replace(SPEC, name=OTHER, model_hash="ef" * 32, context_length=512)


def other_model(number: int = 0) -> FakeSwarm:
    name = OTHER if not number else f"{OTHER}-{number}"
    return FakeSwarm(
        words=("Other",), model=replace(OTHER_SPEC, name=name, model_hash=f"{0xEF - number:02x}" * 32)
    )


@pytest.fixture
def swarm() -> FakeSwarm:
    aliases = {"gpt-4o": MODEL, "small": OTHER, "gone": "nobody/nothing"}
    return FakeSwarm(others=[other_model()], aliases=aliases)


@pytest.fixture
def http(swarm: FakeSwarm) -> Iterator[httpx.Client]:
    with gateway(swarm) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


def complete(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "a"})


@pytest.mark.parametrize(
    ("asked", "text", "named"),
    [
        (MODEL, "But soft!", MODEL),
        ("gpt-4o", "But soft!", MODEL),
        (SPEC.model_hash, "But soft!", MODEL),
        (OTHER, "Other", OTHER),
        ("small", "Other", OTHER),
        (OTHER_SPEC.model_hash, "Other", OTHER),
    ],
)
def test_a_model_answers_to_its_name_its_hash_and_its_aliases(
    asked: str, text: str, named: str, http: httpx.Client
) -> None:
    answer = complete(http, asked).json()
    assert (answer["choices"][0]["text"], answer["model"]) == (text, named)


def test_models_are_listed_with_their_aliases_and_what_is_known_of_them(http: httpx.Client) -> None:
    def listed() -> dict[str, int | None]:
        return {one["id"]: one["context_length"] for one in http.get("/v1/models").json()["data"]}

    assert listed() == {MODEL: 1024, "gpt-4o": 1024, OTHER: None, "small": None}
    complete(http, OTHER)
    assert listed() == {MODEL: 1024, "gpt-4o": 1024, OTHER: 512, "small": 512}
    assert http.get(f"/v1/models/{OTHER}").json()["id"] == OTHER


def test_a_model_is_opened_once(http: httpx.Client, swarm: FakeSwarm) -> None:
    for _ in range(3):
        complete(http, OTHER)
        assert http.post("/tokenize", json={"model": OTHER, "prompt": "a b"}).json()["max_model_len"] == 512
    assert swarm.opened == [OTHER_SPEC.model_hash]


@pytest.mark.parametrize("asked", ["gpt-4", "gone", "", "ef" * 4])
def test_a_model_that_nobody_serves_is_named_with_those_that_are(asked: str, http: httpx.Client) -> None:
    answer = complete(http, asked)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"
    assert f"this gateway serves {MODEL}, {OTHER}" in error_of(answer)["message"]


def namesake(of: str, number: int) -> FakeSwarm:
    """Another model that is announced under that name."""
    return FakeSwarm(
        words=(f"namesake {number}",), model=replace(SPEC, name=of, model_hash=f"0{number}" * 32)
    )


def test_a_name_means_the_likeliest_model_of_it_and_others_are_reached_by_their_hashes() -> None:
    swarm = FakeSwarm(others=[namesake(MODEL, 1), other_model(), namesake(OTHER, 2)])
    with gateway(swarm) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        listed = [(one["id"], one["model_hash"]) for one in http.get("/v1/models").json()["data"]]
        assert listed == [
            (MODEL, SPEC.model_hash),
            ("01" * 32, "01" * 32),
            (OTHER, OTHER_SPEC.model_hash),
            ("02" * 32, "02" * 32),
        ]
        asked = (MODEL, "01" * 32, OTHER, "02" * 32)
        assert [complete(http, model).json()["choices"][0]["text"] for model in asked] == [
            "But soft!",
            "namesake 1",
            "Other",
            "namesake 2",
        ]


def test_whatever_is_listed_is_described_and_answers_by_its_id_and_its_hash() -> None:
    """Also where a stranger's model has the name that is another one's alias."""
    swarm = FakeSwarm(
        others=[namesake(MODEL, 1), namesake("small", 2), other_model()], aliases={"small": OTHER}
    )
    with gateway(swarm) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        listed = http.get("/v1/models").json()["data"]
        assert {one["model_hash"] for one in listed} == {
            one.model.model_hash for one in (swarm, *swarm.others)
        }
        texts: dict[str, set[str]] = {}
        for one in listed:
            assert http.get(f"/v1/models/{one['id']}").json()["id"] == one["id"]
            for asked in (one["id"], one["model_hash"]):
                about = http.get(f"/v1/models/{asked}").json()
                assert about["model_hash"] == one["model_hash"]
                answer = complete(http, asked).json()["choices"][0]["text"]
                texts.setdefault(one["model_hash"], set()).add(answer)
        assert sorted(map(len, texts.values())) == [1] * len(texts)
        assert len(set.union(*texts.values())) == len(texts)
        assert error_of(http.get(f"/v1/models/{'03' * 32}"))["code"] == "model_not_found"


def test_a_key_for_one_of_two_models_of_a_name_asks_for_that_one_by_it() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model(), namesake(OTHER, 1), namesake(MODEL, 2)])
        limits = KeyLimits(models=("01" * 32, "02" * 32))
        key = ApiKey(
            id="a", name="a", digest=b"", scopes=frozenset(), limits=limits, quota_id="a", created_at_s=0.0
        )
        limited = Caller(key)
        async with ServedModels(swarm, others=True) as models:
            listed = {one["id"]: one["model_hash"] for one in await models.listed(limited)}
            assert listed == {OTHER: "01" * 32, MODEL: "02" * 32}
            for name, model_hash in listed.items():
                assert (await models.get(name, limited)).model.model_hash == model_hash
            with pytest.raises(NotPermitted):
                await models.get(OTHER_SPEC.model_hash, limited)

    asyncio.run(asked())


def test_a_gateway_of_one_model_serves_that_one() -> None:
    async def asked() -> None:
        async with ServedModels(FakeSwarm(others=[other_model()])) as models:
            assert [one["id"] for one in await models.listed(ANYBODY)] == [MODEL]
            with pytest.raises(ModelNotFound, match="serves"):
                await models.get(OTHER, ANYBODY)

    asyncio.run(asked())


def test_a_model_that_could_not_be_opened_is_tried_again() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model()], error=SwarmUnavailable("nobody hands it out"))
        async with ServedModels(swarm, others=True) as models:
            for _ in range(2):
                with pytest.raises(SwarmUnavailable):
                    await models.get(OTHER, ANYBODY)
            swarm.error = None
            assert (await models.get(OTHER, ANYBODY)).model.name == OTHER
            assert len(swarm.opened) == 3

    asyncio.run(asked())


def test_who_leaves_while_a_model_is_opened_takes_it_from_nobody() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model()])
        async with ServedModels(swarm, others=True) as models:
            first = asyncio.create_task(models.get(OTHER, ANYBODY))
            second = asyncio.create_task(models.get(OTHER, ANYBODY))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).model.name == OTHER
            assert len(swarm.opened) == 1

    asyncio.run(asked())


async def ask(models: ServedModels, one: FakeSwarm) -> None:
    """As a request does: in a task of its own."""
    assert (await asyncio.create_task(models.get(one.model.name, ANYBODY))).model == one.model


def test_so_many_models_are_used_at_once_and_no_more() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model(number) for number in range(MOST_OPEN + 1)])
        async with ServedModels(swarm, others=True) as models:
            for one in swarm.others[:MOST_OPEN]:
                await models.get(one.model.name, ANYBODY)
            with pytest.raises(GatewayBusy, match="Ask for one of them"):
                await models.get(swarm.others[-1].model.name, ANYBODY)
            await models.get(swarm.others[0].model.name, ANYBODY)
            assert swarm.closed == []
        assert sorted(swarm.closed) == sorted(swarm.opened)

    asyncio.run(asked())


def test_the_model_that_was_unused_longest_makes_way_for_another_one() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model(number) for number in range(MOST_OPEN + 1)])
        first, second, *_, last = swarm.others
        async with ServedModels(swarm, others=True) as models:
            for one in swarm.others[:MOST_OPEN]:
                await ask(models, one)
            await ask(models, first)
            await ask(models, last)
            assert swarm.closed == [second.model.model_hash]
            await ask(models, first)
            assert swarm.opened.count(first.model.model_hash) == 1
            await ask(models, second)
            assert swarm.opened.count(second.model.model_hash) == 2

    asyncio.run(asked())


def test_models_that_no_peer_serves_any_more_make_way_first() -> None:
    async def asked() -> None:
        swarm = FakeSwarm(others=[other_model(number) for number in range(MOST_OPEN)])
        async with ServedModels(swarm, others=True) as models:
            for one in swarm.others:
                await ask(models, one)
            gone = swarm.others.pop()
            swarm.others.append(other_model(MOST_OPEN))
            await ask(models, swarm.others[-1])
            assert swarm.closed == [gone.model.model_hash]

    asyncio.run(asked())


def test_a_model_with_a_generation_under_way_makes_way_for_none() -> None:
    swarm = FakeSwarm(others=[other_model(number) for number in range(MOST_OPEN + 2)])
    used, *others = swarm.others
    used.words, used.hangs_at = ("Other", "never"), 1
    streamed = {"model": OTHER, "prompt": "a", "stream": True}
    with (
        gateway(swarm) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as http,
        http.stream("POST", "/v1/completions", json=streamed) as stream,
    ):
        lines = stream.iter_lines()  # which would close the stream if nobody held it
        assert next(lines)
        for one in others:
            assert complete(http, one.model.name).status_code == 200
        assert swarm.closed == [one.model.model_hash for one in others[:2]]
