"""Traffic counters of the control plane."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gossip", "table"]


@dataclass(slots=True)
class TrafficCounters:
    """Counters by kind, of the application's bytes: frames, without what yamux, noise and TCP add."""

    messages_in: Counter[str] = field(default_factory=Counter)
    messages_out: Counter[str] = field(default_factory=Counter)
    bytes_in: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)

    def count_received(self, kind: Kind, size_bytes: int, messages: int = 1) -> None:
        self.messages_in[kind] += messages
        self.bytes_in[kind] += size_bytes

    def count_sent(self, kind: Kind, size_bytes: int, messages: int = 1) -> None:
        self.messages_out[kind] += messages
        self.bytes_out[kind] += size_bytes
