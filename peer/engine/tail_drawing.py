"""What a tail knows of one session's sequence, where the tokens that it draws depend on those before.

The client tells it at the beginning of each epoch, so that whoever is the tail then draws what any other would have
drawn; from there on the tail knows what it has drawn itself.
"""

import threading
from collections.abc import Sequence
from typing import TypeAlias

from molink.peer.masks.mask_worker import GrammarState, NextMask
from molink.peer.wire.protocol.prompt_logprobs import PromptLogprobs
from molink.shards.sampling.prompt_scores import PromptScores
from molink.shards.sampling.token_history import SeenTokens, TokenHistory
from molink.shards.spec import SamplingParams

DrawnBy: TypeAlias = tuple[SeenTokens | None, NextMask | None]
"""What penalties count, and what a grammar allows; None where there are none."""


class TailDrawing:
    """Owner of one session's history at its tail. The event loop tells it what is known, and the engine's thread asks
    what a step is drawn by, once, as the step begins: the client may go on telling meanwhile, whatever it likes."""

    def __init__(self, params: SamplingParams, prompt_tokens: int, vocabulary: int) -> None:
        self._has_penalties = params.has_penalties
        self._prompt_tokens = prompt_tokens
        self._history = TokenHistory(prompt_tokens)
        self._has_drawn = False
        """Whether a step that draws has begun."""
        self._changing = threading.Lock()
        """Both threads change the history."""
        self.grammar = None if params.grammar is None else GrammarState(params.grammar)
        """None: there is none."""
        self._scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self._scores = PromptScores(prompt_tokens, params.prompt_logprobs, vocabulary)

    @property
    def known(self) -> int:
        """How many tokens of the sequence are known, from its beginning on."""
        return len(self._history)

    @property
    def is_prompt_known(self) -> bool:
        """Whether all of the prompt is."""
        return self.known >= self._prompt_tokens

    def scores(self) -> PromptScores | None:
        """What takes the log-probabilities of the prompt, of which so much is known; None: nobody wants them."""
        scores = self._scores
        if scores is not None and len(scores.token_ids) < self._prompt_tokens:
            scores.token_ids = self._history.behind(0)[: self._prompt_tokens]
        return scores

    def prompt_logprobs(self, position: int) -> bytes:
        """Log-probabilities of the prompt as they go with the token that is drawn for that position: with the first
        behind it, where they are wanted. Raises ValueError where some have not been found."""
        if self._scores is None or position != self._prompt_tokens:
            return b""
        found = self._scores.found()
        likeliest = found.shape[1] // 2
        return PromptLogprobs(found[:, 0], found[:, 1 : 1 + likeliest], found[:, 1 + likeliest :]).packed()

    def learn(self, position: int, token_ids: Sequence[int], *, is_drawn: bool) -> bool:
        """The sequence has these tokens from that position on; whether more is known by that. What leaves a gap, or is
        known, has no effect; nor has what was not drawn here once a step that draws has begun, since all tokens from
        there on are."""
        with self._changing:
            known = self.known
            if not position <= known < position + len(token_ids) or (self._has_drawn and not is_drawn):
                return False
            self._history.extend(token_ids[known - position :])
            return True

    def generated_behind(self, tokens: int) -> tuple[int, ...]:
        """What was generated behind the first so many generated tokens."""
        return self._history.behind(self._prompt_tokens + tokens)

    def drawn_by(self, position: int, guesses: Sequence[int]) -> list[DrawnBy]:
        """A step begins that draws a token for that position, and one behind each guess: what each of them is drawn by,
        as far as that is known. Raises ValueError: it is not known of the first."""
        with self._changing:
            self._has_drawn = True
            self._history.cut(position)
            if self.known < position:
                raise ValueError(f"of {position} tokens before this one {self.known} are known")
            if self.grammar is None:
                return [(seen, None) for seen in self._seen_behind(guesses)]
            mask = self.grammar.next
            if mask.position != position:
                raise ValueError("what the grammar lets come there is not known")
            masks = mask.along(guesses)
            return list(zip(self._seen_behind(guesses[: len(masks) - 1]), masks, strict=True))

    def _seen_behind(self, guesses: Sequence[int]) -> list[SeenTokens | None]:
        """What penalties count before the next token, and before the one behind each guess, should these be right."""
        if not self._has_penalties:
            return [None] * (len(guesses) + 1)
        if not guesses:
            return [self._history.seen()]
        known = self.known
        seen: list[SeenTokens | None] = [self._history.seen().copied()]
        for guess in guesses:
            self._history.extend((guess,))
            seen.append(self._history.seen().copied())
        self._history.cut(known)
        return seen
