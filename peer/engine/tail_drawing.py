"""What a tail knows of one session's sequence, where the tokens that it draws depend on those before.

The client tells it at the beginning of each epoch, so that whoever is the tail then draws what any other would have
drawn; from there on the tail knows what it has drawn itself.
"""

from collections.abc import Sequence

from molink.shards.sampling.token_history import SeenTokens, TokenHistory
from molink.shards.spec import SamplingParams


class TailDrawing:
    """Owner of one session's history at its tail. The event loop tells it what is known; the engine's thread reads it
    while a step of the session is computed, and nothing is told then."""

    def __init__(self, params: SamplingParams, prompt_tokens: int) -> None:
        self._has_penalties = params.has_penalties
        self._history = TokenHistory(prompt_tokens)

    @property
    def draws_to(self) -> int:
        """The position up to which tokens can be drawn: what comes before it is known."""
        return len(self._history)

    def learn(self, position: int, token_ids: Sequence[int]) -> bool:
        """The sequence has these tokens from that position on; whether `draws_to` is another by that. What leaves a
        gap, or is known, has no effect."""
        before, known = self.draws_to, len(self._history)
        if position <= known < position + len(token_ids):
            self._history.extend(token_ids[known - position :])
        return self.draws_to != before

    def go_to(self, position: int) -> None:
        """A token is to be drawn for that position. Raises ValueError: what comes before it is not known."""
        self._history.cut(position)
        if len(self._history) < position:
            raise ValueError(f"of {position} tokens before this one {len(self._history)} are known")

    def seen(self) -> SeenTokens | None:
        """What penalties count; None where there are none."""
        return self._history.seen() if self._has_penalties else None
