"""What a prompt costs of which nothing came because no peer was there."""

from pathlib import Path

import httpx
import pytest
from support.gateways.eventually import eventually
from support.gateways.gateway_keys import bearer, make_key
from support.swarms.fake_swarm import CHAT, DEADLINE_S, FakeSwarm, gateway

from molink.client.gateway import generating


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_costs_nothing_whose_peers_vanish_before_its_first_token_whether_streamed_or_not(
    stream: bool, swarm: FakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OPENS_AFTER_S", 0.0), ("LOOKS_EVERY_S", 0.01), ("UNSERVED_S", 0.0)):
        monkeypatch.setattr(generating, name, value)
    swarm.hangs_at = 0
    headers = bearer(make_key(tmp_path))
    with (
        gateway(swarm, accounts=(None, tmp_path)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers) as http,
    ):
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
                lines = answer.iter_lines()
                assert next(lines) == ": waiting"
                swarm.is_served = False
                assert "swarm_unavailable" in "".join(lines)
        else:
            swarm.is_served = False
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 503
        eventually(lambda: bool(http.get("/v1/usage").json()["data"]))
        [line] = http.get("/v1/usage").json()["data"]
    assert (line["requests"], line["prompt_tokens"], line["completion_tokens"]) == (1, 0, 0)
