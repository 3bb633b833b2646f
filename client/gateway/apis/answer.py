"""Answer: what the gateway makes of generations, whole or as server-sent events, in the form of one API."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from molink.client.api.generation import Generation, TextPiece
from molink.client.gateway.error_handlers import ApiError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """Server-sent event: a document, or a word such as [DONE]. One without either is a comment, which clients skip."""

    data: Json | str | None = None
    name: str = ""

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        if self.data is None:
            return b": waiting\n\n"
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()


WAITING = ServerSentEvent()
"""Says that the answer goes on, where nothing of it has come for a while."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of an answer, a prompt counted once, however many choices it has."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompts: those that were not computed anew."""
    completion_tokens: int
    accepted_tokens: int = 0
    """Guesses that became tokens of the answer, wherever they came from."""
    rejected_tokens: int = 0
    """Guesses that did not."""

    @classmethod
    def of(cls, generations: Sequence[Generation], choices_per_prompt: int = 1) -> "TokenUsage":
        firsts = generations[::choices_per_prompt]
        accepted = sum(one.accepted_tokens for one in generations)
        return cls(
            sum(one.prompt_tokens for one in firsts),
            sum(one.cached_tokens for one in firsts),
            sum(len(one.token_ids) for one in generations),
            accepted,
            sum(one.guessed_tokens for one in generations) - accepted,
        )


class Answer(ABC):
    """Answer to one request. Choices are numbered over all prompts."""

    @abstractmethod
    def whole(self, generations: Sequence[Generation]) -> Json:
        """The answer to a request that does not stream."""

    @abstractmethod
    def opening(self, choice: int) -> list[ServerSentEvent]:
        """Events that come before the first piece of a choice."""

    @abstractmethod
    def chunks(self, choice: int, piece: TextPiece) -> list[ServerSentEvent]:
        """The events of one piece."""

    @abstractmethod
    def closing(self, generations: Sequence[Generation]) -> list[ServerSentEvent]:
        """Events that come after the last piece of all choices."""

    @abstractmethod
    def failed(self, failure: ApiError) -> list[ServerSentEvent]:
        """The last events of a stream that could not be finished."""


def new_id(prefix: str) -> str:
    """Returns an id that nobody else has."""
    return f"{prefix}_{secrets.token_hex(12)}"
