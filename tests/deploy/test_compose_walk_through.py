"""The walk-through of the compose file works in its order: no command asks for what only a later one brings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from molink.configuration import SettingsError, configured_initial_peers
from molink.peer.daemon.settings import load_settings

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docs/deploy/compose.yaml").read_text("utf-8")
FILE = "docs/deploy/.env"


def commands() -> list[str]:
    text = (ROOT / "docs/DEPLOYMENT.md").read_text("utf-8")
    (block,) = re.findall(r"## Image and compose file\n\n```bash\n(.*?)```", text, re.DOTALL)
    return str(block).splitlines()


def known_before_each_command() -> Iterator[tuple[str, set[str]]]:
    """The commands of compose, and what `.env` beside its file holds by then, which each of them reads."""
    known: set[str] = set()
    for line in commands():
        known |= set(re.findall(rf"^echo (MOLINK_\w+)=.* >> {re.escape(FILE)}\b", line))
        if line.startswith("docker compose "):
            yield line, set(known)


def stands_for_missing_peers() -> str:
    content = yaml.safe_load(COMPOSE)
    given = [content["services"][name]["environment"]["MOLINK_INITIAL_PEERS"] for name in ("peer", "gateway")]
    (found,) = {
        match[1]
        for match in (re.fullmatch(r"\$\{MOLINK_INITIAL_PEERS:-(.+)\}", one) for one in given)
        if match
    }
    return str(found)


def test_each_command_finds_what_the_compose_file_cannot_do_without() -> None:
    required = set(re.findall(r"\$\{(\w+):\?", COMPOSE))
    seen = list(known_before_each_command())
    assert required == {"MOLINK_ANNOUNCE", "MOLINK_DB_PASSWORD"}
    assert len(seen) >= 4
    assert [(line, required - known) for line, known in seen if not required <= known] == []


def test_everything_is_started_only_once_a_living_peer_is_named() -> None:
    everything = [known for line, known in known_before_each_command() if line.endswith(" up -d")]
    assert everything
    assert all("MOLINK_INITIAL_PEERS" in known for known in everything)


def test_a_founder_announces_the_address_that_is_asked_for() -> None:
    assert "${MOLINK_ANNOUNCE:?" in yaml.safe_load(COMPOSE)["services"]["founder"]["command"]


def test_a_peer_and_a_gateway_without_a_living_peer_say_so_and_found_no_swarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOLINK_INITIAL_PEERS", stands_for_missing_peers())
    message = rf"^'MOLINK_INITIAL_PEERS-is-missing-in-{re.escape(FILE)}' is not a peer's multiaddress: "
    with pytest.raises(SettingsError, match=message):
        configured_initial_peers(None)
    with pytest.raises(SettingsError, match=message):
        load_settings({})


def test_git_and_the_image_do_not_take_the_file_with_the_password() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert "**/.env" in (ROOT / "docs/deploy/Dockerfile.dockerignore").read_text("utf-8").splitlines()
