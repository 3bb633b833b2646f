"""Layered prefill: parts of prompts are computed slice by slice, with decode steps in between (`prefill_slices`). Pure.

What the engine keeps of a part that has begun is the driver's; how far each has come is a value here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from molink.peer.hop.session import HopStep, Payload, Session
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_slices import RemainingPrefill, SliceSize, SliceSizer


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlice(Generic[Session, Payload]):
    """A prefill slice: so many tokens of some parts of prompts through so many layers."""

    parts: tuple[HopStep[Session, Payload], ...]
    left: tuple[RemainingPrefill, ...]
    """Of each."""
    size: SliceSize
    layers_left: int
    """Before these tokens, this slice's included."""
    begins: bool
    """Whether these tokens have not been through any layer."""

    def advanced(
        self,
    ) -> tuple[list[HopStep[Session, Payload]], list[tuple[HopStep[Session, Payload], int, int]], int]:
        """Where nobody fails, and layers keep no states: the parts that are through with this slice, of the others the
        tokens that are left and those between layers, and the layers that are left for these."""
        layers_left = self.layers_left - self.size.layers
        through, left = [], []
        for part, tokens in zip(self.parts, self.size.tokens, strict=True):
            if layers_left:
                left.append((part, part.left_tokens, tokens))
            elif part.left_tokens > tokens:
                left.append((part, part.left_tokens - tokens, 0))
            else:
                through.append(part)
        return through, left, layers_left


class LayeredPrefill(Generic[Session, Payload]):
    """Schedules slices of the parts of prompts that wait."""

    def __init__(self, sizer: SliceSizer, limits: BatchLimits) -> None:
        self._sizer = sizer
        self._limits = limits
        self._parts: list[HopStep[Session, Payload]] = []
        """In the order in which they are due."""
        self._under_way: dict[HopStep[Session, Payload], int] = {}
        """Whose tokens are between layers, and how many."""
        self._layers_left = 0
        self._computing = False
        self.is_due = False
        """Whether the next slice goes before decode steps that wait."""

    def __len__(self) -> int:
        return len(self._parts)

    def record_decode(self, work: StepWork, taken_s: float) -> None:
        """A decode step has been computed. If parts wait, a slice is due."""
        self.is_due = bool(self._parts)
        self._sizer.record_decode(work, taken_s * 1000, beside=self.is_due)

    def record_time(self, slice_: PrefillSlice[Session, Payload], taken_s: float) -> None:
        """A slice took so long, of which nothing was left out."""
        self._sizer.record_slice(slice_.size, slice_.left, taken_s * 1000)

    def take_prompts(
        self, steps: Sequence[HopStep[Session, Payload]], decoding: Callable[[], int]
    ) -> Sequence[HopStep[Session, Payload]]:
        """What of a micro-batch is to be computed at once, while that many sessions decode; the rest is kept for
        slices."""
        prompts = [one for one in steps if one.prefill or one.session.prefill.parts]
        if not prompts:
            return steps
        at_once: Sequence[HopStep[Session, Payload]] = ()
        if not self._parts:
            at_once = self._at_once(prompts, sessions) if (sessions := decoding()) else prompts
        later = [one for one in prompts if one not in at_once]
        for one in later:
            one.session.prefill.parts += 1
        self._parts = sorted([*self._parts, *later], key=_due_s)
        return [one for one in steps if one not in later] if later else steps

    def next_slice(self, decoding: int) -> PrefillSlice[Session, Payload]:
        """The next slice of what is under way, or of the parts that are due first; there are some."""
        self.is_due = False
        self._computing = True
        if self._under_way:
            parts, tokens = tuple(self._under_way), tuple(self._under_way.values())
            left = tuple(map(_remaining, parts))
            size = self._sizer.next_slice(self._layers_left, left, decoding, tokens)
            return PrefillSlice(parts, left, size, self._layers_left, begins=False)
        due: Sequence[HopStep[Session, Payload]] = self._due_first()
        if decoding and (at_once := self._at_once(due, decoding)):
            due, decoding = at_once, 0
        left, layers = tuple(map(_remaining, due)), len(due[0].span)
        size = self._sizer.next_slice(layers, left, decoding)
        joining = len(size.tokens)
        return PrefillSlice(tuple(due[:joining]), left[:joining], size, layers, begins=True)

    def record_slice(
        self,
        over: Collection[HopStep[Session, Payload]],
        left: Sequence[tuple[HopStep[Session, Payload], int, int]],
        layers_left: int,
    ) -> bool:
        """A slice has been computed: parts that are `over`, and what is left of others. Whether nobody needs the
        tokens any more that are between layers."""
        self._computing = False
        for part, tokens, _ in left:
            part.left_tokens = tokens
        for part in self._parts:
            if part in over:
                part.session.prefill.parts -= 1
        self._parts = [part for part in self._parts if part not in over]
        between = {part: tokens for part, _, tokens in left if tokens}
        self._under_way = {part: tokens for part, tokens in between.items() if not part.session.ended}
        self._layers_left = layers_left if self._under_way else 0
        return bool(between) and not self._under_way

    def end_session(self, session: Session) -> bool:
        """The session has ended. Whether nobody needs the tokens any more that are between layers."""
        if not session.prefill.parts:
            return False
        self._parts = [one for one in self._parts if one.session is not session]
        session.prefill.parts = 0
        if self._computing or not self._under_way:
            return False
        self._under_way = {
            part: many for part, many in self._under_way.items() if part.session is not session
        }
        return not self._under_way

    def _due_first(self) -> list[HopStep[Session, Payload]]:
        """The parts of one span that are due first, one of each session, as many as fit a micro-batch."""
        span = self._parts[0].span
        first: dict[Session, HopStep[Session, Payload]] = {}
        for part in self._parts:
            if part.span == span:
                first.setdefault(part.session, part)
        found: list[HopStep[Session, Payload]] = []
        tokens = 0
        for part in tuple(first.values())[: self._limits.max_sessions]:
            tokens += part.left_tokens
            if found and tokens > self._limits.max_tokens:
                break
            found.append(part)
        return found

    def _at_once(
        self, parts: Sequence[HopStep[Session, Payload]], decoding: int
    ) -> Sequence[HopStep[Session, Payload]]:
        """Which of the parts are computed whole and now beside so many sessions that decode."""
        places = self._sizer.at_once(len(parts[0].span), tuple(map(_remaining, parts)), decoding)
        return [parts[place] for place in places]


def _remaining(part: HopStep[Any, Any]) -> RemainingPrefill:
    return RemainingPrefill(
        part.left_tokens, part.position + part.tokens - part.left_tokens, bool(part.draws)
    )


def _due_s(part: HopStep[Any, Any]) -> float:
    return part.due_s
