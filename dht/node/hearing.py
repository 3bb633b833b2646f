"""Visibility and clock monitors: whether other peers hold this peer's records, whether they have another time, and what
to tell its owner then. Pure.

A peer that nobody shows looks like one that serves: it is ready, and gets no work. That has reasons which only its
owner can mend, such as a clock, or a line that lets nothing through.
"""

from dataclasses import dataclass
from enum import Enum, auto

from molink.dht.membership.swarm_clock import TOLERANCE_S

ASKED = 2
"""Times that others must have been asked in vain before it is said that nobody shows this peer."""
_NOTABLE_S = 60.0
"""A difference of clocks that is worth a word."""


class Visibility(Enum):
    """Visibility of this peer's records at another peer."""

    HEARD = auto()
    """Something that it has said since it started."""
    AHEAD = auto()
    """Something with a higher number than it has used: of a former life, under another clock."""
    OLD = auto()
    """Only what it said in a former life, or nothing."""
    SILENT = auto()
    """The other did not answer."""


def visibility_of(first: int, last: int, held: int | None) -> Visibility:
    """`first`, `last`: of the numbers that this peer has used since it started; `held`: the one that another told it;
    None: none."""
    if held is None or held < first:
        return Visibility.OLD
    return Visibility.HEARD if held <= last else Visibility.AHEAD


@dataclass(slots=True)
class VisibilityMonitor:
    """Visibility monitor: what others have answered so far, and whether the owner has been told."""

    unheard: int = 0
    """Answers in a row that were not `HEARD`."""
    told: bool = False
    told_ahead: bool = False

    def record_answer(
        self, outcome: Visibility, whom: str, clock_ahead_s: float, ahead_s: float
    ) -> str | None:
        """Takes in what `whom` holds of this peer. Returns a line that the owner should read.

        `clock_ahead_s`: by how much others' clocks are ahead of this machine's; `ahead_s`: of `AHEAD`, by how much the
        number is.
        """
        if outcome is Visibility.HEARD:
            self.unheard = 0
            told, self.told = self.told, False
            return "other peers show this one now" if told else None
        self.unheard += 1
        if outcome is Visibility.AHEAD:
            told, self.told_ahead = self.told_ahead, True
            return None if told else _ahead(ahead_s)
        if self.told or self.unheard < ASKED:
            return None
        self.told = True
        return f"no peer shows this one: {_reason(outcome, whom, clock_ahead_s)}"

    @property
    def heard(self) -> bool:
        """Whether the last who was asked shows this peer."""
        return self.unheard == 0


@dataclass(slots=True)
class ClockMonitor:
    """Clock monitor: whether this machine's clock differs from other peers' by more than they bear, and whether the
    owner has been told. What was heard before a machine slept says nothing, so a difference counts when seen again."""

    seen: int = 0
    """Times in a row that the clocks differed."""

    def record_difference(self, behind_s: float) -> str | None:
        """Takes in by how much this machine's clock is behind. Returns a line that the owner should read."""
        if abs(behind_s) <= TOLERANCE_S:
            told, self.seen = self.seen >= ASKED, 0
            return "this machine's clock agrees with other peers' again" if told else None
        self.seen += 1
        if self.seen != ASKED:
            return None
        where = "behind" if behind_s > 0 else "ahead of"
        return (
            f"this machine's clock is {abs(behind_s):.0f} s {where} other peers': if it is wrong, set it, and have "
            "the system keep it by NTP"
        )


def _ahead(ahead_s: float) -> str:
    return (
        f"others hold words of this peer from {ahead_s:.0f} s ahead of what it says now, and it goes on beyond them: "
        "was this machine's clock wrong, or is it now?"
    )


def _reason(outcome: Visibility, whom: str, clock_ahead_s: float) -> str:
    if clock_ahead_s > _NOTABLE_S:
        return f"this machine's clock is {clock_ahead_s:.0f} s behind other peers': set it right"
    if outcome is Visibility.SILENT:
        return (
            f"those asked, {whom} last, do not answer: check that this machine's line is up. It tries again"
        )
    return (
        f"those asked, {whom} last, hold nothing that it has said since it started: they may be full or cut off. "
        "It tries again; give other --initial-peers if this lasts"
    )
