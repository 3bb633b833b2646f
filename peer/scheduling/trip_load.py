"""What shares a circuit with a session's next trip, as values for who decides how much that trip carries. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """A micro-batch on its way, or a part of one."""

    rows: int
    tokens: float
    """That its trips are expected to bring."""
    guesses: int = 0
    """Of the rows: the others are one for each session."""
    guessing_ms: float = 0.0
    """That its head took to guess, before it left."""

    @property
    def sessions(self) -> int:
        """As many rows as it would have without guesses."""
        return self.rows - self.guesses


@dataclass(frozen=True, slots=True)
class TripLoad:
    """What travels along the circuit beside the session whose trip begins, and what has been measured of it."""

    beside: BatchLoad | None = None
    """The other sessions of its micro-batch; None: there are none."""
    others: tuple[BatchLoad, ...] = ()
    """The other micro-batches in flight."""
    waited_ms: float = 0.0
    """By how much trips of late took longer than predicted: they waited for engines that others use."""
    has_bystanders: bool = False
    """Whether sessions are among these whose tokens nobody guesses."""
    lengthens: float = 1.0
    """By how many milliseconds trips of late took longer for each that guesses were predicted to lengthen them by."""
    prompts: int = 0
    """Sessions that wait for their first token: what decode takes of an uplink, their prompts wait for."""


ALONE = TripLoad()


@dataclass(frozen=True, slots=True)
class TripBegun:
    """What has been decided of a trip."""

    guesses: int
    tokens: float = 1.0
    """That it is expected to bring."""
    predicted_ms: float = 0.0
    """What it is predicted to take beside the guessing; 0: nobody has predicted it."""
    lengthened_ms: float = 0.0
    """Of that, what guesses make, those of who travels along too."""
    guessing_ms: float = 0.0
    """That its head took to guess."""


NO_GUESSES = TripBegun(0)
