"""A swarm that answers as it is told, for tests of whatever asks one."""

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from molink.client.api.generation import CircuitReport, Explanation, Generation, Hop, TextPiece
from molink.client.errors import SwarmError

PEER_ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
FIRST = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"
HOPS = (Hop(PEER_ID, 0, 1, "attic"), Hop(PEER_ID[::-1], 1, 3, "cellar"))
CIRCUIT = CircuitReport(HOPS, 4.0)
Run = Callable[..., tuple[int, str, str]]
"""Runs a command line: exit status, stdout, stderr."""


@dataclass
class Spec:
    name: str = "test/model"


@dataclass
class ScriptedSwarm:
    """Answers with `words`; raises the next of `errors` instead, where it is not None."""

    words: tuple[str, ...] = ("But", " soft", "!")
    errors: list[SwarmError | None] = field(default_factory=list)
    unreachable: SwarmError | None = None
    asked: list[Any] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    opened_with: dict[str, Any] = field(default_factory=dict)
    model: Spec = field(default_factory=Spec)
    explanation: Explanation | None = None

    async def __aenter__(self) -> Self:
        if self.unreachable is not None:
            raise self.unreachable
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def stream_events(self, prompt: object, **sampling: object) -> AsyncGenerator[TextPiece, None]:
        self.asked.append(prompt)
        self.sampling = sampling
        self.opened_with["report"]("circuit of 2 peers found")
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        for word in self.words:
            yield TextPiece(word)
        yield TextPiece("", finish_reason="length", generation=self.generation())

    def stream_chat_events(
        self, messages: Iterable[object], **sampling: object
    ) -> AsyncGenerator[TextPiece, None]:
        return self.stream_events(list(messages), **sampling)

    async def explain(self, prompt: object, **sampling: object) -> Explanation:
        self.asked.append(prompt)
        self.sampling = sampling
        return self.explanation or Explanation(self.generation())

    def generation(self) -> Generation:
        ids = tuple(range(len(self.words)))
        return Generation("".join(self.words), ids, 2, "length", 0.5, 0.004, CIRCUIT)
