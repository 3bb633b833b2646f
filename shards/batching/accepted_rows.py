"""Going back to what was accepted of a step's guesses where layers keep states, which do not go back themselves."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from molink.shards.batching.partial_step import Rows
from molink.shards.kv.kv_cache import SequenceCache


class AcceptedRows:
    """Owns what the latest steps with guesses were computed from, of caches with states: what was accepted of them is
    computed again from the states before."""

    def __init__(self) -> None:
        self._inputs: WeakKeyDictionary[SequenceCache, tuple[tuple[int, ...] | None, Tensor | None]] = (
            WeakKeyDictionary()
        )

    def keep(self, rows: Sequence[Rows], hidden: Tensor | None) -> None:
        """A step of these is over, of `hidden` states [tokens, hidden_size] where it did not start the model."""
        first = 0
        for row in rows:
            stop = first + row.count
            if row.guesses and any(layout.states for layout in row.cache.layouts):
                # a view would keep what others of the step were computed from, a prompt's rows maybe
                self._inputs[row.cache] = (
                    row.token_ids,
                    None if hidden is None else hidden[first:stop].clone(),
                )
            first = stop

    def until(self, cache: SequenceCache, length: int) -> tuple[Rows, Tensor | None] | None:
        """What is to be computed again from where the cache's latest step began, so that it is of that length; None: it
        goes back by itself, or not at all."""
        kept = self._inputs.get(cache) if cache.certain_tokens < cache.length else None
        if kept is None or not cache.began < length < cache.length:
            return None
        (ids, hidden), count = kept, length - cache.began
        again = Rows(cache, count, None if ids is None else ids[:count], 0)
        return again, None if hidden is None else hidden[:count]
