"""Metrics of the gateway, for Prometheus."""

from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from molink.client.api.generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_MODELS: Final = 64
"""Models that have series of their own: peers name them as they like. The others are counted together."""
OTHER_MODELS: Final = "(others)"
_DURATION_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)
_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
_RECOVERY_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 1.5, 2.5, 5, 10, 30)
_TPOT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class GenerationMetrics:
    """Counters of generations: their tokens and times, losses in their middle, and failures."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        """Those that have series of their own."""
        self._tokens = Counter(
            "molink_gateway_tokens",
            "Tokens of finished generations, by kind (prompt, cached: those of prompts that were not computed again, "
            "generated)",
            ("model", "kind"),
            registry=registry,
        )
        self._ttft_s = Histogram(
            "molink_gateway_ttft_seconds",
            "Time to the first token, forming a circuit included",
            ("model",),
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot_s = Histogram(
            "molink_gateway_tpot_seconds",
            "Mean time per token after the first",
            ("model",),
            buckets=_TPOT_BUCKETS_S,
            registry=registry,
        )
        self._recoveries = Counter(
            "molink_gateway_recoveries",
            "Hops lost in mid-generation, by what went on: a standby with a copy of the KV cache, or another circuit",
            ("by",),
            registry=registry,
        )
        self._recovery_s = Histogram(
            "molink_gateway_recovery_seconds",
            "Time from a hop's loss to the next token",
            buckets=_RECOVERY_BUCKETS_S,
            registry=registry,
        )
        self._recomputed_tokens = Counter(
            "molink_gateway_recomputed_tokens", "Tokens computed again after losses", registry=registry
        )
        self._trips = Counter(
            "molink_gateway_trips",
            "Trips round circuits that brought tokens of finished generations",
            ("model",),
            registry=registry,
        )
        self._guesses = Counter(
            "molink_gateway_guesses",
            "Tokens guessed in finished generations, by outcome: accepted or rejected",
            ("model", "outcome"),
            registry=registry,
        )
        self._failures = Counter(
            "molink_gateway_failures",
            "Generations that ended with an error, by its code (no_circuit, peer_lost, swarm_unavailable, ...)",
            ("code",),
            registry=registry,
        )

    def finished(self, generation: Generation, model: str) -> None:
        """A generation has finished."""
        model = self._known(model)
        self._tokens.labels(model, "prompt").inc(generation.prompt_tokens)
        self._tokens.labels(model, "cached").inc(generation.cached_tokens)
        self._tokens.labels(model, "generated").inc(len(generation.token_ids))
        self._trips.labels(model).inc(generation.trips)
        self._guesses.labels(model, "accepted").inc(generation.accepted_tokens)
        self._guesses.labels(model, "rejected").inc(generation.guessed_tokens - generation.accepted_tokens)
        self._ttft_s.labels(model).observe(generation.ttft_s)
        if len(generation.token_ids) > 1:
            self._tpot_s.labels(model).observe(generation.tpot_s)
        for one in generation.recoveries:
            self._recoveries.labels("standby" if one.by_standby else "circuit").inc()
            self._recovery_s.observe(one.seconds)
            self._recomputed_tokens.inc(one.recomputed_tokens)

    def failed(self, code: str) -> None:
        """A generation has ended with an error."""
        self._failures.labels(code).inc()

    def _known(self, model: str) -> str:
        if len(self._models) < MOST_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER_MODELS


class Metrics:
    """Counters of one application, in a registry of its own, beside those of its process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        Info("molink_gateway", "The version of this gateway", registry=self._registry).info(
            {"version": version("molink")}
        )
        self.generations = GenerationMetrics(self._registry)
        self._requests = Counter(
            "molink_gateway_requests",
            "Requests answered",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._duration_s = Histogram(
            "molink_gateway_request_duration_seconds",
            "Time from a request's head to the end of its answer",
            ("route",),
            buckets=_DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._queue_s = Histogram(
            "molink_gateway_queue_seconds",
            "Wait of a request for its turn",
            buckets=_QUEUE_BUCKETS_S,
            registry=self._registry,
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

    def answered(self, route: str, method: str, status: int, took_s: float) -> None:
        """A request was answered. `route` is the route as declared, never the path that was asked for."""
        self._requests.labels(route, method, str(status)).inc()
        self._duration_s.labels(route).observe(took_s)

    def queued(self, waited_s: float) -> None:
        """A request's turn has come."""
        self._queue_s.observe(waited_s)

    def refused(self, reason: str) -> None:
        """A request was refused for its key or that key's quota."""
        self._refused.labels(reason).inc()

    def set_load(self, generations: int, waiting: int) -> None:
        """Sets how many generations are under way, and how many requests wait for their turn."""
        self._active.set(generations)
        self._waiting.set(waiting)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
