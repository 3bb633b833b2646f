"""A request that was let in: what it uses is counted as it comes, and settled when it ends, however it ends."""

import time
from collections.abc import Sequence
from typing import Final

from molink.client.api.generation import TextPiece
from molink.client.errors import InvalidRequest
from molink.client.gateway.accounts.quotas import TakenQuota
from molink.client.gateway.accounts.usage_ledger import UsageLedger
from molink.client.gateway.accounts.usage_store import UsageCounts

BYTES_PER_TOKEN: Final = 4
"""Of a prompt that is reserved for before its number of tokens is known; what that misses is settled afterwards."""


class AdmittedRequest:
    """Request that was let in: counts what it uses, and settles that when it ends."""

    def __init__(
        self, ledger: UsageLedger, key_id: str, model: str, taken: TakenQuota | None, prompts: Sequence[int]
    ) -> None:
        """`key_id` is empty without a key. `prompts`: for each generation, how many tokens its prompt is estimated to
        have; 0: it is counted with an earlier one's."""
        self._ledger = ledger
        self._key_id = key_id
        self._model = model
        self._taken = taken
        self._estimates = tuple(prompts)
        self._prompts: dict[int, int] = {}
        """Tokens of the prompts of generations that have begun."""
        self._answered: set[int] = set()
        """Generations of which something has come."""
        self._mistaken: set[int] = set()
        """Those that could not be served as they were asked for."""
        self._has_failed = False
        self._cached_tokens = 0
        self._completion_tokens = 0

    def headers(self) -> dict[str, str]:
        """Headers of its answer."""
        return {} if self._taken is None else self._taken.headers()

    def begin(self, generation: int) -> None:
        """A generation, by its number, begins: its prompt may be computed from now on, whether its client waits for the
        first piece or not."""
        self._prompts.setdefault(generation, self._estimates[generation])

    def count_prompt(self, generation: int, tokens: int) -> None:
        """A generation's prompt has so many tokens."""
        if self._estimates[generation]:
            self._prompts[generation] = tokens

    def fail(self, error: Exception, generation: int | None = None) -> None:
        """A generation has failed, or with None the request. Prompts of which nothing came then cost nothing; where the
        caller's mistake is why, no other one's but that generation's."""
        if not isinstance(error, InvalidRequest):
            self._has_failed = True
        elif generation is not None:
            self._mistaken.add(generation)

    def note(self, generation: int, piece: TextPiece) -> None:
        """A generation has come to one more piece."""
        self._completion_tokens += len(piece.token_ids)
        self.begin(generation)
        self._answered.add(generation)
        if piece.generation is not None and self._estimates[generation]:
            self._prompts[generation] = piece.generation.prompt_tokens
            self._cached_tokens += piece.generation.cached_tokens

    def end(self) -> None:
        """Settles it. What was never begun costs a request, and no tokens."""
        prompt_tokens = sum(tokens for one, tokens in self._prompts.items() if self._costs(one))
        if self._taken is not None:
            self._taken.settle(prompt_tokens + self._completion_tokens)
        counts = UsageCounts(1, prompt_tokens, self._cached_tokens, self._completion_tokens)
        self._ledger.record(self._key_id, self._model, counts, time.time())

    def _costs(self, generation: int) -> bool:
        """Whether the prompt of a generation that has begun is to be paid for."""
        return generation in self._answered or not (self._has_failed or generation in self._mistaken)


def estimated_tokens(prompt: str | Sequence[int]) -> int:
    """Returns about how many tokens a prompt has, at least one; of token ids exactly."""
    if isinstance(prompt, str):
        return tokens_of_bytes(len(prompt.encode(errors="replace")))
    return max(1, len(prompt))


def tokens_of_bytes(text_bytes: int) -> int:
    """Returns about how many tokens a text of so many bytes has, at least one."""
    return max(1, -(-text_bytes // BYTES_PER_TOKEN))
