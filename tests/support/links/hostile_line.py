"""A receiver that lies in its acknowledgements, on a line in virtual time beside honest ones."""

from dataclasses import dataclass, field

from support.links.virtual_line import Bottleneck, Clock, Conditions, VirtualLink, VirtualUplink

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import Send

RATE = 5.5e6
"""Of the home's uplink, bytes a second: 44 Mbps."""
DELAY_S = 0.015
HOSTILE = 0
PROMPT_BYTES = 2_700_000
"""What a prompt of 900 tokens is as activations of 768 numbers."""
MIB = 1024 * 1024
SOCKET_BYTES = MIB
"""What a connection takes in before a write waits."""


@dataclass(frozen=True)
class Lie:
    """How the hostile end acknowledges."""

    held_s: float = 0.0
    """An acknowledgement is held back for so long."""
    every_s: float = 0.0
    """No two acknowledgements leave closer together: what came meanwhile is acknowledged in one."""
    chunks: int = 10**9
    """At most so many chunks are acknowledged at a time."""
    never_after_s: float = float("inf")
    early: bool = False
    """Chunks are acknowledged when they are sent, a round trip later, whether or not they have arrived."""
    pace: float = 1.0
    """Stamps run at so many times the pace of a clock."""
    jump_s: float = 0.0
    """Stamps err by up to so much, either way."""
    congested_s: float = 0.0
    """All but the first stamps are late by so much: the way is said to be full."""


@dataclass
class HostileLink(VirtualLink):
    """The hostile end: what arrives is acknowledged as the lie has it."""

    lie: Lie = field(default_factory=Lie)
    _buffered_bytes: int = 0
    _said_s: float = -1.0
    _stamped: int = 0
    _acknowledged: int = 0
    _waits: bool = False
    _to_say: list[int] = field(default_factory=list)

    def is_writable(self) -> bool:
        """Who acknowledges what has not left keeps the socket's buffer full."""
        return self._buffered_bytes < SOCKET_BYTES

    def _carry(self, part: Send, sequence: int, hop: int, connection: int) -> None:
        if hop == 0:
            self._buffered_bytes += part.size_bytes
        else:
            was_full = self._buffered_bytes >= SOCKET_BYTES
            self._buffered_bytes -= part.size_bytes
            if was_full and self._buffered_bytes < SOCKET_BYTES:
                self.clock.at(self.clock.now_s, self.write)
        if self.lie.early and hop == 0:
            self.clock.at(self.clock.now_s + 2 * DELAY_S, lambda: self._say(sequence))
        super()._carry(part, sequence, hop, connection)

    def _acknowledge(self, sequence: int) -> None:
        self._pending.clear()
        if not self.lie.early:
            self.clock.at(self.clock.now_s + DELAY_S + self.lie.held_s, lambda: self._say(sequence))

    def _say(self, sequence: int) -> None:
        now_s, lie = self.clock.now_s, self.lie
        if now_s >= lie.never_after_s:
            return
        self._to_say.append(sequence)
        if not self._waits:
            self._waits = True
            self.clock.at(max(now_s, self._said_s + lie.every_s), self._let_go)

    def _let_go(self) -> None:
        self._waits = False
        self._said_s = self.clock.now_s
        until = min(max(self._to_say), self._acknowledged + self.lie.chunks)
        self._to_say = [one for one in self._to_say if one > until]
        arrivals = [(one, self._stamp_s()) for one in range(self._acknowledged + 1, until + 1)][-64:]
        if until > self._acknowledged:
            self._acknowledged = until
            self._acked(arrivals)
        if self._to_say and not self._waits:
            self._say(max(self._to_say))

    def _stamp_s(self) -> float:
        self._stamped += 1
        lie = self.lie
        late_s = lie.congested_s if self._stamped > 8 else 0.0
        return 1e4 + self.clock.now_s * lie.pace + self._random.uniform(-lie.jump_s, lie.jump_s) + late_s


class BesetUplink(VirtualUplink):
    """An uplink whose link 0 is hostile and always has bulk waiting; the other links are honest."""

    def __init__(self, lie: Lie | None, honest: int = 1, seed: int = 1, policy: str = "molink") -> None:
        """Without a lie the first link asks for nothing."""
        self.clock = Clock()
        self.uplink = Uplink(policy, limit_bytes=32 * MIB)
        self.bottleneck = Bottleneck(self.clock, RATE)
        conditions = Conditions(
            delay_s=DELAY_S, ack_jitter_s=0.002, arrival_jitter_s=0.001, late_timer_s=0.001, seed=seed
        )
        ends: list[VirtualLink] = [
            HostileLink(self.uplink, self.clock, HOSTILE, [self.bottleneck], conditions, lie=lie or Lie())
        ]
        ends += [
            VirtualLink(self.uplink, self.clock, number, [self.bottleneck], conditions)
            for number in range(1, honest + 1)
        ]
        self.links = ends
        self.lowest = float("inf")
        self.highest = 0.0
        self.start()

    def ask_always(
        self, from_s: float, until_s: float, every_s: float = 0.25, size_bytes: int = 4 * MIB
    ) -> None:
        """The hostile end has bulk waiting all the while."""

        def ask() -> None:
            while self.push(HOSTILE, TrafficClass.PREFILL, size_bytes, b"hostile"):
                pass
            if self.clock.now_s + every_s < until_s:
                self.clock.at(self.clock.now_s + every_s, ask)

        self.clock.at(from_s, ask)

    def prompts(self, link: int, times_s: list[float], size_bytes: int = PROMPT_BYTES) -> None:
        """Honest prompts, each whole."""
        for at_s in times_s:
            self.clock.at(at_s, lambda: self.push(link, TrafficClass.PREFILL, size_bytes, b"honest") or None)

    def watch(self, from_s: float, until_s: float, every_s: float = 0.05) -> None:
        """The least and the most that the uplink was taken to carry meanwhile."""

        def look() -> None:
            rate = self.uplink.uplink_bytes_per_s
            if rate is not None:
                self.lowest, self.highest = min(self.lowest, rate), max(self.highest, rate)
            if self.clock.now_s + every_s <= until_s:
                self.clock.at(self.clock.now_s + every_s, look)

        self.clock.at(from_s, look)
