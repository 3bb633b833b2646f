"""Layered prefill: parts of prompts are computed slice by slice, with decode steps in between (`prefill_slices`)."""

import time
from collections.abc import Iterable, Sequence

from molink.peer.compute.backend import SlicingEngine
from molink.peer.engine.slice_executor import PrefillSlice, SliceExecutor, SliceOutput, has_ended
from molink.peer.engine.steps import StepFailure, StepInput, StepOutput
from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decoding_sessions import DecodingSessions
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_slices import SliceSizer


class LayeredPrefill:
    """Schedules slices of the parts of prompts that wait, and knows who decodes.

    `compute` runs on the engine's thread, all else on the event loop.
    """

    def __init__(self, engine: SlicingEngine, sizes: SliceSizer, limits: BatchLimits) -> None:
        self._sizer = sizes
        self._limits = limits
        self._decoding = DecodingSessions()
        self._executor = SliceExecutor(engine)
        self._parts: list[StepInput] = []
        """In the order in which they are due."""
        self._computing = False
        self.is_due = False
        """Whether the next piece goes before decode steps that wait."""

    def __len__(self) -> int:
        return len(self._parts)

    def keys(self) -> set[LeaseKey]:
        """The sessions whose parts these are."""
        return {one.session.key for one in self._parts}

    def has(self, key: LeaseKey) -> bool:
        """Whether a part of the session is here."""
        return any(one.session.key == key for one in self._parts)

    # -- who decodes

    def record_waiting(self, key: LeaseKey) -> None:
        """A decode step of the session waits for the engine."""
        self._decoding.record_waiting(key)

    def record_computed(self, inputs: Iterable[StepInput]) -> None:
        """These have been computed, in pieces or not."""
        now_s = time.perf_counter()
        for one in inputs:
            if not one.prefill:
                self._decoding.record_decode(one.session.key, now_s)
            elif one.sample and not (one.session.is_head and one.session.is_tail):
                self._decoding.record_first_token(one.session.key, now_s, one.session.plan.stages)

    def record_decode(self, work: StepWork, taken_s: float) -> None:
        """A decode step has been computed. If parts wait, a piece is due."""
        self.is_due = bool(self._parts)
        self._sizer.record_decode(work, taken_s * 1000, beside=self.is_due)

    def forget_decoder(self, key: LeaseKey) -> None:
        """The session has its last token."""
        self._decoding.forget_session(key)

    # -- parts

    def take_prompts(self, inputs: tuple[StepInput, ...]) -> tuple[StepInput, ...]:
        """What of a micro-batch is to be computed at once; the rest is kept for pieces."""
        prompts = [one for one in inputs if one.prefill or self.has(one.session.key)]
        if not prompts:
            return inputs
        at_once: Sequence[StepInput] = ()
        if not self._parts:
            decoding = self._decoding.count(time.perf_counter())
            at_once = self._at_once(prompts, decoding) if decoding else prompts
        later = [one for one in prompts if one not in at_once]
        self._parts = sorted([*self._parts, *later], key=_due_s)
        return tuple(one for one in inputs if one not in later) if later else inputs

    def next_slice(self) -> PrefillSlice:
        """The next piece of what is under way, or of the parts that are due first; there are some."""
        self.is_due = False
        self._computing = True
        decoding = self._decoding.count(time.perf_counter())
        under_way = self._executor.tokens_under_way()
        if under_way:
            left = tuple(map(self._executor.remaining, under_way))
            layers, tokens = self._executor.layers_under_way, tuple(under_way.values())
            return PrefillSlice(
                tuple(under_way), left, self._sizer.next_slice(layers, left, decoding, tokens), begins=False
            )
        parts: Sequence[StepInput] = self._due_first()
        if decoding and (at_once := self._at_once(parts, decoding)):
            parts, decoding = at_once, 0
        left = tuple(map(self._executor.remaining, parts))
        size = self._sizer.next_slice(len(parts[0].session.span), left, decoding)
        joining = len(size.tokens)
        return PrefillSlice(tuple(parts[:joining]), left[:joining], size, begins=True)

    def compute(self, slice_: PrefillSlice) -> SliceOutput:
        """On the engine's thread."""
        return self._executor.compute(slice_)

    def record_slice(self, slice_: PrefillSlice, output: SliceOutput | Exception) -> StepOutput | None:
        """What came of the parts that are through, or have failed."""
        self._computing = False
        if isinstance(output, Exception):
            failures = tuple(StepFailure(one, output) for one in slice_.parts)
            output = SliceOutput(
                StepOutput((), None, (), (), 0.0, 0.0, None, failures), 0.0, is_complete=False
            )
        if output.is_complete:
            self._sizer.record_slice(slice_.size, slice_.left, output.taken_s * 1000)
        whole = output.whole
        over = whole.everyone if whole is not None else ()
        self._keep(one for one in self._parts if one not in over and not has_ended(one))
        return whole

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self.forget_decoder(key)
        self._keep(one for one in self._parts if one.session.key != key)

    def _keep(self, parts: Iterable[StepInput]) -> None:
        self._parts = list(parts)
        if not self._computing:
            self._executor.keep_only(self._parts)

    def _due_first(self) -> list[StepInput]:
        """The parts of one span that are due first, one of each session, as many as fit a micro-batch."""
        span = self._parts[0].session.span
        first: dict[LeaseKey, StepInput] = {}
        for part in self._parts:
            if part.session.span == span:
                first.setdefault(part.session.key, part)
        found: list[StepInput] = []
        tokens = 0
        for part in tuple(first.values())[: self._limits.max_sessions]:
            tokens += self._executor.remaining(part).tokens
            if found and tokens > self._limits.max_tokens:
                break
            found.append(part)
        return found

    def _at_once(self, parts: Sequence[StepInput], decoding: int) -> Sequence[StepInput]:
        """Which of the parts are computed whole and now beside so many sessions that decode."""
        left = [self._executor.remaining(part) for part in parts]
        places = self._sizer.at_once(len(parts[0].session.span), left, decoding)
        return [parts[place] for place in places]


def _due_s(part: StepInput) -> float:
    return part.session.due_s
