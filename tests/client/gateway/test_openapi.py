"""`/openapi.json` describes what the gateway takes and answers, and nothing is answered that it does not describe."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.gateways.gateway_keys import bearer, make_key
from support.properties import examples
from support.swarms.fake_swarm import CHAT, DEADLINE_S, MODEL, TEXT, FakeSwarm, gateway

from molink.client.gateway.accounts.api_keys import KeyScope
from molink.dht.identity.identity import Identity

CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
)  # fmt: skip
ENDLESS = "/v1/swarm/events"


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One with services, and responses that are kept."""
    with gateway(FakeSwarm(keep_hours=1.0), accounts=(None, tmp_path_factory.mktemp("gateway"))) as url:
        yield url


@pytest.fixture(scope="module")
def described(shared_gateway: str) -> dict[str, Any]:
    content: dict[str, Any] = (
        httpx.get(f"{shared_gateway}/openapi.json", timeout=DEADLINE_S).raise_for_status().json()
    )
    return content


ANSWERED: list[tuple[str, str, dict[str, Any] | None, int]] = [
    ("GET", "/v1/models", None, 200),
    ("POST", "/v1/completions", TEXT | {"n": 2, "logprobs": 1}, 200),
    ("POST", "/v1/completions", TEXT | {"temperature": 9}, 400),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, 200),
    ("POST", "/v1/chat/completions", CHAT | {"model": "nobody's"}, 404),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi"}, 200),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 5}, 200),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 0}, 400),
    ("POST", "/v1/messages/count_tokens", CHAT, 200),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "one two", "return_token_strs": True}, 200),
    ("POST", "/detokenize", {"model": MODEL, "tokens": [1, 2]}, 200),
    ("GET", "/v1/usage", None, 200),
    ("GET", "/admin/v1/services", None, 200),
    ("POST", "/admin/v1/services/preview", {"name": "demo", "model": MODEL}, 200),
    ("GET", "/admin/v1/operations", None, 200),
    ("GET", "/admin/v1/nodes", None, 200),
    ("GET", "/healthz", None, 200),
    ("GET", "/readyz", None, 200),
    ("GET", "/v1/swarm", None, 200),
    ("GET", "/metrics", None, 200),
]


def require_described(described: dict[str, Any], path: str, answer: httpx.Response) -> None:
    """The answer is one that is described for that path."""
    status, method = answer.status_code, answer.request.method.lower()
    responses = described["paths"][path][method]["responses"]
    content = responses[str(status) if status < 300 else f"{status // 100}XX"]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content
    if kind == "application/json":
        schema = content[kind]["schema"] | {"components": described["components"]}
        jsonschema.validate(answer.json(), schema)


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERED)
def test_what_is_answered_is_what_is_described(
    shared_gateway: str,
    described: dict[str, Any],
    method: str,
    path: str,
    body: dict[str, Any] | None,
    status: int,
) -> None:
    answer = httpx.request(method, shared_gateway + path, json=body, timeout=DEADLINE_S)
    assert answer.status_code == status, answer.text
    require_described(described, path, answer)


def test_what_operators_are_answered_of_services_and_nodes_is_what_is_described(
    described: dict[str, Any], tmp_path: Path
) -> None:
    operator = make_key(tmp_path, scopes=frozenset({KeyScope.OPERATE}))
    token = make_key(tmp_path, scopes=frozenset({KeyScope.ACCESS}))
    admin, peer = "/admin/v1", Identity.generate().peer_id
    machine = {"hostname": "attic", "system": "Linux", "system_version": "#1", "memory_bytes": 2**34}
    swarm = FakeSwarm(commanded={peer: 0})
    with (
        gateway(swarm, accounts=(None, tmp_path)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=bearer(operator)) as http,
    ):
        entry = {"peer_id": peer, "node": machine}
        deployed = http.post(f"{admin}/services", json={"name": "demo", "model": MODEL})
        operation = deployed.json()["operation"]["id"]
        asked = (
            ("/services", deployed, 202),
            ("/services/{name}", http.get(f"{admin}/services/demo"), 200),
            ("/services/{name}/keys", http.post(f"{admin}/services/demo/keys", json={}), 201),
            ("/services", http.get(f"{admin}/services"), 200),
            ("/operations/{operation_id}", http.get(f"{admin}/operations/{operation}"), 200),
            ("/operations/{operation_id}", http.delete(f"{admin}/operations/{operation}"), 202),
            ("/nodes/access", http.post(f"{admin}/nodes/access", json=entry, headers=bearer(token)), 201),
            ("/nodes", http.get(f"{admin}/nodes"), 200),
            ("/nodes/{peer_id}", http.get(f"{admin}/nodes/{peer}"), 200),
            ("/nodes/{peer_id}/serve", http.post(f"{admin}/nodes/{peer}/serve", json={"model": "a/b"}), 202),
            ("/nodes/{peer_id}/drain", http.post(f"{admin}/nodes/{peer}/drain", json={}), 202),
            ("/nodes/{peer_id}", http.delete(f"{admin}/nodes/{peer}"), 202),
            ("/services/{name}", http.delete(f"{admin}/services/demo"), 202),
        )
        for path, answer, status in asked:
            assert answer.status_code == status, answer.text
            require_described(described, admin + path, answer)


def test_every_route_says_how_it_refuses_and_no_route_how_fastapi_would(described: dict[str, Any]) -> None:
    for path, operations in described["paths"].items():
        for operation in operations.values():
            (done,) = set(operation["responses"]) - {"4XX", "5XX"}
            assert done.startswith("2"), path
            for status in ("4XX", "5XX"):
                assert list(operation["responses"][status]["content"]) == ["application/json"]


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
def test_whatever_is_asked_is_answered_as_described_and_never_by_a_failure_of_the_gateway(
    shared_gateway: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{shared_gateway}/openapi.json")
    tried = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == ENDLESS:
            continue
        tried.add(operation.path)

        @settings(
            max_examples=examples(100), deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=list(CHECKS), timeout=DEADLINE_S)

        with suppress(
            Unsatisfiable
        ):  # nothing can be wrong with a request that has neither parameters nor a body
            ask()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= tried
