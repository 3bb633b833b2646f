"""Token validation: the head of a circuit may send the tokens that were asked for, one by one. Pure.

A head is a stranger. Whatever it sends is held against the session's own descriptor before anything is done with it, by
the rules by which an honest tail makes tokens (`peer/engine/steps.py`).
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.prompt_logprobs import unpacked
from molink.shards.spec import MOST_GUESSED_TOKENS, ModelSpec

MOST_OUT_OF_PLACE = 16
"""Tokens that repeat or skip a position, of one circuit. They do no harm, and links keep the order: so many are no
accident."""
MOST_AHEAD = 8
"""Positions by which a token may be ahead of the one that is expected."""
ROUNDING = 1e-3
"""A log-probability may be above 0 by so much."""


class HeadAtFault(Exception):
    """The head sent what cannot be a token of this session; the message says why."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Token rules of a session: what is known of every token before it comes."""

    last_position: int
    """Of the last token that was asked for and has room."""
    vocabulary: int
    stop_ids: frozenset[int]
    logprobs: int | None
    """How many of the likeliest tokens each has beside it; None: no log-probabilities."""
    first_stop: int = 0
    """The position before which no token ends the generation."""
    prompt_tokens: int = 0
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens each place of the prompt has, told with the first token behind it; None: no
    log-probabilities of the prompt."""

    @classmethod
    def of(cls, descriptor: pb.SessionDescriptor, spec: ModelSpec) -> Self:
        """Returns the token rules of the session that the descriptor asks for."""
        sampling = descriptor.sampling
        asked = descriptor.prompt_tokens + sampling.max_new_tokens
        return cls(
            last_position=min(asked, descriptor.capacity_tokens) - 1,
            vocabulary=spec.vocabulary_size,
            stop_ids=frozenset(sampling.stop_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_tokens=descriptor.prompt_tokens,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            first_stop=0 if sampling.HasField("grammar") else descriptor.prompt_tokens + sampling.min_tokens,
        )

    def check(self, token: pb.Token) -> None:
        """Raises HeadAtFault if no honest circuit makes such a token, wherever it stands."""
        if token.position > self.last_position:
            raise HeadAtFault(f"it sent a token for position {token.position} of {self.last_position + 1}")
        if token.token_id >= self.vocabulary:
            raise HeadAtFault(f"it sent token {token.token_id} of a vocabulary of {self.vocabulary}")
        if token.position < self.first_stop and token.token_id in self.stop_ids:
            raise HeadAtFault("it ends the generation before as many tokens as were asked for")
        if token.finish != self._finish(token):
            raise HeadAtFault("it ends the generation where it does not end, or goes on behind its end")
        if token.guessed > MOST_GUESSED_TOKENS:
            raise HeadAtFault(f"it says that {token.guessed} tokens were guessed in one step")
        if len(token.guess_sources) > token.guessed:
            raise HeadAtFault("it says where more guesses came from than there were")
        self._check_logprobs(token)
        self._check_prompt_logprobs(token)

    def _finish(self, token: pb.Token) -> int:
        if token.token_id in self.stop_ids:
            return pb.STOP
        return pb.LENGTH if token.position == self.last_position else pb.NOT_FINISHED

    def _check_logprobs(self, token: pb.Token) -> None:
        count = 0 if self.logprobs is None else min(self.logprobs, self.vocabulary)
        if token.HasField("logprob") != (self.logprobs is not None) or len(token.top) != count:
            raise HeadAtFault("it sent other log-probabilities than were asked for")
        if count == 0 and self.logprobs is None:
            return
        if not _is_logprob(token.logprob):
            raise HeadAtFault(f"it sent a log-probability of {token.logprob}")
        if any(one.token_id >= self.vocabulary or not _is_logprob(one.logprob) for one in token.top):
            raise HeadAtFault("it sent likeliest tokens that cannot be")

    def _check_prompt_logprobs(self, token: pb.Token) -> None:
        likeliest, content = self.prompt_logprobs, token.prompt_logprobs
        if likeliest is None or token.position != self.prompt_tokens:
            if content:
                raise HeadAtFault("it sent log-probabilities of the prompt that were not asked for")
            return
        try:
            found = unpacked(content, self.prompt_tokens, min(likeliest, self.vocabulary))
        except ValueError as error:
            raise HeadAtFault(str(error)) from error
        told = np.concatenate((found.logprobs, found.likeliest), axis=None)
        if not (np.isfinite(told) & (told <= ROUNDING)).all():
            raise HeadAtFault("it sent log-probabilities of the prompt that cannot be")
        if (found.likeliest_ids >= self.vocabulary).any():
            raise HeadAtFault("it sent likeliest tokens of the prompt that cannot be")


def _is_logprob(value: float) -> bool:
    """Whether a model that makes finite logits can give a token that log-probability, its masks and limits aside."""
    return -math.inf < value <= ROUNDING


@dataclass(slots=True)
class TokenStream:
    """Token stream of one circuit: checks order and content of the tokens as they come."""

    rules: TokenRules
    expected: int
    """The position of the next one."""
    hops: int
    ended: bool = False
    out_of_place: int = 0

    def takes(self, token: pb.Token) -> bool:
        """Whether it is the next token. One that is out of place is left out.

        Raises:
            HeadAtFault: it is no token of this session, or too many were out of place.
        """
        if not self.ended and token.position == self.expected:
            self.rules.check(token)
            if len(token.timings) > self.hops:
                raise HeadAtFault("it sent the times of more hops than there are")
            self.expected += 1
            self.ended = token.finish != pb.NOT_FINISHED
            return True
        self.out_of_place += 1
        if self.out_of_place > MOST_OUT_OF_PLACE or token.position > self.expected + MOST_AHEAD:
            raise HeadAtFault("it sent tokens of other positions than the next")
        return False

    def refuses(self, token: pb.Token) -> bool:
        """Whether it cannot be the next token. Takes nothing."""
        try:
            return not replace(self).takes(token)
        except HeadAtFault:
            return True
