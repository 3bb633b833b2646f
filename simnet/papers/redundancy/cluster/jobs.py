"""A request on its way through a cluster, and the instances that hold its keys and values."""

import math
from dataclasses import dataclass, field

from molink.peer.redundancy.pair_balance import HeldSequence
from molink.peer.redundancy.roles import Standing
from molink.simnet.papers.redundancy.cluster.workloads import RedundancyRequest


@dataclass(slots=True, eq=False)
class Job:
    """One request and what has become of it."""

    request: RedundancyRequest
    tokens: int = 0
    """With keys and values."""
    begun_tokens: int = 0
    """Of the prompt, computed in steps that have ended."""
    left: int = 0
    """Tokens that it still generates."""
    home: int = -1
    """The instance that decodes it."""
    holders: list[int] = field(default_factory=list)
    """Instances that have all of its keys and values, or get them as they are computed."""
    running_on: int | None = None
    """The instance that computes a step of it."""
    last_on: int = -1
    """The instance that computed its last token, or got it with the handover."""
    ready_s: float = math.inf
    """When it can be decoded at its home: the handover is over."""
    copy_to: int | None = None
    copied_tokens: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    longest_gap_s: float = 0.0
    ended: bool = False

    def seen(self, now_s: float) -> HeldSequence:
        """As decisions see it. What is on its way stays where it goes."""
        holders = tuple(self.holders) if self.ready_s <= now_s else (self.home,)
        return HeldSequence(self.request.number, self.tokens, self.request.room_tokens, self.home, holders)


@dataclass(slots=True, eq=False)
class Instance:
    """Four accelerators, and what is in their memory."""

    number: int
    capacity_tokens: int
    busy: bool = False
    prefilling: int = 0
    """Prompts in its step."""
    has_prefilled: bool = False
    """In its latest step."""
    homes: dict[int, Job] = field(default_factory=dict)
    """Those that it decodes, or will."""
    held: dict[int, Job] = field(default_factory=dict)
    """Those whose keys and values it has, or gets."""
    reserved_tokens: int = 0
    kept_tokens: int = 0
    """Of the reserved ones, those of `homes`."""
    held_tokens: int = 0
    peak_tokens: int = 0
    busy_s: float = 0.0
    lines_until_s: float = 0.0
    """When the last line that it sent is there."""

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.reserved_tokens

    def could_keep(self, tokens: int) -> bool:
        """If every copy gave way."""
        return self.capacity_tokens - self.kept_tokens >= tokens

    def standing(self) -> Standing:
        """As decisions see it."""
        alone = sum(len(job.holders) == 1 for job in self.homes.values())
        copied = self.reserved_tokens - self.kept_tokens
        return Standing(self.number, self.capacity_tokens, self.kept_tokens, copied, alone)

    def reserve(self, job: Job) -> None:
        """Sets its room aside; what it has of tokens is there.

        Raises:
            AssertionError: more than there is memory.
        """
        self.held[job.request.number] = job
        self.reserved_tokens += job.request.room_tokens
        self.grow(job.tokens)
        if self.reserved_tokens > self.capacity_tokens:
            raise AssertionError(f"instance {self.number} holds more than its memory: {self.reserved_tokens}")

    def grow(self, tokens: int) -> None:
        """So many tokens more are held."""
        self.held_tokens += tokens
        self.peak_tokens = max(self.peak_tokens, self.held_tokens)

    def give_up(self, job: Job, tokens: int) -> None:
        """It no longer holds the job, of which it had so many tokens."""
        del self.held[job.request.number]
        self.reserved_tokens -= job.request.room_tokens
        self.held_tokens -= tokens
