"""Memory budget for messages that are not whole or not acknowledged, over all links of a process. Pure.

What a stranger can make a process hold is bounded here, whatever its links and identities: by identity, and by all
together. Where all is taken, an identity that holds more than who asks gives up what it has, strangers before members
of the swarm; strangers never take the last tenth.
"""

from collections import Counter
from collections.abc import Callable

LEAST_LIMIT_BYTES = 128 * 1024 * 1024
"""Of all links together: two frames of the largest size, each way."""
MOST_LIMIT_BYTES = 1024 * 1024 * 1024
CAP_PART = 16
"""A peer's messages may take one part in so many of its `--memory`."""
MEMBER_BYTES = 64 * 1024 * 1024
"""What one member may leave unfinished here: as much as one link may by the protocol (`reassembly`)."""
STRANGER_BYTES = 8 * 1024 * 1024
"""The same for who is not known to belong to the swarm: requests and prompts, which are token ids, are small."""
UNACKNOWLEDGED_BYTES = 48 * 1024 * 1024
"""What is kept of bulk for one identity until it acknowledges: the largest frame, and half of the next."""
_RESERVED = 10
"""One part in so many is kept for members."""


def message_limit_bytes(memory_bytes: int | None) -> int:
    """What the messages of a peer with so much memory may take together; None: a client's."""
    return min(MOST_LIMIT_BYTES, max(LEAST_LIMIT_BYTES, (memory_bytes or 0) // CAP_PART))


class MemoryAccount:
    """Memory account of one link. Made by `MessageMemory.open`."""

    __slots__ = ("_memory", "evicted", "identity", "in_bytes", "is_closed", "out_bytes", "room")

    def __init__(
        self, memory: "MessageMemory", identity: str, evicted: Callable[[], None], room: Callable[[], None]
    ) -> None:
        self.identity = identity
        self.in_bytes = 0
        """Of messages of the other end that are not whole, and of requests that are being answered."""
        self.out_bytes = 0
        """Of messages to the other end that it has not acknowledged."""
        self.evicted = evicted
        self.room = room
        self.is_closed = False
        self._memory = memory

    def take_in(self, size_bytes: int) -> bool:
        """Room for so much more of unfinished messages; False: there is none."""
        return self._memory.take_in(self, size_bytes)

    def give_in(self, size_bytes: int) -> None:
        """So much of them is not held any more."""
        if not self.is_closed:
            self.in_bytes -= size_bytes
            self._memory.given(self, size_bytes)

    def take_out(self, size_bytes: int, *, always: bool = False) -> bool:
        """Room for a message to be sent; False: none now, and `room` is called when there may be. `always`: what is
        small and has bounds of its own is counted only."""
        return self._memory.take_out(self, size_bytes, always=always)

    def give_out(self, size_bytes: int) -> None:
        """A message of that size is acknowledged, or dropped."""
        if not self.is_closed:
            self.out_bytes -= size_bytes
            self._memory.given(self, size_bytes, out=True)

    def close(self) -> None:
        """The link is gone with all that it held."""
        if not self.is_closed:
            self._memory.close(self)


class MessageMemory:
    """Memory budget of a process. Links take and give through their `MemoryAccount`."""

    def __init__(
        self, limit_bytes: int = LEAST_LIMIT_BYTES, is_member: Callable[[str], bool] = lambda _: True
    ) -> None:
        """`is_member`: whether an identity is known to belong to the swarm, or has a session here."""
        self.taken_bytes = 0
        self._limit_bytes = limit_bytes
        self._is_member = is_member
        self._holders: dict[MemoryAccount, None] = {}
        self._in: Counter[str] = Counter()
        self._out: Counter[str] = Counter()
        self._waiting: dict[MemoryAccount, int] = {}
        """Who found no room for a message of so many bytes."""

    def open(
        self,
        identity: str,
        evicted: Callable[[], None] = lambda: None,
        room: Callable[[], None] = lambda: None,
    ) -> MemoryAccount:
        """A link begins. `evicted` is called when all that it holds has to make room: the link is to be closed, and
        what it holds counts no more. `room` is called when there may be room where `take_out` found none."""
        holder = MemoryAccount(self, identity, evicted, room)
        self._holders[holder] = None
        return holder

    def take_in(self, holder: MemoryAccount, size_bytes: int) -> bool:
        """As `MemoryAccount.take_in`."""
        if holder.is_closed:
            return False
        held_bytes = self._in[holder.identity] + size_bytes
        if held_bytes > STRANGER_BYTES and held_bytes > self._share_bytes(holder.identity):
            return False
        if not self._make_room(holder, size_bytes):
            return False
        self._in[holder.identity] += size_bytes
        holder.in_bytes += size_bytes
        self.taken_bytes += size_bytes
        return True

    def take_out(self, holder: MemoryAccount, size_bytes: int, *, always: bool) -> bool:
        """As `MemoryAccount.take_out`."""
        if holder.is_closed:
            return False
        if not always and not (self._may_send(holder, size_bytes) and self._make_room(holder, size_bytes)):
            self._waiting[holder] = size_bytes
            return False
        self._out[holder.identity] += size_bytes
        holder.out_bytes += size_bytes
        self.taken_bytes += size_bytes
        return True

    def given(self, holder: MemoryAccount, size_bytes: int, *, out: bool = False) -> None:
        """A holder has given back."""
        (self._out if out else self._in)[holder.identity] -= size_bytes
        self.taken_bytes -= size_bytes
        if self._waiting:
            self._tell_room()

    def close(self, holder: MemoryAccount) -> None:
        """As `MemoryAccount.close`."""
        holder.is_closed = True
        del self._holders[holder]
        self._waiting.pop(holder, None)
        identity = holder.identity
        self._in[identity] -= holder.in_bytes
        self._out[identity] -= holder.out_bytes
        self.taken_bytes -= holder.in_bytes + holder.out_bytes
        holder.in_bytes = holder.out_bytes = 0
        if not any(other.identity == identity for other in self._holders):
            del self._in[identity], self._out[identity]
        self._tell_room()

    def _share_bytes(self, identity: str) -> int:
        return MEMBER_BYTES if self._is_member(identity) else STRANGER_BYTES

    def _make_room(self, holder: MemoryAccount, size_bytes: int) -> bool:
        """Whether so much fits, if need be after others have given up what they had begun."""
        if self.taken_bytes + size_bytes <= self._limit_bytes - self._limit_bytes // _RESERVED:
            return True
        member, limit_bytes = self._is_member(holder.identity), self._limit_of(holder.identity)
        while self.taken_bytes + size_bytes > limit_bytes:
            victim = self._victim(holder, size_bytes, member)
            if victim is None:
                return False
            self.close(victim)
            victim.evicted()
        return True

    def _victim(self, asks: MemoryAccount, size_bytes: int, member: bool) -> MemoryAccount | None:
        """The link that holds most of the identity that holds most: a stranger's where a member asks, or else one that
        would still hold more than who asks."""
        candidates = [
            one for one in self._holders if one.in_bytes + one.out_bytes and one.identity != asks.identity
        ]
        worst = max(candidates, key=self._weight, default=None)
        if worst is None:
            return None
        worst_is_member = self._is_member(worst.identity)
        if member and not worst_is_member:
            return worst
        holds_more = self._held_bytes(worst.identity) > self._held_bytes(asks.identity) + size_bytes
        return worst if holds_more and (member or not worst_is_member) else None

    def _weight(self, holder: MemoryAccount) -> tuple[bool, int, int]:
        identity = holder.identity
        return not self._is_member(identity), self._held_bytes(identity), holder.in_bytes + holder.out_bytes

    def _held_bytes(self, identity: str) -> int:
        return self._in[identity] + self._out[identity]

    def _may_send(self, holder: MemoryAccount, size_bytes: int) -> bool:
        """A message of any size may go to whom nothing is kept for."""
        held_bytes = self._out[holder.identity]
        return not held_bytes or held_bytes + size_bytes <= UNACKNOWLEDGED_BYTES

    def _limit_of(self, identity: str) -> int:
        return self._limit_bytes - (0 if self._is_member(identity) else self._limit_bytes // _RESERVED)

    def _tell_room(self) -> None:
        for holder, size_bytes in tuple(self._waiting.items()):
            fits = self.taken_bytes + size_bytes <= self._limit_of(holder.identity)
            if fits and self._may_send(holder, size_bytes):
                del self._waiting[holder]
                holder.room()
