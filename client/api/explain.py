"""Latency breakdown of a token: what each hop reported, beside what the router predicted."""

import statistics

from molink.client.api.assembler import circuit_report
from molink.client.api.generation import Explanation, Generation, GuessCounts, HopTimes
from molink.client.epochs.session_log import SessionLog
from molink.peer.wire.protocol import molink_pb2 as pb


class Tracer:
    """Tracer of the times that hops attach to tokens. Only decode steps count: the first token is the prefill's."""

    def __init__(self) -> None:
        self._seen: list[tuple[pb.HopTiming, ...]] = []

    def record_token(self, token: pb.Token) -> None:
        self._seen.append(tuple(token.timings))

    def explain(self, generation: Generation, log: SessionLog, *, speculates: bool) -> Explanation:
        """Predicted and measured, hop by hop. Hops of circuits that were left are not counted. `speculates`: whether
        tokens might be guessed."""
        route, circuit = log.route, circuit_report(log)
        decodes = [timings for timings in self._seen[1:] if len(timings) == len(circuit.hops)]
        why = "" if generation.guessed_tokens else _why_no_guesses(log, speculates=speculates)
        if route is None or not decodes:
            return Explanation(generation, why_no_guesses=why, guess_sources=_sources(log))
        hops = tuple(
            HopTimes(
                hop=hop,
                predicted_compute_ms=route.hops[index].compute_ms,
                measured_compute_ms=statistics.median(timings[index].compute_us for timings in decodes)
                / 1000,
                measured_queue_ms=statistics.median(timings[index].queue_us for timings in decodes) / 1000,
                predicted_link_ms=route.hops[index].link_ms,
                measured_link_ms=statistics.median(timings[index].link_rtt_us for timings in decodes) / 2000,
                terms=route.hops[index].terms,
                assumed=route.hops[index].assumed,
                measured=route.hops[index].measured,
            )
            for index, hop in enumerate(circuit.hops)
        )
        return Explanation(
            generation,
            hops,
            route.tpot_ms,
            generation.tpot_s * 1000,
            route.ttft_ms,
            log.prefill_s * 1000,
            route.trip_ms,
            route.tokens_per_trip,
            why,
            _sources(log),
        )


def _sources(log: SessionLog) -> tuple[GuessCounts, ...]:
    found = [GuessCounts(source, *counts) for source, counts in log.trips.by_source.items()]
    return tuple(sorted(found, key=lambda one: (-one.accepted_tokens, -one.guessed_tokens)))


def _why_no_guesses(log: SessionLog, *, speculates: bool) -> str:
    if not speculates:
        return "speculation is off"
    return log.no_guesses or "none was expected to save time"
