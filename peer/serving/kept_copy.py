"""A second copy of one hop's KV cache of one session, as its standby has it."""

import logging
from collections import deque
from dataclasses import dataclass, field

import torch

from molink.peer.engine.sessions import SessionPlan
from molink.peer.engine.steps import is_sound
from molink.peer.redundancy.copy_intake import CopyIntake
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.codec import dtype_of
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitingPart:
    """A part of a copy that is to be written."""

    start: int
    tokens: int
    form: "pb.CopyForm.ValueType"
    content: bytes


@dataclass(slots=True, eq=False)
class KeptCopy:
    """A copy of one hop's KV cache of one session."""

    plan: SessionPlan
    hop: int
    owner: Link
    """The client's link."""
    intake: CopyIntake
    cache: SequenceCache | None = None
    """Its blocks have no names and never get any: what a hop sends may be a lie, which must not outlive the session."""
    waiting: deque[WaitingPart] = field(default_factory=deque)
    is_awaited: bool = False
    """Whether its session is about to go on here."""
    is_written: bool = False
    """Whether the first part that waits is being written."""

    @property
    def span(self) -> Span:
        return self.plan.span_of(self.hop)

    @property
    def source(self) -> str:
        """The peer whose copy it is."""
        return self.plan.hops[self.hop].peer_id

    def restart(self) -> None:
        """What waits, but for what is being written, is dropped."""
        writing = self.waiting[0] if self.is_written and self.waiting else None
        self.waiting.clear()
        self.intake.restart()
        if writing is not None:
            self.waiting.append(writing)
            self.intake.fault_of(writing.start, writing.tokens, len(writing.content))

    def write(self, part: WaitingPart, spec: ModelSpec) -> None:
        """On the engine's thread: the part's tokens are the cache's from now on.

        Raises:
            ValueError, RuntimeError: it is no part of such a copy.
        """
        cache = self.cache
        if cache is None or cache.closed or part.start + part.tokens <= cache.length:
            return
        if part.form != pb.KEYS_AND_VALUES:
            raise ValueError("a part is of a form that is not taken")
        self._require_sound(part.content, spec)
        cache.restore(part.start, part.tokens, part.content)

    def write_waiting(self, spec: ModelSpec) -> None:
        """On the engine's thread, of a copy that is the session's from now on: writes what has come and only has to be
        written."""
        for part in self.waiting:
            if part.form != pb.KEYS_AND_VALUES:
                break
            try:
                self.write(part, spec)
            except (ValueError, RuntimeError) as error:
                _log.info("a copy is taken over as it was before a part that is none: %s", error)
                break

    def _require_sound(self, content: bytes, spec: ModelSpec) -> None:
        """Numbers that are none would be blamed on this peer, once it computes with them."""
        dtype, span = dtype_of(spec.dtype), self.span
        if any(spec.state_bytes[span.start : span.stop]) or len(content) % dtype.itemsize:
            return
        if not is_sound(torch.frombuffer(bytearray(content), dtype=dtype)):
            raise ValueError("a part holds what no sound hop sends")
