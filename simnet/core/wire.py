"""The bytes of one peer's uplink in virtual time, and an account of them."""

from dataclasses import dataclass

from molink.simnet.lines.line import Line, LineCounters


@dataclass(frozen=True, slots=True)
class ByteAccount:
    """Of an uplink: everything that went in came out, or is on its way."""

    sent_bytes: int
    received_bytes: int
    lost_bytes: int
    on_the_way_bytes: int

    def check(self) -> None:
        """Raises AssertionError where bytes appeared or vanished."""
        accounted = self.received_bytes + self.lost_bytes + self.on_the_way_bytes
        if self.sent_bytes != accounted or self.on_the_way_bytes < 0:
            raise AssertionError(f"bytes are not conserved: {self}")


class AccountedUplink:
    """The account of an uplink's bytes."""

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._received_bytes = 0
        self._lost_bytes = 0

    @property
    def account(self) -> ByteAccount:
        settled = self._received_bytes + self._lost_bytes
        return ByteAccount(
            self._sent_bytes, self._received_bytes, self._lost_bytes, self._sent_bytes - settled
        )

    def received(self, size_bytes: int) -> None:
        """They are there."""
        self._received_bytes += size_bytes

    def lost(self, size_bytes: int) -> None:
        """They will never be of use: the other end is gone, or needs them no more."""
        self._lost_bytes += size_bytes


class Wire(AccountedUplink):
    """An uplink: bytes leave in the order in which they came, at its rate, wherever they go."""

    def __init__(self, rate_mbps: float, jitter_ms: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._line: Line[None] = Line(rate_mbps, jitter_ms=jitter_ms, seed=seed)

    @property
    def counters(self) -> LineCounters:
        return self._line.counters()

    def send(self, size_bytes: int, delay_s: float, now_s: float) -> float:
        """When the last of so many bytes is at the other end, a way of `delay_s` from here."""
        self._sent_bytes += size_bytes
        return self._line.carry(size_bytes, now_s) + delay_s

    def busy_s(self, now_s: float) -> float:
        """How long bytes have been leaving up to now, which is not before the latest `send`."""
        counters = self._line.counters()
        ahead_s = max(0.0, self._line.free_s - now_s)
        return max(0.0, counters.busy_s - ahead_s)
