"""The scheduler of a process's uplink and the links that share it: whoever may send again is woken. Pure."""

import itertools
from collections.abc import Sequence
from typing import Protocol

from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import AckArrival, LinkEstimate, Outgoing, Send, Wait
from molink.peer.wire.transport.reassembly import MAX_PARTIAL_BYTES, MAX_PARTIAL_MESSAGES


class Sender(Protocol):
    """Sender: a link as the uplink knows it."""

    def wake(self) -> None:
        """Its answer from `next` may have changed."""

    def cancelled(self, message: int) -> None:
        """The uplink sends no more of a message."""


class SharedUplink:
    """Shared uplink: owner of the packet scheduler. Links are known by the numbers that `open` gives."""

    def __init__(self, policy: str = "molink") -> None:
        """Raises:
        ValueError: there is no policy of that name.
        """
        # What waits and is not all sent is what the other end may have to hold unfinished: its limits are ours.
        self._uplink = Uplink(policy, limit_bytes=MAX_PARTIAL_BYTES, limit_messages=MAX_PARTIAL_MESSAGES)
        self._senders: dict[int, Sender] = {}
        self._numbers = itertools.count(1)

    @property
    def uses_deadlines(self) -> bool:
        """As `Uplink.uses_deadlines`."""
        return self._uplink.uses_deadlines

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of the uplink, once it was measured."""
        return self._uplink.uplink_bytes_per_s

    def open(self, sender: Sender, now_s: float) -> int:
        """A link begins; its number."""
        number = next(self._numbers)
        self._senders[number] = sender
        self._uplink.open(number, now_s)
        return number

    def close(self, number: int) -> None:
        """A link is gone, with all that it had queued."""
        del self._senders[number]
        self._uplink.close(number)
        self._wake()

    def push(self, number: int, outgoing: Outgoing, now_s: float) -> bool:
        """As `Uplink.push`."""
        taken = self._uplink.push(number, outgoing, now_s)
        self._wake()
        return taken

    def next(self, number: int, now_s: float) -> Send | Wait:
        """As `Uplink.next`."""
        return self._uplink.next(number, now_s)

    def acked(self, number: int, sequence: int, arrivals: Sequence[AckArrival], now_s: float) -> None:
        """As `Uplink.acked`."""
        self._uplink.acked(number, sequence, arrivals, now_s)
        self._wake()

    def cancel(self, session: bytes, now_s: float) -> None:
        """Drops what is queued for a session alone, on every link."""
        for number, message in self._uplink.cancel(session, now_s):
            self._senders[number].cancelled(message)
        self._wake()

    def suspend(self, number: int, now_s: float) -> None:
        """As `Uplink.suspend`."""
        self._uplink.suspend(number, now_s)
        self._wake()

    def resume(self, number: int, received: int, now_s: float) -> None:
        """As `Uplink.resume`."""
        self._uplink.resume(number, received, now_s)
        self._wake()

    def expect_decode(self, number: int, at_s: float) -> None:
        """As `Uplink.expect_decode`."""
        self._uplink.expect_decode(number, at_s)
        self._wake()

    def estimate(self, number: int) -> LinkEstimate:
        """As `Uplink.estimate`."""
        return self._uplink.estimate(number)

    def _wake(self) -> None:
        for number in self._uplink.wake():
            self._senders[number].wake()
