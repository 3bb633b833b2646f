"""A second copy of one hop's KV cache of one session, as its standby has it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import torch

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.arrivals import is_sound
from molink.peer.engine.sessions import SessionPlan
from molink.peer.redundancy.copy_intake import CopyIntake
from molink.peer.redundancy.input_log import InputLog
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import (
    GATHER_S,
    GATHERED_TOKENS,
    TOKEN_ID_BYTES,
    CopyForm,
    computed_form,
    form_of,
)
from molink.shards import codec
from molink.shards.batching.engine import Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span, row_bytes


@dataclass(frozen=True, slots=True)
class WaitingPart:
    """A part of a copy that is to be written, or computed."""

    start: int
    tokens: int
    form: CopyForm
    encoding: str
    """Of its rows, if it is of these."""
    content: bytes
    came_s: float = 0.0

    def split(self, tokens: int) -> "tuple[WaitingPart, WaitingPart]":
        """Its first so many tokens, and the others: of a form in which all tokens take as much."""
        size, rest = len(self.content) // self.tokens * tokens, self.tokens - tokens
        first = WaitingPart(self.start, tokens, self.form, self.encoding, self.content[:size], self.came_s)
        others = self.content[size:]
        return first, WaitingPart(self.start + tokens, rest, self.form, self.encoding, others, self.came_s)


@dataclass(slots=True, eq=False)
class KeptCopy:
    """A copy of one hop's KV cache of one session."""

    plan: SessionPlan
    hop: int
    owner: Link
    """The client's link."""
    intake: CopyIntake
    inputs: InputLog
    """What of it was computed, for copies of this copy."""
    cache: SequenceCache | None = None
    """Its blocks have no names and never get any: what a hop sends may be a lie, which must not outlive the session."""
    allocating: asyncio.Task[str] | None = None
    """What takes the cache's memory, and says why it could not; each request for the copy waits for it."""
    waiting: deque[WaitingPart] = field(default_factory=deque)
    is_awaited: bool = False
    """Whether its session is about to go on here."""
    written_parts: int = 0
    """Those that are being written: the first of the parts that wait."""

    @property
    def span(self) -> Span:
        return self.plan.span_of(self.hop)

    @property
    def source(self) -> str:
        """The peer whose copy it is."""
        return self.plan.hops[self.hop].peer_id

    def restart(self) -> None:
        """What waits, but for what is being written, is dropped."""
        writing = tuple(islice(self.waiting, self.written_parts))
        self.waiting.clear()
        self.intake.restart()
        for part in writing:
            self.waiting.append(part)
            self.intake.fault_of(part.start, part.tokens, len(part.content))
            self.intake.is_begun = False

    def fault_of(self, part: pb.CopyPart, spec: ModelSpec) -> str | None:
        """What is wrong with a part by what is said of it; None: nothing, and it is to be `add`ed."""
        form, token_bytes = form_of(part.form, spec, self.span), None
        if form is None:
            return f"a part is of form {part.form}, in which this copy is not taken"
        if form is not CopyForm.KEYS_AND_VALUES:
            _, token_bytes = input_rows(self.plan, self.hop, spec)
        if token_bytes is not None and part.payload_bytes != part.tokens * token_bytes:
            return f"{part.tokens} tokens of {token_bytes} bytes each are not {part.payload_bytes} bytes"
        return self.intake.fault_of(part.start, part.tokens, part.payload_bytes)

    def add(self, part: pb.CopyPart, content: bytes, now_s: float) -> None:
        """The part waits from now on."""
        form = CopyForm(part.form)
        encoding = self.plan.encodings[self.hop - 1] if form is CopyForm.INPUTS else ""
        self.waiting.append(WaitingPart(part.start, part.tokens, form, encoding, content, now_s))

    def due_s(self) -> float:
        """When the first part that waits is to be written: at once, or where it is computed when enough of them have
        come, or have waited."""
        first = self.waiting[0]
        gathered = self.intake.awaited_tokens - self.intake.kept_tokens
        if self.is_awaited or first.form is CopyForm.KEYS_AND_VALUES or gathered >= GATHERED_TOKENS:
            return 0.0
        return first.came_s + GATHER_S

    def next_piece(self, most_tokens: int) -> WaitingPart:
        """The first of what waits, from now on in one part: what is computed, as so many tokens at most."""
        if self.written_parts:
            return self.waiting[0]
        piece = self.waiting.popleft()
        if piece.form is not CopyForm.KEYS_AND_VALUES:
            while piece.tokens < most_tokens and self.waiting and self._continues(piece, self.waiting[0]):
                behind = self.waiting.popleft()
                content = piece.content + behind.content
                tokens = piece.tokens + behind.tokens
                piece = WaitingPart(piece.start, tokens, piece.form, piece.encoding, content, piece.came_s)
            if piece.tokens > most_tokens:
                piece, rest = piece.split(most_tokens)
                self.waiting.appendleft(rest)
        self.waiting.appendleft(piece)
        return piece

    def parts_to_write(self) -> Sequence[WaitingPart]:
        """The parts from the first on that only have to be written."""
        return tuple(takewhile(_is_lines, self.waiting))

    def record_written(self, piece: WaitingPart) -> None:
        """The first part that waits is the cache's."""
        self.waiting.popleft()
        self.intake.record_written(piece.tokens, len(piece.content))
        if piece.form is not CopyForm.KEYS_AND_VALUES and piece.encoding == self.inputs.encoding:
            self.inputs.record(piece.start, piece.content)

    def write(self, piece: WaitingPart, engine: StageEngine) -> None:
        """On the engine's thread: the piece's tokens are the cache's from now on.

        Raises:
            ValueError, RuntimeError: it is no piece of such a copy.
        """
        cache = self.cache
        if cache is None or cache.closed or piece.start + piece.tokens <= cache.length:
            return
        if piece.form is CopyForm.KEYS_AND_VALUES:
            _require_sound(
                torch.frombuffer(bytearray(piece.content), dtype=codec.dtype_of(engine.spec.dtype))
            )
            cache.restore(piece.start, piece.tokens, piece.content)
            return
        if piece.start < cache.length:
            piece = piece.split(cache.length - piece.start)[1]
        if piece.start > cache.length:
            raise ValueError(f"a piece begins at {piece.start}, behind the copy's end at {cache.length}")
        ids, hidden = None, None
        if piece.form is CopyForm.TOKEN_IDS:
            ids = tuple(memoryview(piece.content).cast("I"))
        else:
            hidden = codec.decode_apart(
                piece.content, piece.tokens, engine.spec.hidden_size, engine.spec.dtype, piece.encoding
            )
            _require_sound(hidden)
        engine.step(self.span, [Rows(cache, piece.tokens, ids, False)], hidden)
        engine.to_host(())

    @staticmethod
    def _continues(piece: WaitingPart, behind: WaitingPart) -> bool:
        return (piece.form, piece.encoding) == (behind.form, behind.encoding)


def _is_lines(part: WaitingPart) -> bool:
    return part.form is CopyForm.KEYS_AND_VALUES


def input_rows(plan: SessionPlan, hop: int, spec: ModelSpec) -> tuple[str, int]:
    """The encoding and the length of what comes to a hop for each token; token ids, to a head, have no encoding."""
    if computed_form(plan.span_of(hop)) is CopyForm.TOKEN_IDS:
        return "", TOKEN_ID_BYTES
    encoding = plan.encodings[hop - 1]
    return encoding, row_bytes(encoding, spec.hidden_size)


def _require_sound(numbers: torch.Tensor) -> None:
    """Numbers that are none would be blamed on this peer, once it computes with them."""
    if not is_sound(numbers):
        raise ValueError("a part holds what no sound hop sends")
