"""`molink-peer access`: this machine registers with a gateway by a token, and is told whose orders it takes and where.

Only connections that this machine makes are needed: to the gateway, and to the swarm.
"""

import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from molink.commands import EXIT_USAGE, CommandFailed, plain
from molink.configuration import SettingsError, check_address
from molink.dht.identity.identity import Identity, public_key_of
from molink.dht.identity.key_file import KeyFileError
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.models.choosing import HUB_ID

PATH: Final = "/admin/v1/nodes/access"
ANSWERS_WITHIN_S: Final = 30.0
KEY_FILE: Final = "access-swarm.key"
"""In the state directory: the key of the swarm that a gateway named."""
MOST_ADDRESSES: Final = 64


@dataclass(frozen=True, slots=True)
class GrantedAccess:
    """Granted access: what a machine was told by the gateway that it registered with."""

    operator: str
    """Whose orders it takes."""
    initial_peers: tuple[str, ...]
    swarm_key: SwarmKey | None
    """None: the swarm is open."""
    model: str | None = None
    """To serve, if this machine's owner does not say; a bundled one's name or a hub's id. None: whatever is needed."""

    @classmethod
    def of(cls, told: object) -> "GrantedAccess":
        """Returns what a gateway's answer says. Raises `ValueError` if that is not what it should be."""
        if not isinstance(told, dict):
            raise ValueError("it is no JSON object")
        operator, peers, key = told.get("operator"), told.get("initial_peers"), told.get("swarm_key")
        if not isinstance(operator, str) or not isinstance(peers, list) or not isinstance(key, str | None):
            raise ValueError("operator, initial_peers or swarm_key are missing")
        model = told.get("model")
        if model is not None and not (isinstance(model, str) and HUB_ID.fullmatch(model)):
            raise ValueError("the model that it names is no hub's id: choose one with --model")
        public_key_of(operator)
        if not peers or len(peers) > MOST_ADDRESSES:
            raise ValueError(f"it names {len(peers)} initial peers")
        try:
            addresses = tuple(check_address(str(peer)) for peer in peers)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return cls(operator, addresses, None if key is None else SwarmKey.of_line(key), model)


def register(gateway: str, token: str, identity_key: Path) -> GrantedAccess:
    """Describes this machine to a gateway, under the identity in that file, which is made if there is none.

    Raises:
        CommandFailed: the gateway cannot be reached, refuses, or answers what it should not.
    """
    import httpx

    from molink.peer.device.machine_status import describe_machine

    url = checked_url(gateway)
    try:
        identity_key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = Identity.load_or_create(identity_key)
    except (KeyFileError, OSError) as error:
        raise CommandFailed(f"the identity in {identity_key} cannot be used: {error}") from error
    body = {"peer_id": identity.peer_id, "node": describe_machine()}
    headers = {"Authorization": f"Bearer {token}"}
    try:
        answer = httpx.post(f"{url}{PATH}", json=body, headers=headers, timeout=ANSWERS_WITHIN_S)
    except (httpx.HTTPError, UnicodeEncodeError, httpx.InvalidURL) as error:
        raise CommandFailed(
            f"the gateway at {plain(url)} cannot be reached ({plain(str(error)) or type(error).__name__}): check "
            "--gateway, and that it runs"
        ) from error
    try:
        told = answer.json()
    except ValueError:
        told = None
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        reason = _reason(told).rstrip(".") or "it is none of its own"
        raise CommandFailed(
            f"the gateway at {plain(url)} refused the token ({reason}): take the one that its operator made for this "
            "machine, with `molink-gateway keys create NAME --scope access`"
        )
    if not answer.is_success:
        raise CommandFailed(f"the gateway refused: {_reason(told) or f'it answered {answer.status_code}'}")
    try:
        return GrantedAccess.of(told)
    except ValueError as error:
        raise CommandFailed(
            f"{plain(url)} did not answer as a gateway does ({plain(str(error))}): check --gateway, and its version"
        ) from error


def checked_url(text: str) -> str:
    """Returns a gateway's URL without a slash at its end. A token and a swarm's key go there: in the clear only to this
    machine or this network.

    Raises:
        CommandFailed: it is none, or not one that a secret may go to.
    """
    try:
        parts = urlsplit(text.strip())
        host = parts.hostname
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise CommandFailed(
            f"--gateway takes a URL such as https://swarm.example.org, not {plain(text)!r}", EXIT_USAGE
        )
    if parts.scheme == "http" and not _is_near(host):
        raise CommandFailed(
            f"--gateway {plain(text)}: the token and the swarm's key would go there in the clear. Use https, or an "
            "address of this network",
            EXIT_USAGE,
        )
    return text.strip().rstrip("/")


def keep_swarm_key(access: GrantedAccess, folder: Path) -> Path | None:
    """Keeps the swarm's key in a file that only this user can read, and returns that; None: the swarm is open.

    Raises:
        CommandFailed: it cannot be written.
    """
    if access.swarm_key is None:
        return None
    path = folder / KEY_FILE
    try:
        path.unlink(missing_ok=True)
        access.swarm_key.write(path)
    except OSError as error:
        raise CommandFailed(
            f"{path} cannot be written ({error.strerror or error}): make room, or choose another "
            "folder with --state-dir"
        ) from error
    return path


def _is_near(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_private or address.is_link_local


def _reason(told: Any) -> str:  # noqa: ANN401 - whatever was answered
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return plain(str(message)) if message else ""
