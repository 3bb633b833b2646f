"""Hops as their cores alone whose sessions go from epoch to epoch, with a model of each hop's KV cache."""

from collections.abc import Sequence
from typing import Any

from support.swarms.hop_ring import Generation, HopRing

from molink.peer.hop import events
from molink.peer.hop.session import HopSession, HopStep
from molink.shards.kv.prefix import common_position


class ModelledCache:
    """What a hop's KV cache holds: of each token its position, which has to be its place in the cache too."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.began = 0
        """Where its latest step began."""
        self.certain = 0
        """So many of its tokens are no guesses, of which nobody knows here what became."""
        self.stepped = 0
        """Tokens that were computed, whatever became of them."""

    def begin(self, position: int) -> None:
        """A step begins there."""
        assert position <= len(self.tokens), "a gap in a KV cache"
        del self.tokens[position:]
        self.began, self.certain = position, min(self.certain, position)

    def append(self, tokens: Sequence[int], guesses: int = 0) -> None:
        """The last ones are guesses; wrong ones are below zero."""
        self.tokens += tokens
        self.stepped += len(tokens)
        self.certain = len(self.tokens) - guesses
        places = list(range(len(self.tokens)))
        assert self.tokens[: self.certain] == places[: self.certain], "a token is lost, doubled, or misplaced"
        assert [abs(one) for one in self.tokens] == places

    def settle(self) -> int:
        """Its epoch is over: it holds so many tokens from now on, none of which was only guessed."""
        del self.tokens[self.certain :]
        return len(self.tokens)


class EpochRing(HopRing):
    """Generations that go on in a new epoch at any moment, hop after hop."""

    caches: dict[tuple[int, int], ModelledCache]
    forming: dict[int, list[int]]

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - as HopRing
        super().__init__(*arguments)
        self.caches = {
            (one.number, hop): ModelledCache() for one in self.generations for hop in range(len(one.peers))
        }
        self.forming = {}
        """By generation, the hops that have not been asked for a lease of its new epoch yet."""
        self.epochs = [1] * len(self.generations)
        self.offers: dict[int, list[tuple[int, int]]] = {}
        """By generation, what its hops hold and can go back to."""
        self.positions: list[int] = []
        """Where epochs began."""

    def leave(self, one: Generation, unseen: int) -> None:
        """Its client goes on in a new epoch, without so many of the tokens that are on their way to it."""
        self.epochs[one.number] += 1
        self.forming[one.number] = list(range(len(one.peers)))
        self.offers[one.number] = []
        one.got = max(0, one.got - unseen)

    def reserve(self, one: Generation, hop: int, kind: str) -> None:
        """One hop lets the new epoch in, and says what its cache holds: with `kind` all of it, as far back as its last
        step, only the whole, or nothing. Once all have, the circuit starts."""
        peer, cache = one.peers[hop], self.caches[one.number, hop]
        self.forming[one.number].remove(hop)
        self.tell(peer, events.SessionEnded(one.sessions[hop]))
        session = one.sessions[hop] = self.session(one, hop, self.epochs[one.number])
        if kind == "nothing":
            cache.begin(0)
        held = cache.settle()
        least = {"all": 0, "latest": cache.began, "whole": held, "nothing": 0}[kind]
        self.tell(peer, events.SessionOpened(session))
        self.tell(peer, events.SessionReady(session, held, least))
        self.offers[one.number].append((least, min(held, one.prompt_tokens + one.got - 1)))
        if self.forming[one.number]:
            return
        del self.forming[one.number]
        position = common_position(self.offers.pop(one.number))
        self.positions.append(position)
        self.start(one, position)

    def _note(self, peer: int, effect: events.HopEffect[HopSession, Any]) -> None:
        if not isinstance(effect, events.DeliverTokens):
            super()._note(peer, effect)
            return
        for session, _, position, *_ in effect.tokens:
            one = self.generation(session)
            if session.key.epoch == self.epochs[one.number]:
                assert position == one.prompt_tokens + one.got, "a token is lost or comes twice"
                one.got += 1

    def _answer(
        self, effect: events.ComputeBatch[HopSession, Any] | events.ComputeSlice[HopSession, Any]
    ) -> events.HopEvent[HopSession, Any]:
        if isinstance(effect, events.ComputeBatch):
            for step in effect.steps:
                cache = self._cache(step)
                cache.begin(step.position)
                cache.append(step.payload, step.guesses)
        else:
            slice_ = effect.slice_
            for step, tokens in zip(slice_.parts, slice_.size.tokens, strict=True):
                cache, done = self._cache(step), step.tokens - step.left_tokens
                if slice_.begins and not done:
                    cache.begin(step.position)
                assert len(cache.tokens) == step.position + done
                if slice_.layers_left == slice_.size.layers:
                    cache.append(step.payload[done : done + tokens])
        return super()._answer(effect)

    def _cache(self, step: HopStep[HopSession, Any]) -> ModelledCache:
        assert not step.session.ended, "the engine is given a session that has ended"
        return self.caches[self.generation(step.session).number, step.session.place.hop]
