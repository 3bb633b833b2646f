"""What a peer counts, for its own log and for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from molink.peer.engine.hop_traces import HopTraces
from molink.peer.profiling.profile import StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.peer.speculation.session_guesses import SourceCounts
from molink.peer.wire.transport.line_quality import LineQuality, LinkQuality, MeasureLine

MAX_LINKS = 32
"""Links that are shown, the busiest: every peer may link to this one, and each would be a time series."""
SHORT_ID = 8
"""The last characters of a peer id: the first ones are the same for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingState:
    """Serving state: what a peer does at the moment."""

    sessions: int
    layers: int
    """Of the model, held here."""
    queued_steps: int
    """Steps, chunks and parts of prompts that wait for the engine."""
    free_weight_bytes: int
    free_kv_bytes: int
    is_draining: bool
    is_paused: bool


class PeerMetrics:
    """Counters of one peer in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.traces: HopTraces | None = None
        """To be set before the peer serves; None: nothing is traced."""
        self._step_times: StepTimes | None = None
        self.activation_bytes = 0
        """Activations sent to other peers so far, as encoded."""
        self.rows = 0
        """Token rows computed so far: tokens of prompts and generated ones."""
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
        self._activation_bytes = Counter(
            "molink_activation_bytes",
            "Activations sent to other peers, by encoding",
            ("encoding",),
            registry=self.registry,
        )

    def watch_serving(self, model: str, describe: Callable[[], ServingState]) -> None:
        """From now on each look at the registry shows what the peer, its process and its machine do at that moment."""
        about = Info(
            "molink_peer", "The version of this peer and the model that it serves", registry=self.registry
        )
        about.info({"version": version("molink"), "model": model})
        self.registry.register(_ServingCollector(describe))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def watch(self, measure_line: MeasureLine) -> None:
        """From now on each look at the registry shows what the line is measured to carry at that moment."""
        self.registry.register(_LineCollector(measure_line))

    def watch_copies(self, describe: Callable[[], Mapping[str, float]]) -> None:
        """From now on each look at the registry shows second copies as `describe` does at that moment."""
        self.registry.register(_CopyCollector(describe))

    def watch_guesses(self, counts: SourceCounts) -> None:
        """From now on each look at the registry shows what was guessed here."""
        self.registry.register(_GuessCollector(counts))

    def compare(self, step_times: StepTimes) -> None:
        """From now on each step is compared with what was predicted of it."""
        self._step_times = step_times
        self.registry.register(_PredictionCollector(step_times))

    def sent_activations(self, encoding: str, size_bytes: int) -> None:
        """One frame of activations went on its way."""
        self.activation_bytes += size_bytes
        self._activation_bytes.labels(encoding).inc(size_bytes)

    def stepped(self, compute_s: float, sessions: int, rows: int, work: StepWork | None = None) -> None:
        """One micro-batch of `sessions` sessions and `rows` token rows took `compute_s` on the device."""
        self._steps.inc()
        self._rows.inc(rows)
        self.rows += rows
        self._sessions.observe(sessions)
        self._seconds.observe(compute_s)
        if work is not None and self._step_times is not None:
            self._step_times.observe(work, compute_s * 1000)


def shown_links(line: LineQuality) -> tuple[LinkQuality, ...]:
    """The busiest links, at most MAX_LINKS, no two of the same short id."""
    busiest = sorted(
        line.links, key=lambda link: -1 if link.bytes_per_s is None else link.bytes_per_s, reverse=True
    )
    by_name = {link.peer_id[-SHORT_ID:]: link for link in reversed(busiest)}
    return tuple(link for link in busiest if by_name[link.peer_id[-SHORT_ID:]] is link)[:MAX_LINKS]


def describe_line(line: LineQuality) -> dict[str, object]:
    """The line and its links, JSON-ready; what was not measured is null."""
    return {
        "uplink_mbps": _mbps(line.uplink_bytes_per_s),
        "links": [
            {
                "peer_id": link.peer_id,
                "mbps": _mbps(link.bytes_per_s),
                "rtt_ms": None if link.round_trip_s is None else round(link.round_trip_s * 1000, 3),
                "queueing_ms": round(link.queueing_s * 1000, 3),
            }
            for link in shown_links(line)
        ],
    }


def describe_predictions(step_times: StepTimes) -> dict[str, object]:
    """How well the times of steps were predicted of late, JSON-ready; null before the first step."""
    return {
        "predicted_steps": step_times.steps,
        "prediction_error": _rounded(step_times.median_error),
        "profile_error": _rounded(step_times.median_profile_error),
    }


class _PredictionCollector(Collector):
    """Gauges of the predictions' errors, taken when they are asked for."""

    def __init__(self, step_times: StepTimes) -> None:
        self._step_times = step_times

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, what, value in (
            ("molink_step_prediction_error", "refined profile", self._step_times.median_error),
            ("molink_step_profile_error", "profile of the start", self._step_times.median_profile_error),
        ):
            about = f"Median of |measured - predicted| / measured of the latest steps, by the {what}"
            family = GaugeMetricFamily(name, about)
            if value is not None:
                family.add_metric((), value)
            yield family


class _ServingCollector(Collector):
    """Gauges of what a peer does, taken when they are asked for."""

    def __init__(self, describe: Callable[[], ServingState]) -> None:
        self._describe = describe

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._describe()
        for name, what, value in (
            ("sessions", "Sessions that have a lease here", state.sessions),
            ("layers", "Layers held", state.layers),
            (
                "queued_steps",
                "Steps, chunks and parts of prompts that wait for the engine",
                state.queued_steps,
            ),
            ("free_weight_bytes", "Memory free for weights", state.free_weight_bytes),
            ("free_kv_bytes", "Memory free for KV caches", state.free_kv_bytes),
            ("draining", "1 while the peer takes nothing new", float(state.is_draining)),
            ("paused", "1 while the peer has stepped aside for its owner", float(state.is_paused)),
        ):
            yield GaugeMetricFamily(f"molink_{name}", what, value=value)


class _CopyCollector(Collector):
    """Second copies: of sessions here that others keep, and those that are kept here."""

    def __init__(self, describe: Callable[[], Mapping[str, float]]) -> None:
        self._describe = describe

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        values = self._describe()
        for key, what in (
            ("copied_sessions", "Sessions here of which another peer keeps a copy"),
            ("copied_behind_tokens", "Tokens that those copies lack"),
            ("copied_furthest_behind_tokens", "Tokens that the one of them lacks which lacks most"),
            ("input_log_bytes", "Memory of inputs that are kept for copies"),
            ("kept_copies", "Copies of other peers' sessions kept here"),
            ("kept_behind_tokens", "Tokens that those copies lack"),
            ("kept_furthest_behind_tokens", "Tokens that the one of them lacks which lacks most"),
            ("kept_copy_bytes", "Memory of those copies"),
        ):
            yield GaugeMetricFamily(f"molink_{key}", what, value=values[key])
        for key, what in (
            ("sent_copy_bytes", "Bytes of copies sent"),
            ("sent_computed_tokens", "Tokens sent of copies that others compute, from inputs or token ids"),
            ("computed_copy_tokens", "Tokens of copies computed here"),
            ("taken_over", "Lost hops whose place was taken with a copy"),
        ):
            yield CounterMetricFamily(f"molink_{key}", what, value=values[key])


class _GuessCollector(Collector):
    """Counters of the guesses of sessions whose head is here."""

    def __init__(self, counts: SourceCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts = self._counts
        trips = CounterMetricFamily(
            "molink_guessing_trips", "Trips round circuits whose head is here and guesses"
        )
        trips.add_metric((), counts.trips)
        yield trips
        for name, what, by_source in (
            ("molink_guesses", "Guesses that travelled, by source", counts.guessed),
            ("molink_accepted_guesses", "Guesses that were right, by source", counts.accepted),
        ):
            family = CounterMetricFamily(name, what, labels=("source",))
            for source, count in by_source.items():
                family.add_metric((source,), count)
            yield family


class _LineCollector(Collector):
    """Gauges of the line, measured when they are asked for. A link that was closed is gone from them at once."""

    def __init__(self, measure_line: MeasureLine) -> None:
        self._measure_line = measure_line

    def collect(self) -> Iterator[GaugeMetricFamily]:
        line = self._measure_line()
        uplink = GaugeMetricFamily("molink_uplink_bytes_per_second", "What all links together carry away")
        if line.uplink_bytes_per_s is not None:
            uplink.add_metric((), line.uplink_bytes_per_s)
        yield uplink
        links = shown_links(line)
        for name, what, values in (
            ("molink_link_bytes_per_second", "What a link carries", [link.bytes_per_s for link in links]),
            ("molink_link_round_trip_seconds", "Round trip of a link", [link.round_trip_s for link in links]),
            (
                "molink_link_queueing_seconds",
                "Wait in queues on the way",
                [link.queueing_s for link in links],
            ),
        ):
            family = GaugeMetricFamily(name, what, labels=("peer",))
            for link, value in zip(links, values, strict=True):
                if value is not None:
                    family.add_metric((link.peer_id[-SHORT_ID:],), value)
            yield family


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _mbps(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else round(bytes_per_s * 8 / 1e6, 3)
