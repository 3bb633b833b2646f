"""Queue of the head's prompts in the chunks that they are computed in, and how long they have to wait. Pure."""

from collections import deque
from collections.abc import Sequence, Set

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.pipeline import PipelineStage
from molink.peer.scheduling.prefill_chunks import Cut

MOST_WAIT_S = 30.0
"""A head whose prompts need the line for so long takes no more: clients give up a head that is silent for 60 s."""


class PromptQueue:
    """Queues what is left of prompts. A chunk is taken when the one before it has been computed, so that a prompt that
    has to wait takes one place in the queue."""

    def __init__(self, cut: Cut, limits: BatchLimits) -> None:
        self._cut = cut
        self._limits = limits
        self._chunks: dict[LeaseKey, deque[tuple[int, ...]]] = {}
        self._sent_on: set[LeaseKey] = set()
        """Those whose circuit has another hop."""

    def __len__(self) -> int:
        """Chunks that have not been taken."""
        return sum(map(len, self._chunks.values()))

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether chunks of the session have not been taken."""
        return key in self._chunks

    def keys(self) -> Set[LeaseKey]:
        """The sessions of which chunks have not been taken."""
        return self._chunks.keys()

    def add_prompt(self, key: LeaseKey, stages: Sequence[PipelineStage], token_ids: tuple[int, ...]) -> None:
        """What there is to compute of a session's prompt, 1 token or more, in chunks that every hop takes."""
        chunks: deque[tuple[int, ...]] = deque()
        first = 0
        least = min([self._limits.max_tokens, *(stage.facts.step_tokens for stage in stages)])
        # a chunk leaves room for the decode steps that ride along
        most_tokens = max(1, least - self._limits.max_sessions)
        for length in self._cut(stages, len(token_ids), most_tokens):
            chunks.append(token_ids[first : first + length])
            first += length
        self._chunks[key] = chunks
        if len(stages) > 1:
            self._sent_on.add(key)

    def take_chunk(self, key: LeaseKey) -> tuple[int, ...]:
        """The session's next chunk; () if there is none."""
        chunks = self._chunks.get(key)
        if chunks is None:
            return ()
        chunk = chunks.popleft()
        if not chunks:
            self.forget_session(key)
        return chunk

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._chunks.pop(key, None)
        self._sent_on.discard(key)

    def wait_s(self, bytes_per_token: int, uplink_bytes_per_s: float | None) -> float:
        """How long an uplink of that rate takes for what has not been taken; 0 while nobody knows the rate."""
        if uplink_bytes_per_s is None:
            return 0.0
        tokens = sum(len(chunk) for key in self._sent_on for chunk in self._chunks[key])
        return tokens * bytes_per_token / uplink_bytes_per_s
