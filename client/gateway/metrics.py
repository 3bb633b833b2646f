"""Metrics of the gateway, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from molink.client.api.generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
_RECOVERY_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 1.5, 2.5, 5, 10, 30)
_TPOT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class Metrics:
    """Counters of one application, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "molink_gateway_requests",
            "Requests answered",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._tokens = Counter(
            "molink_gateway_tokens", "Tokens of finished generations", ("kind",), registry=self._registry
        )
        self._trips = Counter(
            "molink_gateway_trips",
            "Trips round circuits that brought tokens of finished generations",
            registry=self._registry,
        )
        self._guesses = Counter(
            "molink_gateway_guesses",
            "Tokens guessed in finished generations, by outcome: accepted or rejected",
            ("outcome",),
            registry=self._registry,
        )
        self._ttft_s = Histogram(
            "molink_gateway_ttft_seconds",
            "Time to the first token, forming a circuit included",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._tpot_s = Histogram(
            "molink_gateway_tpot_seconds",
            "Mean time per token after the first",
            buckets=_TPOT_BUCKETS_S,
            registry=self._registry,
        )
        self._recoveries = Counter(
            "molink_gateway_recoveries",
            "Hops lost in mid-generation, by what went on: a standby with a copy of the KV cache, or another circuit",
            ("by",),
            registry=self._registry,
        )
        self._recovery_s = Histogram(
            "molink_gateway_recovery_seconds",
            "Time from a hop's loss to the next token",
            buckets=_RECOVERY_BUCKETS_S,
            registry=self._registry,
        )
        self._recomputed_tokens = Counter(
            "molink_gateway_recomputed_tokens", "Tokens computed again after losses", registry=self._registry
        )
        self._refused = Counter(
            "molink_gateway_refused",
            "Requests refused for their key (key_missing, key_wrong, ...) or its quota (requests, tokens, ...)",
            ("reason",),
            registry=self._registry,
        )
        self._active = Gauge(
            "molink_gateway_active_requests", "Generations under way", registry=self._registry
        )
        self._waiting = Gauge(
            "molink_gateway_waiting_requests", "Requests that wait for their turn", registry=self._registry
        )

    def answered(self, route: str, method: str, status: int) -> None:
        """A request was answered. `route` is the route as declared, never the path that was asked for."""
        self._requests.labels(route, method, str(status)).inc()

    def refused(self, reason: str) -> None:
        """A request was refused for its key or that key's quota."""
        self._refused.labels(reason).inc()

    def set_load(self, generations: int, waiting: int) -> None:
        """Sets how many generations are under way, and how many requests wait for their turn."""
        self._active.set(generations)
        self._waiting.set(waiting)

    def generated(self, generation: Generation) -> None:
        """A generation has finished."""
        self._tokens.labels("prompt").inc(generation.prompt_tokens)
        self._tokens.labels("generated").inc(len(generation.token_ids))
        self._trips.inc(generation.trips)
        self._guesses.labels("accepted").inc(generation.accepted_tokens)
        self._guesses.labels("rejected").inc(generation.guessed_tokens - generation.accepted_tokens)
        self._ttft_s.observe(generation.ttft_s)
        if len(generation.token_ids) > 1:
            self._tpot_s.observe(generation.tpot_s)
        for one in generation.recoveries:
            self._recoveries.labels("standby" if one.by_standby else "circuit").inc()
            self._recovery_s.observe(one.seconds)
            self._recomputed_tokens.inc(one.recomputed_tokens)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
