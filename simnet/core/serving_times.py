"""What a run of requests amounts to: averages, and how they compare. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from molink.simnet.core.request_load import RequestOutcome


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Averages over requests, in seconds, and tokens a second; None where there is none to tell of."""

    ttft_s: float | None
    """From a request's arrival to its first token."""
    tpot_s: float | None
    """Of their mean times from token to token after the first."""
    latency_s: float | None = None
    """From a request's arrival to its last token."""
    throughput_tps: float | None = None


NOTHING = ServingTimes(None, None)


def serving_times(outcomes: Sequence[RequestOutcome], throughput_tps: float) -> ServingTimes:
    """Over the requests that got all their tokens."""
    ended = [one for one in outcomes if one.error is None]
    if not ended:
        return ServingTimes(None, None, None, throughput_tps)
    longer = [one for one in ended if len(one.token_s) > 1]
    return ServingTimes(
        statistics.fmean(one.token_s[0] - one.request.arrival_s for one in ended),
        statistics.fmean(map(_tpot_s, longer)) if longer else None,
        statistics.fmean(one.token_s[-1] - one.request.arrival_s for one in ended),
        throughput_tps,
    )


def reduced(times: ServingTimes, base: ServingTimes) -> ServingTimes:
    """By what part of the base's each time is below it, and the throughput above it; None where either is missing."""
    return ServingTimes(
        _below(times.ttft_s, base.ttft_s),
        _below(times.tpot_s, base.tpot_s),
        _below(times.latency_s, base.latency_s),
        None
        if times.throughput_tps is None or not base.throughput_tps
        else times.throughput_tps / base.throughput_tps - 1,
    )


def _below(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else 1 - value / base


def _tpot_s(outcome: RequestOutcome) -> float:
    return (outcome.token_s[-1] - outcome.token_s[0]) / (len(outcome.token_s) - 1)
