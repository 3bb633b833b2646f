"""Client of a gateway's `/admin/v1`, for the commands of operators and for machines that register."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from molink.commands import EXIT_USAGE, CommandFailed, plain

ANSWERS_WITHIN_S: Final = 150.0
"""A model that is looked up may have to be fetched from peers first."""
SILENCE_S: Final = 60.0
"""Of a stream that says at least every ten seconds that it goes on."""

_LISTED_BY: Final = {"/admin/v1/services/": "services status", "/admin/v1/nodes/": "nodes list"}
"""The command that lists what such a path names one of."""
KEY_WANTED: Final = "This command takes it as --key KEY or from MOLINK_OPERATOR_KEY: one of the scope operate"


class AdminClient:
    """Client of one gateway. Failures are one sentence each."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns what the gateway answers.

        Raises:
            CommandFailed: it refuses, or is not there.
        """
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._checked(answer)

    def follow(self, operation_id: str) -> Iterator[dict[str, Any]]:
        """Yields an operation each time that it has changed; the last one has ended.

        Raises:
            CommandFailed: the gateway refuses, or is not there any more.
        """
        path = f"/admin/v1/operations/{operation_id}/events"
        try:
            with self._http.stream("GET", path, timeout=SILENCE_S) as answer:
                if not answer.is_success:
                    answer.read()
                    self._checked(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except (httpx.HTTPError, ValueError) as error:
            raise self._unreachable(error) from error

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            document = answer.json()
        except ValueError:
            document = None
        if isinstance(document, dict) and answer.is_success:
            return document
        error = document.get("error") if isinstance(document, dict) else None
        said = error.get("message") if isinstance(error, dict) else None
        reason = plain(str(said)) if said else f"it answered {answer.status_code} without a reason"
        if answer.status_code == 401 and "authorization" not in answer.request.headers:
            reason = f"{reason} {KEY_WANTED}"
        path = answer.request.url.path
        listed = next((command for start, command in _LISTED_BY.items() if path.startswith(start)), None)
        if answer.status_code == 404 and listed is not None:
            reason = f"{reason} `molink-gateway {listed}` lists what there is."
        raise CommandFailed(f"the gateway refused: {reason}", EXIT_USAGE if answer.status_code == 400 else 1)

    def _unreachable(self, error: Exception) -> CommandFailed:
        return CommandFailed(
            f"the gateway at {self._http.base_url} cannot be reached ({plain(str(error)) or type(error).__name__}): "
            "start it with `molink-gateway`, or name it with --gateway URL"
        )


@contextmanager
def admin_client(url: str, key: str | None) -> Iterator[AdminClient]:
    """A client of the gateway at that URL.

    Raises:
        CommandFailed: that is no URL of a gateway.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise CommandFailed(
            f"--gateway takes a URL such as http://127.0.0.1:8000, not {plain(url)!r}", EXIT_USAGE
        )
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=parsed, headers=headers, timeout=ANSWERS_WITHIN_S) as http:
        yield AdminClient(http)
