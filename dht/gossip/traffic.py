"""Traffic counters of the control plane, and the pace that its sending keeps."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import trio

from molink.dht.membership.send_pace import CONNECTION_BYTES, WIRE_BYTES, SendPace

Kind = Literal["gossip", "table"]


@dataclass(slots=True)
class TrafficCounters:
    """Counters by kind, of the application's bytes: frames, without what yamux, noise and TCP add."""

    messages_in: Counter[str] = field(default_factory=Counter)
    messages_out: Counter[str] = field(default_factory=Counter)
    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    pace: SendPace = field(default_factory=SendPace)
    """Of everything that is sent, with what is added to it."""
    _turn: trio.Lock = field(default_factory=trio.Lock)

    def count_received(self, kind: Kind, size_bytes: int) -> None:
        self.messages_in[kind] += 1
        self.bytes_in[kind] += size_bytes

    def count_sent(self, kind: Kind, size_bytes: int, messages: int = 1) -> None:
        """Counts one frame on the wire."""
        self.messages_out[kind] += messages
        self.bytes_out[kind] += size_bytes
        self.pace = self.pace.after(trio.current_time(), size_bytes + WIRE_BYTES)

    def count_connection(self) -> None:
        """Counts what it takes to connect."""
        self.pace = self.pace.after(trio.current_time(), CONNECTION_BYTES)

    async def wait_turn(self, most_s: float) -> None:
        """Waits until what can wait may be sent, for at most so long; those who wait go one after the other."""
        with trio.move_on_after(most_s):
            async with self._turn:
                await trio.sleep(self.pace.wait_s(trio.current_time()))
