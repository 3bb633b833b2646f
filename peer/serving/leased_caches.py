"""Leased caches: which KV cache a lease begins with, and how many tokens of the sequence are valid in it."""

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.sessions import ServedSession
from molink.shards.kv.prefix import names_at


class LeasedCaches:
    """Gives sessions their caches, and closes them. A cache outlives its epoch where the next one can go on with it."""

    def __init__(self, engine: StageEngine, *, reserve: bool) -> None:
        """With `reserve` a cache has all of its memory from the start."""
        self._engine = engine
        self._reserve = reserve

    def keep(self, older: ServedSession, session: ServedSession) -> None:
        """The session's epoch before this one is over, and nothing more of it is given to the engine: its cache waits
        for `open`, if it is for the same layers and as many tokens."""
        cache = older.kept_cache if older.cache is None else older.cache
        if cache is None:
            return
        if (cache.span, cache.capacity_tokens) == (session.span, session.plan.capacity_tokens):
            session.kept_cache = cache
        else:
            cache.close()

    def open(self, session: ServedSession) -> None:
        """The session has its cache from now on, and says what of the sequence is in it: all that the epoch before has
        left there, or else what others of this client have left of the prompt's beginning.

        On the engine's thread, so behind whatever it was still computing of the epoch before. Raises as
        `StageEngine.new_cache`.
        """
        cache = session.kept_cache
        if cache is None or cache.closed:
            plan = session.plan
            names = names_at(plan.prefix, session.owner.peer_id, session.before)
            cache = self._engine.new_cache(session.span, plan.capacity_tokens, names, reserve=self._reserve)
        elif not (session.plan.prefix and session.shares):
            cache.name_blocks(())  # what is computed from here on may be upon what another peer has sent
        if cache.certain_tokens < cache.length:
            self._engine.begin_behind(
                cache, cache.certain_tokens
            )  # guesses, of which nobody knows what became
        session.held_tokens, session.least_tokens = cache.length, cache.least_length
        session.cache = cache

    def close(self, session: ServedSession) -> None:
        """The session has left this peer."""
        for cache in (session.kept_cache, session.cache):
            if cache is not None:
                cache.close()
