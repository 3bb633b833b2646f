"""The profile refined while serving: what steps took against what was predicted of them. Pure.

Steps are told apart by kind (decode, or with parts of prompts) and by rows, in powers of two. For each such bucket the
logarithm of measured over predicted is averaged, recent steps first. What one step may change is limited: an outlier,
such as a step during which the machine did something else, moves its bucket by MOST_CHANGE at most, and what lasts
comes through all the same.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.profiling.profile import Profile, StepWork, at_most_the_next, predicted_ms

WEIGHT = 0.1
"""Of the latest step in its bucket's average."""
MOST_SURPRISE = 0.5
"""No step counts as further from the average than by this factor's exponent: e^0.5 is 1.65 times as long."""
MOST_CHANGE = math.expm1(WEIGHT * MOST_SURPRISE)
STEADY_AFTER = 16
"""Steps after which a bucket's average is believed by others."""
REMEMBERED_ERRORS = 256
CHANGED_BY = 0.25
"""A profile with a time that differs by more than this part is worth announcing anew."""


@dataclass(slots=True)
class _Bucket:
    """Steps of one kind and about so many rows."""

    log_ratio: float = 0.0
    """Logarithm of measured over predicted."""
    steps: int = 0

    def learn(self, log_ratio: float) -> None:
        surprise = max(-MOST_SURPRISE, min(MOST_SURPRISE, log_ratio - self.log_ratio))
        self.log_ratio += WEIGHT * surprise
        self.steps += 1


class StepTimes:
    """Owner of what was learnt of the times of this peer's steps."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        """As measured at start-up."""
        self.steps = 0
        self._buckets: dict[tuple[bool, int], _Bucket] = {}
        self._errors: deque[float] = deque(maxlen=REMEMBERED_ERRORS)
        self._profile_errors: deque[float] = deque(maxlen=REMEMBERED_ERRORS)

    @property
    def median_error(self) -> float | None:
        """Of the last REMEMBERED_ERRORS predictions: the median of |measured - predicted| / measured."""
        return statistics.median(self._errors) if self._errors else None

    @property
    def median_profile_error(self) -> float | None:
        """The same, had the profile not been refined."""
        return statistics.median(self._profile_errors) if self._profile_errors else None

    def predicted_ms(self, work: StepWork) -> float:
        """What such a step takes, by all that is known."""
        return predicted_ms(self.profile, work) * self._ratio(bool(work.prefills), work.rows, 1)

    def observe(self, work: StepWork, measured_ms: float) -> None:
        """A step of this work took `measured_ms`. What is no time is not counted."""
        rows, prefill = work.rows, bool(work.prefills)
        if rows < 1 or not (math.isfinite(measured_ms) and measured_ms > 0):
            return
        plain_ms = predicted_ms(self.profile, work)
        refined_ms = plain_ms * self._ratio(prefill, rows, 1)
        self._errors.append(abs(measured_ms - refined_ms) / measured_ms)
        self._profile_errors.append(abs(measured_ms - plain_ms) / measured_ms)
        self.steps += 1
        bucket = self._buckets.setdefault(_bucket_of(prefill, rows), _Bucket())
        bucket.learn(math.log(measured_ms) - math.log(plain_ms))

    def refined(self) -> Profile:
        """The profile as the steps of late would have it; sizes that nobody stepped in follow their neighbours."""
        decode = [
            LayerLatency(one.batch_size, one.layer_ms * self._ratio(False, one.batch_size, STEADY_AFTER))
            for one in self.profile.layer_latencies
        ]
        prefill = [
            LayerLatency(one.tokens, one.layer_ms * self._ratio(True, one.tokens, STEADY_AFTER))
            for one in self.profile.prefill_latencies
        ]
        single = self._ratio(False, 1, STEADY_AFTER)
        return replace(
            self.profile,
            layer_latencies=at_most_the_next(decode),
            prefill_latencies=tuple(
                PrefillLatency(one.batch_size, one.layer_ms) for one in at_most_the_next(prefill)
            ),
            embed_ms=self.profile.embed_ms * single,
            head_ms=self.profile.head_ms * single,
            step_ms=self.profile.step_ms * single,
        )

    def _ratio(self, prefill: bool, rows: int, least_steps: int) -> float:
        """Of the nearest bucket of that kind with so many steps; 1 if there is none."""
        wanted = _bucket_of(prefill, rows)[1]
        bucket = self._buckets.get((prefill, wanted))
        if bucket is not None and bucket.steps >= least_steps:
            return math.exp(bucket.log_ratio)
        known = [
            (abs(size - wanted), size, bucket.log_ratio)
            for (kind, size), bucket in self._buckets.items()
            if kind == prefill and bucket.steps >= least_steps
        ]
        return math.exp(min(known)[2]) if known else 1.0


def worth_announcing(told: Profile, refined: Profile) -> bool:
    """Whether a time of the refined profile is further from what was told than CHANGED_BY."""
    pairs = [
        *(
            (a.layer_ms, b.layer_ms)
            for a, b in zip(told.layer_latencies, refined.layer_latencies, strict=True)
        ),
        *(
            (a.layer_ms, b.layer_ms)
            for a, b in zip(told.prefill_latencies, refined.prefill_latencies, strict=True)
        ),
    ]
    return any(abs(after - before) > CHANGED_BY * before for before, after in pairs)


def _bucket_of(prefill: bool, rows: int) -> tuple[bool, int]:
    return prefill, rows.bit_length()
