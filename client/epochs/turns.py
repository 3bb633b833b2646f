"""Whose turn it is among one client's generations to ask a swarm for a circuit. Pure: the time is an argument.

While there is room all ask that come, so many at once. A refusal for want of room says that the swarm is full: from
then on one asks for each of the client's own generations that ends. Whether others have made room is found out by one
that asks now and then; if it gets a circuit, more ask at once, twice as many each time.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from molink.shards.backoff import Backoff

MOST_ASKING = 16
"""Generations that ask at once: each has a route planned."""
MOST_WAITING = 1024
"""Generations that wait for their turn; more are refused."""
MOST_REFUSED = 3
"""Who found no room so often where one of the client's own had been needs more than others, who go first then."""
PROBES = Backoff(first_s=0.25, longest_s=1.0, jitter=0.5)
"""A swarm that is full is asked again after so long in which none of the client's own generations began or ended."""
LONGEST_PUT_OFF_S = 2.0
"""So long after it could have been asked it is asked all the same: of a client whose generations begin and end all the
time nobody else would ever learn that others have made room."""

Key = TypeVar("Key")


class _Cause(Enum):
    """Why it is somebody's turn."""

    NOT_FULL = "nobody was refused"
    ROOM = "a generation has ended, whose room is there"
    PROBE = "there may be room"


@dataclass(slots=True)
class _QueuedGeneration:
    scope: bytes
    order: int
    refused_room: int = 0
    """How often there was no room for it where one of the client's own had been."""
    refused_probes: int = 0


@dataclass(slots=True)
class _Fullness:
    """What is known of a swarm that has refused for want of room."""

    probe_s: float
    """When one asks all the same."""
    latest_s: float
    """It is not put off for longer than until then."""
    room: int = 0
    """Own generations that have ended, for which nobody has asked yet."""
    probes: int = 1
    """How many may ask at once to find out."""
    fruitless: int = 0

    @classmethod
    def asked_at(cls, probe_s: float) -> "_Fullness":
        return cls(probe_s, probe_s + LONGEST_PUT_OFF_S)

    def ask_at(self, probe_s: float) -> None:
        """One asks then, or when the client's generations have been quiet for long enough."""
        self.probe_s, self.latest_s = probe_s, probe_s + LONGEST_PUT_OFF_S


@dataclass(slots=True)
class TurnQueue(Generic[Key]):
    """Turn queue of one client and model. Of those that wait it is the turn of the one whose scope, such as a user of a
    gateway, has the fewest generations under way, and of these the first that came."""

    progressed_s: float = -math.inf
    """When one of the client's generations last got its circuit, or ended."""
    _waiting: dict[Key, _QueuedGeneration] = field(default_factory=dict)
    _asking: dict[Key, tuple[_Cause, _QueuedGeneration]] = field(default_factory=dict)
    _begun: dict[Key, _QueuedGeneration] = field(default_factory=dict)
    """Those that have a circuit, or wait for something else than room."""
    _full: _Fullness | None = None
    _entered: int = 0

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def enter(self, key: Key, scope: bytes, *, at_once: bool = False) -> bool:
        """A generation is to begin. `at_once`: a circuit is held for it, so that it asks before all others. False: too
        many wait."""
        one = _QueuedGeneration(scope, self._entered)
        self._entered += 1
        if at_once:
            self._asking[key] = _Cause.NOT_FULL, one
        elif len(self._waiting) < MOST_WAITING:
            self._waiting[key] = one
        else:
            return False
        return True

    def next_turns(self, now_s: float) -> list[Key]:
        """Returns those whose turn it is now, from when on they count as asking."""
        turns: list[Key] = []
        while self._waiting and len(self._asking) < MOST_ASKING:
            found = self._next(now_s)
            if found is None:
                break
            key, cause = found
            self._asking[key] = cause, self._waiting.pop(key)
            turns.append(key)
        return turns

    @property
    def is_full(self) -> bool:
        """Whether the swarm has refused for want of room, as far as is known."""
        return self._full is not None

    @property
    def look_s(self) -> float:
        """When to ask for the next turns even if nothing happens; infinite: never."""
        full = self._full
        if full is None or not self._waiting or self._probing >= full.probes:
            return math.inf
        return full.probe_s if len(self._asking) < MOST_ASKING else math.inf

    def granted(self, key: Key, now_s: float) -> None:
        """Every hop of a circuit has granted its lease. No error if it was not its turn."""
        cause, one = self._asking.pop(key, (None, None))
        if one is None:
            return
        self._begun[key], self.progressed_s = one, now_s
        if self._full is not None and cause is _Cause.PROBE:
            self._full.fruitless = 0
            self._full.probes = min(MOST_ASKING, 2 * self._full.probes)
            self._full.ask_at(now_s)
        self._settle(now_s)

    def refused(self, key: Key, now_s: float, draw: float = 0.5) -> None:
        """There is no room for it now: it waits at its old place. `draw`, uniform in [0, 1), keeps clients from asking
        in unison."""
        cause, one = self._asking.pop(key, (None, None))
        one = one or self._begun.pop(key)
        self._waiting[key] = one
        full = self._full = self._full or _Fullness.asked_at(now_s + PROBES.after(1, draw))
        one.refused_room += cause is _Cause.ROOM
        if cause is _Cause.PROBE:
            one.refused_probes += 1
            full.fruitless, full.probes = full.fruitless + 1, 1
            full.ask_at(now_s + PROBES.after(full.fruitless, draw))

    def set_aside(self, key: Key) -> None:
        """It waits for something else than room. No error if it was not its turn."""
        cause, one = self._asking.pop(key, (None, None))
        if one is not None:
            self._begun[key] = one
            self._put_back(cause)

    def leave(self, key: Key, now_s: float) -> None:
        """The generation has ended, or nobody wants it any more."""
        cause, _ = self._asking.pop(key, (None, None))
        self._put_back(cause)
        self._waiting.pop(key, None)
        if self._begun.pop(key, None) is not None:
            self.progressed_s = now_s
            self._put_back(_Cause.ROOM)
        self._settle(now_s)

    def _put_back(self, cause: _Cause | None) -> None:
        if self._full is not None and cause is _Cause.ROOM:
            self._full.room += 1

    def _settle(self, now_s: float) -> None:
        """A swarm that nobody waits for is asked by whoever comes next."""
        full = self._full
        if not self._waiting and not self._asking:
            self._full = None
        elif full is not None and full.probe_s > now_s:
            put_off_s = max(full.probe_s, now_s + PROBES.after(max(1, full.fruitless)))
            full.probe_s = min(full.latest_s, put_off_s)

    @property
    def _probing(self) -> int:
        return sum(cause is _Cause.PROBE for cause, _ in self._asking.values())

    def _next(self, now_s: float) -> tuple[Key, _Cause] | None:
        under_way = Counter(one.scope for one in self._begun.values())
        under_way.update(one.scope for _, one in self._asking.values())
        ranks = {
            key: (one.refused_room // MOST_REFUSED, under_way[one.scope], one.order)
            for key, one in self._waiting.items()
        }
        full, first = self._full, min(ranks, key=lambda key: ranks[key])
        if full is None:
            return first, _Cause.NOT_FULL
        if full.room:
            full.room -= 1
            return first, _Cause.ROOM
        if now_s >= full.probe_s and self._probing < full.probes:
            probes = {key: one.refused_probes for key, one in self._waiting.items()}
            return min(ranks, key=lambda key: (probes[key], ranks[key])), _Cause.PROBE
        return None
