"""What attention remembers of one session: its block tables in the engine's pool."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from molink.shards.kv.block_table import BlockTable
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_memory import KvMemory, LayerLayout, raw_bytes, write_raw
from molink.shards.kv.kv_pool import KvPool
from molink.shards.kv.session_state import raw_states, write_raw_states
from molink.shards.spec import KV_BLOCK_TOKENS, STATES_KEPT, Span


class CacheFull(ValueError):
    """The session has used all tokens that its lease reserved."""

    def __init__(self, wanted_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"this step needs room for {wanted_tokens} tokens but the lease reserved {capacity_tokens}: "
            "reserve more tokens, or end the session"
        )
        self.wanted_tokens = wanted_tokens
        self.capacity_tokens = capacity_tokens


class SequenceCache:
    """The KV state of one session on one hop, of at most `capacity_tokens` tokens. Made by `open_cache`.

    Slot 2i is the keys and slot 2i + 1 the values of the span's i-th layer, `index_slot` its index keys. Its blocks
    go back to the pool when it is closed or nothing refers to it any more.
    """

    __slots__ = (
        "__weakref__",
        "_guesses",
        "_names",
        "_order",
        "_pool",
        "_state",
        "_stored",
        "_tables",
        "began",
        "capacity_tokens",
        "certain_tokens",
        "closed",
        "last_step",
        "layouts",
        "length",
        "reserved",
        "span",
    )  # fmt: skip

    def __init__(
        self,
        pool: KvPool,
        span: Span,
        layouts: Sequence[LayerLayout],
        tables: Sequence[BlockTable],
        state: BlockTable | None,
        capacity_tokens: int,
        *,
        reserved: bool,
    ) -> None:
        self.span = span
        self.layouts = tuple(layouts)
        self.capacity_tokens = capacity_tokens
        self.length = 0
        self.began = 0
        """Its length when its latest step began: that far `truncate` can go back until the next one does."""
        self.certain_tokens = 0
        """So many of its tokens are the sequence's, whatever follows; those behind were guesses of its latest step."""
        self._guesses = 0
        """Of the step that is under way."""
        self.reserved = reserved
        """Whether all blocks that it may need are its own already; else it takes them as it grows."""
        self.closed = False
        """Whether its session has ended; a step that began before may still use it."""
        self.last_step = 0
        """The engine's latest step in which it was."""
        self._pool = pool
        self._tables = tuple(tables)
        self._state = state
        slots: list[int] = []
        for table in tables:
            own = table.kind.layers
            slots += [2 * (layer - span.start) + part for layer in own for part in (0, 1)]
            slots += [self.index_slot(layer) for layer in own if self.layouts[layer - span.start].index_dim]
        self._order = slots if len(tables) > 1 else None
        self._names: tuple[bytes, ...] = ()
        self._stored: list[Tensor] | None = None
        """Keys and values [1, heads, tokens, dim] in the host's memory, by table and layer; then states."""

    @property
    def nbytes(self) -> int:
        """Memory of its blocks, shared ones included."""
        return sum(len(table.blocks) * table.kind.block_bytes for table in self.tables)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """One for the layers that see everything, one for each window, one for states if layers keep some."""
        return self._tables if self._state is None else (*self._tables, self._state)

    @property
    def states(self) -> dict[int, tuple[Tensor, ...]] | None:
        """What each layer keeps beside keys and values, [1, *shape] of each; None before there are tokens."""
        if self._state is None or self.length == 0:
            return None
        return self._pool.states(self._state)

    def write_states(self, states: Mapping[int, Sequence[Tensor]]) -> None:
        """They are those behind the tokens that will count next, of all layers. Those before the step stay too."""
        if self._state is not None:
            if self.length == self.began:
                self._state.blocks.reverse()
            for layer, kept in self._pool.states(self._state).items():
                for view, state in zip(kept, states[layer], strict=True):
                    view.copy_(state)

    @property
    def holds_blocks(self) -> bool:
        """Not before it has grown, nor while its blocks are in the host's memory, nor when it has been closed."""
        return not self.closed and any(table.blocks for table in self.tables)

    def has_blocks_for(self, tokens: int) -> bool:
        """Whether so many more have blocks of its own now, behind those that count."""
        end = _blocks(self.length + tokens)
        return all(table.end >= end for table in self._tables) and bool(self.tables[-1].blocks)

    @property
    def least_length(self) -> int:
        """It can go back to so many tokens and to any more, and always begin anew: by `truncate`, or behind a step with
        guesses and states by its engine's `begin_behind`."""
        if self._state is not None:
            goes_back = self.length - self.began == 1 or self.certain_tokens < self.length
            return self.began if goes_back else self.length
        return max(table.least_length for table in self._tables)

    def index_slot(self, layer: int) -> int:
        """The slot of the index keys of a layer that has some."""
        before = self.layouts[: layer - self.span.start]
        return 2 * len(self.span) + sum(layout.index_dim > 0 for layout in before)

    def require(self, tokens: int) -> None:
        """Raises CacheFull unless `tokens` more fit the capacity, and PoolFull where they would but there are no
        blocks for them. A suspended cache is back afterwards."""
        wanted = self.length + tokens
        if wanted > self.capacity_tokens:
            raise CacheFull(wanted, self.capacity_tokens)
        if self._stored is not None:
            self._resume(wanted)
        elif any(table.end < _blocks(wanted) for table in self._tables) or not self.tables[-1].blocks:
            self._drop_passed()
            self.take_blocks(wanted)

    def slots(self, start: int, tokens: int) -> list[Tensor] | None:
        """Views [1, heads, tokens, dim] of tokens [start, start + tokens), one for each slot, as far as windows have
        left them; None where some lie in several runs of blocks."""
        if self._order is None:
            (table,) = self._tables
            runs = _views(self._pool, table, start, start + tokens)
            return runs[0] if len(runs) == 1 else None
        parts = self.parts(start, tokens)
        return [views[0] for views in parts] if all(len(views) == 1 for views in parts) else None

    def parts(self, start: int, tokens: int) -> list[list[Tensor]]:
        """As `slots`, but for each slot the views of all runs in order."""
        found = [
            list(views)
            for table in self._tables
            for views in zip(*_views(self._pool, table, start, start + tokens), strict=True)
        ]
        if self._order is None:
            return found
        ordered = found.copy()
        for slot, views in zip(self._order, found, strict=True):
            ordered[slot] = views
        return ordered

    def begin_step(self, guesses: int = 0) -> None:
        """A step begins here, in one piece or several; so many of its tokens, the last ones, are guesses."""
        self.began, self._guesses = self.length, guesses

    def place_of(self, layer: int) -> tuple[int, int]:
        """The number of the layer's table, and which of the table's layers it is."""
        for number, table in enumerate(self._tables):
            if layer in table.kind.layers:
                return number, table.kind.layers.index(layer)
        raise KeyError(layer)

    def runs(self, table: int, tokens: int) -> list[tuple[KvMemory, int, int]]:
        """The first `tokens` tokens in the layers of the table of this number, as `KvPool.runs`."""
        return self._pool.runs(self._tables[table], 0, tokens)

    def advance(self, tokens: int) -> None:
        """What was written behind its end counts from now on.

        Blocks that windows had passed when the step began are free then, unless blocks are reserved: such are exchanged
        for others, many at a time, when they are needed.
        """
        full = self.length // KV_BLOCK_TOKENS
        self.length += tokens
        self.certain_tokens = self.length - self._guesses
        self._share(full)
        if not self.reserved:
            self._drop_passed()

    def name_blocks(self, names: Sequence[bytes]) -> None:
        """Hashes of the session's tokens up to the end of each block: full blocks can be shared from now on, those
        to come when they are full."""
        self._names = tuple(names)
        self._share(0)

    def truncate(self, length: int, *, same_tokens: bool = False) -> None:
        """Forgets the tokens from position `length` on, and their blocks' names unless the `same_tokens` follow.

        Raises ValueError where it is not that long, or a window or a state has left behind what `length`, unless it is
        0, would need, and PoolFull where what it shares would have to be copied and cannot.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.certain_tokens = min(self.certain_tokens, length)
        if same_tokens and length == self.length:
            return
        if self._stored is not None:
            self._resume(self.length)
        goes_back = self._state is not None and self.began == length < self.length
        if 0 < length < (self.least_length if self._state is None else self.length) and not goes_back:
            what = "a sliding window has passed" if self._state is None else "states have left behind"
            raise ValueError(f"cannot truncate to {length}: {what} what came before")
        if self._state is not None and goes_back:
            self._state.blocks.reverse()
        elif length < self.least_length:
            self._pool.clear(self._tables)
            self.length = 0
            self.take_blocks(0)
        if not self.reserved and length % KV_BLOCK_TOKENS == 0:
            self._pool.cut(self._tables, length // KV_BLOCK_TOKENS)
        else:
            self._pool.make_writable(self._tables, length)
        if not same_tokens:
            self._names = self._names[: length // KV_BLOCK_TOKENS]
        self.length = length
        self.began = min(self.began, length)

    def export(self, start: int, stop: int) -> bytearray:
        """Tokens [start, stop) of all layers as raw bytes, for a cache of equal layouts elsewhere. Of layers with a
        window only the blocks that the token behind `stop` can see; where layers keep states, these come last.

        Raises ValueError where there are no such tokens (any more), or states are not those behind `stop`.
        """
        passed = any(table.kept_from(stop) < table.first for table in self._tables)
        passed = passed or (self._state is not None and stop != self.length)
        if not 0 <= start <= stop <= self.length or passed or self._stored is not None:
            raise ValueError(f"cannot export tokens [{start}, {stop}) of a cache of {self.length}")
        exported = bytearray()
        kept = [max(start, table.kept_from(stop) * KV_BLOCK_TOKENS) for table in self._tables]
        for views in self._views(kept, stop):
            exported += raw_bytes(views)
        return exported + raw_states(self.states or {})

    def restore(self, start: int, tokens: int, exported: bytes | bytearray | memoryview) -> None:
        """Writes what `export` of `tokens` tokens gave at position `start`, which becomes this cache's end.

        Raises CacheFull, PoolFull, and ValueError where there would be a gap or the bytes are not as many as they
        should be.
        """
        view = memoryview(exported).cast("B")
        stop = start + tokens
        kept = [max(start, table.kept_from(stop) * KV_BLOCK_TOKENS) for table in self._tables]
        expected = sum(
            (stop - first) * (table.kind.block_bytes // KV_BLOCK_TOKENS)
            for table, first in zip(self._tables, kept, strict=True)
        )
        expected += 0 if self._state is None else self._state.kind.block_bytes
        if not 0 <= start <= self.length or tokens < 1 or view.nbytes != expected:
            raise ValueError(
                f"{tokens} tokens at position {start} of a cache of {self.length} need {expected} bytes, "
                f"but {view.nbytes} came"
            )
        if stop > self.capacity_tokens:
            raise CacheFull(stop, self.capacity_tokens)
        self.truncate(start)
        self.require(tokens)
        self._write(kept, stop, view)
        self._guesses = 0
        self.advance(tokens)
        self.begin_step()  # what windows had passed has not come
        self._drop_passed()
        self.take_blocks(stop)

    def suspend(self) -> None:
        """Moves its blocks to the host's memory, until a step requires them. What others share stays theirs."""
        if self._stored is None and not self.closed:
            self._drop_passed()
            firsts = [table.first for table in self._tables]
            kept = [first * KV_BLOCK_TOKENS for first in firsts]
            with torch.inference_mode():
                self._stored = [torch.cat(views, 2).to("cpu") for views in self._views(kept, self.length)]
                self._stored += [state.to("cpu", copy=True) for state in self._all_states()]
            self._pool.clear(self.tables)
            for table, first in zip(self._tables, firsts, strict=True):
                table.first = first

    def close(self, names: Sequence[bytes] = (), valid_tokens: int = 0) -> None:
        """Gives its blocks back, to be shared under these names as far as they are full of the first `valid_tokens`
        tokens: hashes as `name_blocks` takes them. From any thread; again has no effect."""
        if not self.closed:
            self.closed = True
            self._stored = None
            shared = names if self._state is None else ()
            full = min(self.length, valid_tokens) // KV_BLOCK_TOKENS
            self._pool.give_back(self.tables, shared[: max(0, full)])

    def hold(self, *, held: bool) -> None:
        """Whether a step that has begun will come to it later: its blocks stay until then, even if it is closed."""
        for table in self.tables:
            table.held = held

    def __del__(self) -> None:
        self.close()

    def take_blocks(self, tokens: int) -> None:
        """Takes blocks for so many tokens in all. With them all that it may hold at once, if they are reserved, else
        as many again where that can be, for longer runs. Raises PoolFull."""
        capacity = _blocks(self.capacity_tokens)
        wanted = capacity if self.reserved else min(2 * _blocks(tokens), capacity)
        try:
            self._pool.extend(self.tables, self._ends(tokens, wanted))
        except PoolFull:
            if self.reserved:
                raise
            self._pool.extend(self.tables, self._ends(tokens, 0))

    def _ends(self, tokens: int, wanted: int) -> list[int]:
        """How far each table is to reach: for so many tokens, and to `wanted` blocks as far as it may hold them."""
        ends = [max(_blocks(tokens), min(wanted, table.first + table.most)) for table in self._tables]
        return ends if self._state is None else [*ends, STATES_KEPT]

    def _drop_passed(self) -> None:
        for table in self._tables:
            passed = min(table.kept_from(self.began) - table.first, len(table.blocks))
            if passed > 0:
                self._pool.drop_first(table, passed)

    def _resume(self, tokens: int) -> None:
        """Takes blocks again and writes what was stored."""
        self.take_blocks(tokens)
        stored, self._stored = iter(self._stored or ()), None
        parts = self._views([table.first * KV_BLOCK_TOKENS for table in self._tables], self.length)
        with torch.inference_mode():
            for views, states in zip(parts, stored, strict=False):
                for view, part in zip(
                    views, states.split_with_sizes([view.shape[2] for view in views], 2), strict=True
                ):
                    view.copy_(part)
            for state in self._all_states():
                state.copy_(next(stored))

    def _all_states(self) -> list[Tensor]:
        """Those behind the latest step, and then those before it."""
        if self._state is None or self.length == 0:
            return []
        kept = [self._pool.states(self._state, moment) for moment in range(STATES_KEPT)]
        return [state for layers in kept for one in layers.values() for state in one]

    def _write(self, kept: Sequence[int], stop: int, view: memoryview) -> None:
        offset = 0
        with torch.inference_mode():
            for views in self._views(kept, stop):
                size = sum(view.numel() * view.itemsize for view in views)
                if size:
                    write_raw(views, view[offset : offset + size])
                offset += size
            if self._state is not None:
                write_raw_states(self._pool.states(self._state), view[offset:])

    def _views(self, kept: Sequence[int], stop: int) -> Iterator[tuple[Tensor, ...]]:
        """For each table, from its token in `kept` on, and each of its slots the views of all runs up to `stop`."""
        for table, first in zip(self._tables, kept, strict=True):
            yield from zip(*_views(self._pool, table, first, stop), strict=True)

    def _share(self, full: int) -> None:
        """Shares blocks that have become full since there were `full` of them."""
        if self._names:
            for table in self._tables:
                self._pool.publish(table, self._names, full, self.length // KV_BLOCK_TOKENS)


def _blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)


def _views(pool: KvPool, table: BlockTable, start: int, stop: int) -> list[list[Tensor]]:
    """Tokens [start, stop) of a table, as far as they are still there: for each run of blocks a view of every slot."""
    return [memory.slots(first, tokens) for memory, first, tokens in pool.runs(table, start, stop)]
