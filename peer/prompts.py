"""At the head: prompts in the chunks that they are computed in. Pure."""

from collections import deque
from collections.abc import Sequence

from molink.peer.leases import LeaseKey
from molink.peer.microbatch import BatchLimits
from molink.peer.pipeline import PipelineStage
from molink.peer.prefill_chunks import Cut


class Prompts:
    """What is left of prompts. A chunk is taken when the one before it has been computed, so that a prompt that has to
    wait takes one place in the queue."""

    def __init__(self, cut: Cut, limits: BatchLimits) -> None:
        self._cut = cut
        # a chunk leaves room for the decode steps that ride along
        self._most_tokens = max(1, limits.max_tokens - limits.max_sessions)
        self._chunks: dict[LeaseKey, deque[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Chunks that have not been taken."""
        return sum(map(len, self._chunks.values()))

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether chunks of the session have not been taken."""
        return key in self._chunks

    def add(self, key: LeaseKey, stages: Sequence[PipelineStage], token_ids: tuple[int, ...]) -> None:
        """The whole prompt of a session, 1 token or more."""
        chunks: deque[tuple[int, ...]] = deque()
        first = 0
        for length in self._cut(stages, len(token_ids), self._most_tokens):
            chunks.append(token_ids[first : first + length])
            first += length
        self._chunks[key] = chunks

    def take(self, key: LeaseKey) -> tuple[int, ...]:
        """The session's next chunk; () if there is none."""
        chunks = self._chunks.get(key)
        if chunks is None:
            return ()
        chunk = chunks.popleft()
        if not chunks:
            del self._chunks[key]
        return chunk

    def forget(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._chunks.pop(key, None)
