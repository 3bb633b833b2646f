"""Services over a scripted swarm: deployed, used by their names, watched, scaled, deleted; what is refused, and why."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from support.gateways.eventually import eventually
from support.gateways.gateway_keys import bearer, make_key
from support.swarms.fake_swarm import DEADLINE_S, MODEL, SPEC, FakeSwarm, error_of, gateway

from molink.client.errors import SwarmUnavailable
from molink.client.gateway.accounts.api_keys import KeyScope

SERVICES = "/admin/v1/services"
OPERATIONS = "/admin/v1/operations"
OPERATE = frozenset({KeyScope.OPERATE})
ASKED: dict[str, Any] = {"name": "poet", "model": MODEL}


@contextmanager
def serving(swarm: FakeSwarm, folder: Path, waiting_s: float = 5.0, **headers: str) -> Iterator[httpx.Client]:
    with (
        gateway(swarm, waiting_s=waiting_s, accounts=(None, folder)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers) as client,
    ):
        yield client


@pytest.fixture
def http(swarm: FakeSwarm, tmp_path: Path) -> Iterator[httpx.Client]:
    with serving(swarm, tmp_path) as client:
        yield client


def deploy(http: httpx.Client, **changes: object) -> dict[str, Any]:
    """The operation, once it has ended."""
    answer = http.post(SERVICES, json=ASKED | changes)
    assert answer.status_code == 202, answer.text
    return ended(http, answer.json()["operation"]["id"])


def ended(http: httpx.Client, operation_id: str) -> dict[str, Any]:
    """How an operation has ended, as its stream says last."""
    events = list(events_of(http, operation_id))
    assert [name for name, _ in events[:-1]] == ["progress"] * (len(events) - 1)
    assert events[-1][0] == "end"
    return events[-1][1]


def events_of(http: httpx.Client, operation_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    with http.stream("GET", f"{OPERATIONS}/{operation_id}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            kind, _, text = line.partition(": ")
            if kind == "event":
                name = text
            elif kind == "data":
                yield name, json.loads(text)


def status(http: httpx.Client, name: str = "poet") -> dict[str, Any]:
    answer = http.get(f"{SERVICES}/{name}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def until(http: httpx.Client, **wanted: object) -> dict[str, Any]:
    """The status, once it says so."""
    now: dict[str, Any] = {}

    def holds() -> bool:
        now.update(status(http))
        return all(now.get(name) == value for name, value in wanted.items())

    eventually(holds)
    return now


def complete(http: httpx.Client, model: str = "poet", **more: object) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "a", **more})


@contextmanager
def generating(http: httpx.Client) -> Iterator[None]:
    """A stream that has begun; it ends with the context."""
    asked = {"model": "poet", "prompt": "a", "stream": True}
    with http.stream("POST", "/v1/completions", json=asked) as stream:
        lines = stream.iter_lines()  # which would close the stream if nobody held it
        assert next(lines)
        yield


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "a", "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}),
    ],
)
def test_more_choices_than_a_service_has_circuits_are_refused_before_one_begins(
    path: str, asked: dict[str, object], swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path, DEADLINE_S) as http:
        deploy(http, resources={"minimum_circuits": 1, "maximum_circuits": 2})
        refused = http.post(path, json={"model": "poet", **asked})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "n")
        assert "has 2 circuits at most" in error_of(refused)["message"]
        assert swarm.calls == []
        assert len(complete(http, n=2).json()["choices"]) == 2


def test_a_service_is_deployed_used_and_deleted(http: httpx.Client, swarm: FakeSwarm) -> None:
    operation = deploy(http, resources={"minimum_circuits": 2, "maximum_circuits": 3})
    assert (operation["state"], operation["progress"], operation["subject"]) == ("succeeded", 1.0, "poet")
    assert swarm.held.count == 2
    now = until(http, state="running", held=2)
    assert (now["model"], now["model_hash"], now["in_use"]) == (MODEL, SPEC.model_hash, 0)
    assert now["uptime_s"] >= 0
    assert [one["name"] for one in http.get(SERVICES).json()["data"]] == ["poet"]
    answer = complete(http).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("poet", "But soft!")
    listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert listed["poet"] == listed[MODEL] | {"id": "poet"}
    counted = until(http, requests=1, generated_tokens=3)
    assert counted["utilisation"] == 0
    gone = ended(http, http.delete(f"{SERVICES}/poet").json()["operation"]["id"])
    assert (gone["kind"], gone["state"]) == ("delete", "succeeded")
    assert swarm.held.count == 0
    assert http.get(f"{SERVICES}/poet").status_code == 404
    eventually(lambda: complete(http).status_code == 404)


def test_a_service_answers_by_its_own_parameters_where_a_request_says_nothing(
    http: httpx.Client, swarm: FakeSwarm
) -> None:
    deploy(http, parameters={"temperature": 0.25, "max_tokens": 7, "top_k": 5, "stop": ["!"]})
    complete(http)
    complete(http, temperature=1.5, max_tokens=3, stop=None)
    chat = {"model": "poet", "messages": [{"role": "user", "content": "a"}]}
    http.post("/v1/chat/completions", json=chat)
    http.post("/v1/chat/completions", json=chat | {"max_completion_tokens": 4})
    http.post("/v1/responses", json={"model": "poet", "input": "a"})
    http.post("/v1/messages", json=chat | {"max_tokens": 9})
    drawn = [
        (params.temperature, params.max_new_tokens, params.top_k, params.stop) for _, params in swarm.calls
    ]
    assert drawn == [
        (0.25, 7, 5, ("!",)),
        (1.5, 3, 5, ()),
        (0.25, 7, 5, ("!",)),
        (0.25, 4, 5, ("!",)),
        (0.25, 7, 0, ()),
        (0.25, 9, 5, ()),
    ]
    complete(http, model=MODEL)
    assert swarm.calls[-1][1].temperature == 1.0


def test_a_service_has_no_more_generations_at_once_than_its_maximum_and_scales_to_what_is_needed(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path, DEADLINE_S) as http:
        deploy(http, resources={"minimum_circuits": 1, "maximum_circuits": 2})
        swarm.hangs_at = 2
        with ThreadPoolExecutor(1) as users, generating(http), generating(http):
            now = until(http, in_use=2, waiting=0)
            assert now["utilisation"] == 1.0
            third = users.submit(complete, http)
            until(http, waiting=1)
            swarm.hangs_at = None
        assert third.result(DEADLINE_S).status_code == 200
        until(http, in_use=0, held=2)


def test_who_has_waited_for_a_place_in_vain_is_told_when_to_come_back(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path, 0.1) as http:
        deploy(http, resources={"minimum_circuits": 1, "maximum_circuits": 1})
        swarm.hangs_at = 2
        with generating(http):
            until(http, in_use=1)
            refused = complete(http)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


def test_a_preview_says_what_is_missing_and_nothing_is_held(http: httpx.Client, swarm: FakeSwarm) -> None:
    swarm.room = 1
    asked = ASKED | {"resources": {"minimum_circuits": 2}}
    routing = http.post(f"{SERVICES}/preview", json=asked).json()["routing"]
    assert (routing["possible"], routing["missing_bytes"], len(routing["circuits"])) == (False, 4096, 1)
    refused = http.post(SERVICES, json=asked)
    assert refused.status_code == 503
    assert "4096 bytes are missing" in error_of(refused)["message"]
    assert (http.get(SERVICES).json()["data"], swarm.held.most) == ([], 0)
    assert http.post(f"{SERVICES}/preview", json=ASKED).json()["routing"]["possible"]


def test_a_deployment_that_fails_leaves_nothing(http: httpx.Client, swarm: FakeSwarm) -> None:
    swarm.held.error = SwarmUnavailable("peer 12D3 has no room")
    operation = deploy(http)
    assert operation["state"] == "failed"
    assert "has no room" in operation["message"]
    assert http.get(f"{SERVICES}/poet").status_code == 404
    swarm.held.error = None
    assert deploy(http)["state"] == "succeeded"


def test_a_deployment_tells_how_far_it_is_and_can_be_cancelled(http: httpx.Client, swarm: FakeSwarm) -> None:
    swarm.held.may_stand.clear()
    begun = http.post(SERVICES, json=ASKED).json()["operation"]
    assert begun["state"] == "running"
    events = events_of(http, begun["id"])
    told = next(event for _, event in events if "loads its layers" in event["message"])
    assert told["progress"] < 1
    assert status(http)["state"] == "deploying"
    refused = complete(http)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "service_not_ready")
    assert http.delete(f"{OPERATIONS}/{begun['id']}").status_code == 202
    assert [event["state"] for name, event in events if name == "end"] == ["cancelled"]
    swarm.held.may_stand.set()
    assert http.get(f"{SERVICES}/poet").status_code == 404
    assert http.delete(f"{OPERATIONS}/{begun['id']}").json()["state"] == "cancelled"


def test_what_is_deleted_while_it_is_deployed_is_gone(http: httpx.Client, swarm: FakeSwarm) -> None:
    swarm.held.may_stand.clear()
    begun = http.post(SERVICES, json=ASKED).json()["operation"]
    deleted = http.delete(f"{SERVICES}/poet").json()["operation"]
    swarm.held.may_stand.set()
    assert ended(http, deleted["id"])["state"] == "succeeded"
    assert ended(http, begun["id"])["state"] == "cancelled"
    assert http.get(f"{SERVICES}/poet").status_code == 404


def test_a_deletion_waits_for_what_is_under_way_and_can_be_cancelled_meanwhile(
    http: httpx.Client, swarm: FakeSwarm
) -> None:
    deploy(http)
    swarm.hangs_at = 2
    with generating(http):
        until(http, in_use=1)
        begun = http.delete(f"{SERVICES}/poet").json()["operation"]
        assert http.delete(f"{SERVICES}/poet").json()["operation"]["id"] == begun["id"]
        until(http, state="deleting")
        assert complete(http).status_code in (404, 503)
        http.delete(f"{OPERATIONS}/{begun['id']}")
        assert ended(http, begun["id"])["state"] == "cancelled"
        until(http, state="running", in_use=1)
    swarm.hangs_at = None
    assert complete(http).status_code == 200


@pytest.mark.parametrize("state", ["deploying", "running", "deleting"])
def test_a_gateway_that_starts_again_goes_on_with_what_it_finds(
    state: str, swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path) as http:
        if state == "deploying":
            swarm.held.may_stand.clear()
            begun = http.post(SERVICES, json=ASKED).json()["operation"]
        else:
            deploy(http)
        if state == "deleting":
            swarm.hangs_at = 2
            with generating(http):
                until(http, in_use=1)
                begun = http.delete(f"{SERVICES}/poet").json()["operation"]
                swarm.hangs_at = None
    swarm.held.may_stand.set()
    again = FakeSwarm()
    with serving(again, tmp_path) as http:
        if state == "running":
            until(http, state="running", held=1)
            assert complete(http).status_code == 200
            return
        outcome = ended(http, begun["id"])
        assert outcome["state"] == "succeeded"
        there = http.get(f"{SERVICES}/poet").status_code == 200
        assert there is (state == "deploying")
        assert again.held.count == (1 if there else 0)


@pytest.mark.full
def test_another_gateway_on_the_database_serves_a_service_too_and_takes_over_what_its_holder_leaves(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    other = FakeSwarm(gateway_id="another gateway")
    with serving(other, tmp_path) as second:
        with serving(swarm, tmp_path) as first:
            deploy(first)
            answers: list[httpx.Response] = []

            def is_known() -> bool:
                answers.append(complete(second))
                return answers[-1].status_code not in (404, 503)

            eventually(is_known)
            assert answers[-1].json()["choices"][0]["text"] == "But soft!"
            until(second, requests=1, generated_tokens=3)
            assert (swarm.held.count, other.held.count) == (1, 0)
        until(second, state="running", held=1)
        assert (swarm.held.count, other.held.count) == (0, 1)
        ended(second, second.delete(f"{SERVICES}/poet").json()["operation"]["id"])
        assert other.held.count == 0


@pytest.mark.full
def test_two_gateways_together_have_no_more_circuits_of_a_service_than_its_maximum(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    other = FakeSwarm(gateway_id="another gateway")
    swarm.hangs_at = other.hangs_at = 2
    with serving(other, tmp_path, 3.0) as second, serving(swarm, tmp_path) as first:
        deploy(first, resources={"minimum_circuits": 2, "maximum_circuits": 3})
        eventually(lambda: second.get("/v1/models/poet").status_code == 200)
        with ExitStack() as generations:
            for _ in range(3):
                generations.enter_context(generating(second))
            assert (swarm.held.count, other.held.count) == (0, 0)
            assert until(first, in_use=3, held=0)["utilisation"] == 1.0
            for gateway_ in (first, second):
                refused = complete(gateway_)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        swarm.hangs_at = other.hangs_at = None
        until(first, in_use=0, held=2)
        assert (complete(first).status_code, complete(second).status_code) == (200, 200)


def test_a_key_opens_its_service_alone_and_older_ones_end(swarm: FakeSwarm, tmp_path: Path) -> None:
    operator = make_key(tmp_path, scopes=OPERATE)
    with serving(swarm, tmp_path, **bearer(operator)) as http:
        deploy(http)
        first, second = (
            http.post(f"{SERVICES}/poet/keys", json={"overlap_s": overlap_s}).json()["key"]
            for overlap_s in (86_400, 0)
        )
        user = OpenAI(base_url=f"{http.base_url}/v1", api_key=second, max_retries=0)
        answer = user.completions.create(model="poet", prompt="a")
        assert (answer.choices[0].text, answer.model) == ("But soft!", "poet")
        assert [model.id for model in user.models.list()] == ["poet"]
        for model, expected in ((MODEL, 403), (SPEC.model_hash, 403)):
            refused = http.post(
                "/v1/completions", json={"model": model, "prompt": "a"}, headers=bearer(second)
            )
            assert refused.status_code == expected
        eventually(lambda: http.get("/v1/models", headers=bearer(first)).status_code != 200)
        assert http.get(f"{SERVICES}/poet", headers=bearer(second)).status_code == 403
        ended(http, http.delete(f"{SERVICES}/poet").json()["operation"]["id"])
        eventually(lambda: http.get("/v1/models", headers=bearer(second)).status_code != 200)
        assert http.get("/v1/models", headers=bearer(second)).status_code == 401


def test_no_key_is_made_that_would_shut_its_operator_out(http: httpx.Client) -> None:
    deploy(http)
    refused = http.post(f"{SERVICES}/poet/keys", json={})
    assert (refused.status_code, error_of(refused)["code"]) == (409, "operator_key_missing")
    assert http.get(SERVICES).status_code == 200


def test_without_keys_nobody_but_this_machine_operates(http: httpx.Client) -> None:
    for headers in (
        {"X-Forwarded-For": "203.0.113.9"},
        {"Forwarded": "for=203.0.113.9"},
        {"Via": "1.1 proxy"},
        {"Host": "203.0.113.9"},
        {"Origin": "https://chat.example"},
        {"Origin": "null"},
    ):
        for path in (SERVICES, OPERATIONS):
            refused = http.get(path, headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "insufficient_scope"), headers
        assert http.get("/v1/models", headers=headers).status_code == 200
    own_page = f"http://{http.base_url.netloc.decode()}"
    assert http.get(SERVICES, headers={"Origin": own_page}).status_code == 200


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"name": ""}, "name"),
    ({"name": "Poet"}, "name"),
    ({"name": "-poet"}, "name"),
    ({"name": "a" * 64}, "name"),
    ({"name": "poet\n"}, "name"),
    ({"name": "'; DROP TABLE services; --"}, "name"),
    ({"model": ""}, "model"),
    ({"model": 1}, "model"),
    ({"more": 1}, "more"),
    ({"resources": {"gpus": 1}}, "resources.gpus"),
    ({"resources": {"minimum_circuits": 0}}, "resources.minimum_circuits"),
    ({"resources": {"minimum_circuits": 5, "maximum_circuits": 2}}, "resources.minimum_circuits"),
    ({"resources": {"partners": "some"}}, "resources.partners"),
    ({"resources": {"memory_bytes": -1}}, "resources.memory_bytes"),
    ({"resources": {"regions": ["a\x00b"]}}, "resources.regions.0"),
    ({"parameters": {"temperature": 3}}, "parameters.temperature"),
    ({"parameters": {"seed": 3}}, "parameters.seed"),
    ({"parameters": {"max_tokens": "7"}}, "parameters.max_tokens"),
)


def test_a_refusal_names_the_parameter(http: httpx.Client) -> None:
    for changes, parameter in REFUSED:
        for path in (SERVICES, f"{SERVICES}/preview"):
            refused = http.post(path, json=ASKED | changes)
            assert (refused.status_code, error_of(refused)["param"]) == (400, parameter), changes


def test_names_that_are_taken_or_unknown_are_said(http: httpx.Client, swarm: FakeSwarm) -> None:
    for model in ("nobody/nothing", "/etc", "../../..", ".", "~", SPEC.model_hash[:8]):
        for path in (SERVICES, f"{SERVICES}/preview"):
            refused = http.post(path, json=ASKED | {"model": model})
            assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found"), model
    assert swarm.opened == []
    deploy(http)
    again = http.post(SERVICES, json=ASKED)
    assert (again.status_code, error_of(again)["param"]) == (409, "name")
    for method, path in (
        ("GET", f"{SERVICES}/nobody"),
        ("DELETE", f"{SERVICES}/nobody"),
        ("GET", f"{SERVICES}/..%2F..%2Fetc"),
        ("GET", f"{OPERATIONS}/nobody"),
        ("GET", f"{OPERATIONS}/nobody/events"),
        ("DELETE", f"{OPERATIONS}/nobody"),
    ):
        assert http.request(method, path).status_code == 404
    assert http.post(f"{SERVICES}/nobody/keys", json={}).status_code == 404


def test_a_service_may_not_have_the_name_of_a_model(tmp_path: Path) -> None:
    swarm = FakeSwarm(aliases={"small": MODEL})
    with serving(swarm, tmp_path) as http:
        refused = http.post(SERVICES, json=ASKED | {"name": "small"})
        assert (refused.status_code, error_of(refused)["param"]) == (409, "name")


def test_two_who_deploy_one_name_at_once_make_one_service(http: httpx.Client, swarm: FakeSwarm) -> None:
    barrier = threading.Barrier(4)

    def race() -> int:
        barrier.wait(DEADLINE_S)
        return http.post(SERVICES, json=ASKED).status_code

    with ThreadPoolExecutor(4) as users:
        statuses = sorted(future.result(DEADLINE_S) for future in [users.submit(race) for _ in range(4)])
    assert statuses == [202, 409, 409, 409]
    until(http, state="running", held=1)
    assert swarm.held.most == 1
