"""The thread that a draft model guesses on, beside the event loop and the engine of what is served.

Sessions open a sequence, say what it has more, and ask; who has asked is answered in time, with guesses or without.
What is asked meanwhile joins at the next place. While an answer is overdue nobody asks; a draft that fails, or hangs,
is left out for good.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeAlias

from molink.peer.device.device import give_back_memory
from molink.peer.drafting.draft_engine import DraftEngine, DraftOrder, Guessed
from molink.peer.speculation.told_draft import DraftTimes, ToldDraft
from molink.shards.spec import SamplingParams

LATE_FACTOR: Final = 4.0
"""An answer is late that takes so many times as long as answers take, but not before LEAST_LATE_S."""
LEAST_LATE_S, MOST_LATE_S = 0.05, 1.0
HUNG_S: Final = 10.0
"""After so long without a sign of life behind a late answer nobody asks any more."""
MOST_ORDERS: Final = 256
"""That wait for the thread; what is said beyond is lost, and so is the draft: it hangs."""
STOP_TIMEOUT_S: Final = 5.0
PARTS_PLACES: Final = 3
"""An answer may have to wait for a part of another sequence, which takes about as long as so many places."""
Order: TypeAlias = Callable[[DraftEngine], object]
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _DraftWait:
    """A session that waits for guesses."""

    told: ToldDraft
    places: int
    done: Callable[[], None]
    length: int
    """Of the sequence then."""
    begun_s: float
    beside: int
    """How many are guessed for together, itself included."""
    alarm: asyncio.TimerHandle | None = None


class DraftThread:
    """Owns the thread, and who waits for it. Open between `__aenter__` and `__aexit__`; used on the event loop."""

    def __init__(
        self,
        engine: DraftEngine,
        times: DraftTimes,
        most_sequences: int,
        least_late_s: float = LEAST_LATE_S,
        hung_s: float = HUNG_S,
    ) -> None:
        self.times = times
        self.cache_bytes = engine.cache_bytes_of(most_sequences)
        """Of the KV caches of as many sequences as there may be."""
        self._window_tokens = engine.window_tokens
        self._most_sequences = most_sequences
        self.least_late_s = least_late_s
        """No answer is late before that."""
        self._hung_s = hung_s
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(engine,), name="draft", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, weakref.ref[ToldDraft]]] = {}
        """Sequences by their numbers, with whose they are."""
        self._asked: dict[int, _DraftWait] = {}
        self._hung: asyncio.TimerHandle | None = None
        """Goes off where no sign of life comes."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the step that has begun."""
        self._leave_out()
        self._note_alive()
        self._loop = None
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def open(self, client: str, params: SamplingParams, seed: int) -> ToldDraft | None:
        """A sequence of that client's, whose tokens are drawn so; None: there are as many as there may be, or the draft
        is left out. It is closed by then at the latest that nothing refers to what is returned, or before that where
        another client has fewer."""
        is_away = self.times.is_left_out or self.times.is_resting
        if self._loop is None or is_away:
            return None
        if len(self._open) >= self._most_sequences:
            sequences = self._open.copy()
            if (spared := _spared_for(client, sequences)) is None:
                return None
            if (other := sequences[spared][1]()) is not None:
                other.is_closed = True
            self.close(spared)
        number = next(self._numbers)
        told = ToldDraft(self, number, self.times, self._window_tokens)
        self._open[number] = client, weakref.ref(told)
        weakref.finalize(told, self.close, number).atexit = False
        self._put(lambda engine: engine.open(number, params, seed))
        return told

    def rest(self, device: str) -> None:
        """Its memory on that device is free before long, until `wake`. Again has no effect."""
        times = self.times
        if times.is_waking or not times.is_resting:
            times.is_resting, times.is_waking = True, False
            self._put(lambda engine: _rest(engine, device))

    def wake(self) -> None:
        """It is loaded again, and guesses for sessions that begin from then on."""
        if self.times.is_resting and not self.times.is_waking:
            self.times.is_waking = True
            self._put(self._wake)

    def feed(self, told: ToldDraft) -> None:
        """What the sequence has more is computed while nobody waits."""
        order = DraftOrder(told.number, told.take_new(), told.length)
        self._put(lambda engine: engine.take(order))

    def ask(self, told: ToldDraft, places: int, done: Callable[[], None]) -> None:
        """So many tokens are to be guessed of what comes next. `done` is called on the loop, once and before long; what
        was guessed has been told then, if anything was."""
        if self._loop is None or self.times.is_left_out:
            asyncio.get_running_loop().call_soon(done)
            return
        if (before := self._asked.get(told.number)) is not None:  # of an epoch that is over
            self._answer([(told.number, before.length, ())])
        asked = _DraftWait(told, places, done, told.length, time.perf_counter(), 1 + len(self._asked))
        for other in self._asked.values():
            other.beside = max(other.beside, asked.beside)
        self._asked[told.number] = asked
        expected_s = LATE_FACTOR * (places + PARTS_PLACES) * self.times.place_ms(asked.beside) / 1000
        late_s = min(MOST_LATE_S, expected_s)
        asked.alarm = self._loop.call_later(max(self.least_late_s, late_s), self._be_late, told.number)
        order = DraftOrder(told.number, told.take_new(), told.length, places)
        self._put(lambda engine: self._begin(engine, order))

    # -- on the loop

    def _put(self, order: Order) -> None:
        if self._orders.qsize() >= MOST_ORDERS:
            self._give_up("it does not take what it is told")
        elif not self.times.is_left_out:
            self._orders.put(order)

    def close(self, number: int) -> None:
        """As `Drafts.close`. From any thread: whoever lets go of the sequence last."""
        if self._open.pop(number, None) is not None:
            self._orders.put(lambda engine: engine.close(number))

    def _be_late(self, number: int) -> None:
        if (asked := self._asked.pop(number, None)) is None:
            return
        if number in self._open:  # of a sequence that has been closed no answer comes
            _record(self.times, asked)
            self.times.is_late = True
            if self._hung is None:
                reason = f"it gave no sign of life for {self._hung_s:g} s"
                self._hung = asyncio.get_running_loop().call_later(self._hung_s, self._give_up, reason)
        asked.done()

    def _note_alive(self) -> None:
        self.times.is_late = False
        if self._hung is not None:
            self._hung.cancel()
            self._hung = None

    def _note_awake(self) -> None:
        if self.times.is_waking:  # else it is to rest again
            self.times.is_resting = self.times.is_waking = False

    def _answer(self, answers: Sequence[tuple[int, int, Guessed]]) -> None:
        for number, length, guesses in answers:
            asked = self._asked.get(number)
            if asked is None or asked.length != length:
                continue  # it was late, and the sequence has gone on
            del self._asked[number]
            if asked.alarm is not None:
                asked.alarm.cancel()
            if guesses:
                _record(self.times, asked)
                if asked.told.length == length:
                    asked.told.tell(guesses)
            asked.done()

    def _give_up(self, reason: str) -> None:
        if self.times.is_left_out:
            return
        _log.warning("the draft model is left out until this peer starts again: %s", reason)
        self._leave_out()

    def _leave_out(self) -> None:
        self.times.is_left_out = True
        self._orders.put(None)
        self._answer([(number, asked.length, ()) for number, asked in self._asked.items()])

    # -- on the thread

    def _run(self, engine: DraftEngine) -> None:
        try:
            while _do_orders(self._orders, engine):
                through = engine.guess_next() if engine.waits else []
                if through:
                    self._tell(self._answer, through)
                if engine.lacks and (through or not engine.waits):
                    engine.compute_next()  # a part between two answers at least, so that nobody starves
                if self.times.is_late:
                    self._tell(self._note_alive)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: guesses are not worth a session
            self._tell(self._give_up, f"{type(error).__name__}: {error}")

    def _wake(self, engine: DraftEngine) -> None:
        engine.wake()
        self._tell(self._note_awake)

    def _begin(self, engine: DraftEngine, order: DraftOrder) -> None:
        if not engine.take(order):
            self._tell(self._answer, [(order.number, order.length, ())])

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(what, *arguments)


def _rest(engine: DraftEngine, device: str) -> None:
    engine.rest()
    give_back_memory(device)


def _do_orders(orders: "queue.SimpleQueue[Order | None]", engine: DraftEngine) -> bool:
    """Does what has been ordered; waits for an order while nothing else is to be done. Whether it goes on."""
    blocks = not (engine.waits or engine.lacks)
    while True:
        try:
            order = orders.get(block=blocks)
        except queue.Empty:
            return True
        if order is None:
            return False
        order(engine)
        blocks = False


def _spared_for(client: str, sequences: Mapping[int, tuple[str, object]]) -> int | None:
    """The latest sequence of whoever has most; None where `client` would have more than that one without it."""
    counts = Counter(owner for owner, _ in sequences.values())
    most = max(counts, key=counts.__getitem__, default=client)
    if counts[most] < counts[client] + 2:
        return None
    return max(number for number, (owner, _) in sequences.items() if owner == most)


def _record(times: DraftTimes, asked: _DraftWait) -> None:
    """What that answer took, or has taken already."""
    times.record(asked.beside, asked.places, 1000 * (time.perf_counter() - asked.begun_s))
