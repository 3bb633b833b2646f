"""Which way decode steps go on each span: recorded, together by address, or session by session."""

import logging
from collections.abc import Callable, Sequence

import torch

from molink.shards.batching.decode import PagedSpan
from molink.shards.errors import in_one_line
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.spec import Span, missing_spans

_log = logging.getLogger(__name__)


class PagedSpans:
    """Owner of the spans on which the sessions of a step attend together. Used from the engine's thread."""

    def __init__(
        self,
        opened: Callable[[Span], PagedSpan | None],
        layers: int,
        drawing: RecordedDrawing | None,
    ) -> None:
        """`opened` makes one; None where the span's layers attend in another way. Raises whatever goes wrong. `drawing`
        is what follows the last of the model's layers."""
        self._drawing = drawing
        self._layers = layers
        self._opened = opened
        self._spans: dict[Span, PagedSpan | None] = {}
        self._unrecorded: list[Span] = []
        """Those of which steps are to be recorded before sessions step."""
        self.failure: Exception | None = None
        """Why sessions on some span attend one after the other, though they were meant to attend together."""

    def get(self, span: Span) -> PagedSpan | None:
        """None: sessions attend one after the other."""
        if span not in self._spans:
            self._spans[span] = self._proven(span)
        return self._spans[span]

    def added(self, span: Span) -> None:
        """These layers can run from now on."""
        self._unrecorded.append(span)

    def changed(self, spans: Sequence[Span], held: Sequence[Span]) -> None:
        """Stages of these spans are gone, or others stand for a part of them; `held` is what can run now."""
        for span in [known for known in self._spans if any(overlap(known, one) for one in spans)]:
            if self._spans.pop(span) is not None and not missing_spans(span, tuple(held)):
                self._unrecorded.append(span)
        if self._drawing is not None and not self._ends(held):
            self._drawing.forget()

    def record_next(self, held: Sequence[Span]) -> bool:
        """Records one more size of what was added or changed, or of drawings behind the last layer; whether there was
        one."""
        paged = self.to_record(held)
        if paged is not None:
            return paged.record_next()
        return self._drawing is not None and self._ends(held) and self._drawing.record_next()

    def _ends(self, held: Sequence[Span]) -> bool:
        return any(span.stop == self._layers for span in held)

    def to_record(self, held: Sequence[Span], span: Span | None = None) -> PagedSpan | None:
        """What has steps that are to be recorded: `span`, or what was added or changed. None: nothing, or it is not
        among what is held."""
        if span is not None:
            return self._unfinished(held, span)
        while self._unrecorded:
            paged = self._unfinished(held, self._unrecorded[-1])
            if paged is not None:
                return paged
            self._unrecorded.pop()
        return None

    def record(self, span: Span) -> None:
        """Records all sizes that are left of one span."""
        paged = self.get(span)
        while paged is not None and paged.record_next():
            continue

    def attend_apart(self, span: Span, error: Exception) -> None:
        """Sessions on the span attend one after the other from now on, since together they cannot."""
        self._spans[span] = None
        self.failure = error
        _log.warning(
            "sessions on layers %s attend one after the other: together they end with %s",
            span,
            in_one_line(error),
        )

    def _unfinished(self, held: Sequence[Span], span: Span) -> PagedSpan | None:
        paged = None if missing_spans(span, tuple(held)) else self.get(span)
        return None if paged is None or paged.next_size is None else paged

    def _proven(self, span: Span) -> PagedSpan | None:
        try:
            with torch.inference_mode():
                paged = self._opened(span)
                if paged is not None:
                    paged.prove()
        except Exception as error:  # noqa: BLE001 - compilers of kernels raise what they like: the next way needs none
            self.attend_apart(span, error)
            return None
        return paged


def overlap(one: Span, other: Span) -> bool:
    """Whether they have a layer in common."""
    return one.start < other.stop and other.start < one.stop
