"""Decode time prediction from profiles (MoLink transmission paper, section 4.2 and Table 1).

A stage sends a decode when it has computed it. Either it computes one now, and its profile says when that is done
(cases 1 and 2), or it waits for the first batch of the next iteration, which comes back after a whole circuit
(case 3). Times are absolute, in seconds on one clock. What is predicted goes to `Uplink.expect_decode`.
"""

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """How long a stage computes a decode batch of so many tokens, as measured (T_d)."""

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), ascending in tokens, at least one."""
    _known_s: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `duration_s` has found."""

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.points]
        if not tokens or tokens[0] < 1 or any(b <= a for a, b in itertools.pairwise(tokens)):
            raise ValueError(f"a profile needs ascending numbers of tokens from 1, got {tokens}")
        if not all(math.isfinite(seconds) and seconds >= 0 for _, seconds in self.points):
            raise ValueError("a profile's times must be finite and 0 or more")

    def duration_s(self, tokens: int) -> float:
        """T_d(n), seconds: linear between the points and beyond the last, constant below the first. Worked out once for
        each number of tokens."""
        if (found := self._known_s.get(tokens)) is None:
            found = self._known_s[tokens] = self._between_s(tokens)
        return found

    def _between_s(self, tokens: int) -> float:
        at = bisect_left(self.points, (tokens, -math.inf))
        if at == 0 or len(self.points) == 1:
            return self.points[0][1]
        (low, low_s), (high, high_s) = (
            self.points[at - 1 : at + 1] if at < len(self.points) else self.points[-2:]
        )
        return max(0.0, low_s + (high_s - low_s) * (tokens - low) / (high - low))


@dataclass(frozen=True, slots=True)
class PipelineLink:
    """Link from one pipeline stage to the next."""

    latency_s: float
    """Lat_i: one way."""
    bytes_per_s: float
    """Band_i."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(f"a hop needs a latency of 0 or more and a bandwidth above 0, got {self}")


@dataclass(frozen=True, slots=True)
class DecodePipeline:
    """Pipeline that a decode passes through: M stages and M hops, the last of which leads back to the first stage."""

    profiles: tuple[DecodeProfile, ...]
    hops: tuple[PipelineLink, ...]
    activation_bytes: int
    """act_sz: of one token's activation."""
    token_bytes: int
    """tok_sz: of one token on the last hop."""
    _round_s: dict[int, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What `round_s` has found."""

    def __post_init__(self) -> None:
        if not self.profiles or len(self.profiles) != len(self.hops):
            raise ValueError(f"{len(self.profiles)} stages have as many hops, got {len(self.hops)}")

    def round_s(self, tokens: int) -> tuple[float, float]:
        """T_o and T_m, seconds, worked out once for each number of tokens."""
        if (found := self._round_s.get(tokens)) is None:
            found = self._round_s[tokens] = (self.compute_s(tokens), self.transfer_s(tokens))
        return found

    def compute_s(self, tokens: int) -> float:
        """T_o, seconds: a batch's computation on all stages."""
        return sum(profile.duration_s(tokens) for profile in self.profiles)

    def transfer_s(self, tokens: int) -> float:
        """T_m, seconds: a batch's way over all hops, as activations and on the last one as tokens."""
        latency_s = activations_s = 0.0
        for hop in self.hops[:-1]:
            latency_s += hop.latency_s
            activations_s += self.activation_bytes * tokens / hop.bytes_per_s
        back = self.hops[-1]
        return latency_s + back.latency_s + activations_s + self.token_bytes * tokens / back.bytes_per_s


class RunningBatch(NamedTuple):
    """A decode batch that the engine computes."""

    started_s: float
    """t_s."""
    tokens: int
    """n."""


class FirstBatch(NamedTuple):
    """The first decode batch of the latest iteration, computed here."""

    finished_s: float
    """t_p."""
    tokens: int
    """n."""


def decode_finish_s(
    circuit: DecodePipeline, stage: int, running: RunningBatch | None, first: FirstBatch | None
) -> float | None:
    """t_f: when the stage's current decode, or else its next, is computed and will be sent.

    None when none runs and none has run: nothing is known then.
    """
    if running is not None:
        return running.started_s + circuit.profiles[stage].duration_s(running.tokens)
    if first is not None:
        compute_s, transfer_s = circuit.round_s(first.tokens)
        return first.finished_s + compute_s + transfer_s
    return None


def available_s(
    transmission_start_s: float,
    circuit: DecodePipeline,
    stage: int,
    running: RunningBatch | None,
    first: FirstBatch | None,
) -> float | None:
    """T_a, seconds: how long a transmission that starts at t_c may take without delaying a decode.

    Case 1, a decode starts with the transmission: T_d. Case 2, it started earlier: T_d + t_s - t_c. Case 3, none runs:
    t_p + T_o + T_m - t_c. 0 when the decode is overdue; None when nothing is known.
    """
    finish_s = decode_finish_s(circuit, stage, running, first)
    return None if finish_s is None else max(0.0, finish_s - transmission_start_s)
