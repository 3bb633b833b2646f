"""Who may begin now, of those that wait for memory: first come, first served."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from molink.shards.spec import KV_BLOCK_TOKENS, ModelSpec, Span


def fitting_tokens(spec: ModelSpec, span: Span, free_bytes: int) -> int:
    """Tokens that so much KV memory of a span holds, in whole blocks."""
    return free_bytes // spec.kv_bytes(span, KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def reserved_tokens(tokens: int) -> int:
    """What a session of so many takes of it: its last block is its own."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


class Room:
    """The tokens and sessions that all peers of a circuit have room for together. Nobody overtakes."""

    def __init__(self, tokens: int, sessions: int) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._most_tokens = tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, tokens: int) -> AsyncIterator[None]:
        """Room for one session of so many tokens, as soon as all who came before have theirs.

        Raises:
            ValueError: there never is so much room.
        """
        if tokens > self._most_tokens:
            raise ValueError(f"a session of {tokens} tokens does not fit: the peers hold {self._most_tokens}")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (tokens, turn)
        self._waiting.append(entry)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tokens)
            else:
                self._waiting.remove(entry)
                self._let_in()
            raise
        try:
            yield
        finally:
            self._give_back(tokens)

    def _give_back(self, tokens: int) -> None:
        self._tokens += tokens
        self._sessions += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._sessions and self._waiting[0][0] <= self._tokens:
            tokens, turn = self._waiting.popleft()
            self._tokens -= tokens
            self._sessions -= 1
            turn.set_result(None)
