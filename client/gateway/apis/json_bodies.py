"""JSON bodies of requests: parsed once for all routes, and refused where no JSON could say again what they hold."""

import json
import math
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from molink.client.gateway.error_handlers import BodyRefused

_MAY_BE_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape for half of a character, as most are written that are beyond 16 bits: with the other half behind it."""
_NOT_FINITE: Final = "a number must be finite, neither NaN nor Infinity nor beyond 1.8e308"
_HALF: Final = "a text holds half of a character (a surrogate without its other half): send whole ones"
_MOST_NAMES: Final = 8
"""Of those that lead to what is wrong, which are told."""
_MOST_NAME_CHARACTERS: Final = 64
_ALWAYS_SOUND: Final = (int, bool, type(None))


class JsonRoute(APIRoute):
    """Route whose body is parsed by `parsed_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_parsed


class _JsonRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401 - JSON
        return parsed_body(await self.body())


def parsed_body(body: bytes) -> Any:  # noqa: ANN401 - JSON
    """Returns the value of a body.

    Raises:
        BodyRefused: it is not UTF-8, or holds a number that is not finite or half of a character. Python's parser takes
            them, and answers that repeat them cannot be written.
        json.JSONDecodeError: it is no JSON.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BodyRefused(f"The body is not UTF-8 at byte {error.start}") from error
    is_doubtful = _MAY_BE_HALF.search(text) is not None

    def number(digits: str) -> float:
        nonlocal is_doubtful
        value = float(digits)
        is_doubtful = is_doubtful or not math.isfinite(value)
        return value

    value = json.loads(text, parse_float=number, parse_constant=number)
    # Few bodies are looked through: parsing has met nothing else that could be wrong.
    fault = _fault_in(value) if is_doubtful else None
    if fault is not None:
        what, names = fault
        parameter = _told(reversed(names)) or None
        raise BodyRefused(f"{parameter or 'The body'}: {what}", parameter)
    return value


def _fault_in(value: object) -> tuple[str, list[str]] | None:
    """What is wrong with a value, and the names that lead to it, the last one first; None: nothing is."""
    items: Iterable[tuple[object, object]]
    match value:
        case str():
            return None if _is_whole(value) else (_HALF, [])
        case float():
            return None if math.isfinite(value) else (_NOT_FINITE, [])
        case dict():
            if not all(map(_is_whole, value)):
                return _HALF, []
            items = value.items()
        case list():
            items = enumerate(value)
        case _:
            return None
    for name, inner in items:
        fault = None if isinstance(inner, _ALWAYS_SOUND) else _fault_in(inner)
        if fault is not None:
            fault[1].append(str(name))
            return fault
    return None


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _told(names: Iterable[str]) -> str:
    """The parameter of these names, as far as they are of a length and kind to be told."""
    told: list[str] = []
    for name in names:
        if len(told) == _MOST_NAMES or len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            break
        told.append(name)
    return ".".join(told)
