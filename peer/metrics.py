"""What a peer counts, for its own log and for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram


class PeerMetrics:
    """Counters of one peer in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._steps = Counter("molink_steps", "Micro-batches computed", registry=self.registry)
        self._rows = Counter("molink_rows", "Token rows computed", registry=self.registry)
        self._sessions = Histogram(
            "molink_step_sessions",
            "Sessions in a micro-batch",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "molink_step_seconds", "Time of one micro-batch on the device", registry=self.registry
        )

    def stepped(self, compute_s: float, sessions: int, rows: int) -> None:
        """One micro-batch of `sessions` sessions and `rows` token rows took `compute_s` on the device."""
        self._steps.inc()
        self._rows.inc(rows)
        self._sessions.observe(sessions)
        self._seconds.observe(compute_s)
