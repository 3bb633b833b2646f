"""Whatever parts a hop sends, a copy grows by what was computed or written of it, within its capacity, or ends."""

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC, describe, hop_of
from torch import Tensor

from molink.dht.identity.identity import Identity
from molink.peer.compute.backend import StageEngine
from molink.peer.engine.kept_copy import KeptCopy, input_rows
from molink.peer.engine.sessions import SessionPlan, read_plan
from molink.peer.redundancy.copy_intake import CopyIntake
from molink.peer.redundancy.copy_sending import PORTION_BYTES, WINDOW_BYTES
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import GATHER_S
from molink.shards.batching.engine import Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

pytestmark = pytest.mark.fuzz

PLAN: SessionPlan = read_plan(
    describe([hop_of(Identity.generate(), Span(0, 3)), hop_of(Identity.generate(), Span(3, 6))]), SPEC
)
LINE_BYTES = sum(SPEC.kv_bytes_per_token[0:3])
ROW_BYTES = SPEC.activation_bytes


class CountingCache:
    """As a KV cache, but for the keys and values."""

    closed, length = False, 0

    def restore(self, start: int, tokens: int, exported: bytes) -> None:
        if start > self.length or len(exported) != tokens * LINE_BYTES:
            raise ValueError("no such tokens")
        self.length = start + tokens


class CountingEngine:
    """As an engine, but for the numbers: it refuses what an engine refuses."""

    spec = SPEC

    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> None:
        (row,) = rows
        assert (span.start == 0) == (hidden is None)
        if hidden is not None:
            assert hidden.shape == (row.count, SPEC.hidden_size)
            assert bool(hidden.isfinite().all())
        elif max(row.token_ids or ()) >= SPEC.vocabulary_size:
            raise ValueError("no token id")
        row.cache.length += row.count

    def to_host(self, _: Sequence[Tensor]) -> None:
        return None


def kept_copy(hop: int) -> KeptCopy:
    log = InputLogs(10**6).open(*input_rows(PLAN, hop, SPEC))
    cache = cast("SequenceCache", CountingCache())
    intake = CopyIntake(PLAN.capacity_tokens)
    return KeptCopy(PLAN, hop, cast("Link", None), intake, log, cache)


@st.composite
def parts(draw: st.DrawFn, hop: int, kept: KeptCopy) -> tuple[pb.CopyPart, bytes]:
    """The next part of the copy, more often than not, or one that is wrong somewhere."""
    right = draw(st.sampled_from((pb.KEYS_AND_VALUES, pb.TOKEN_IDS if hop == 0 else pb.INPUTS)))
    form = draw(st.sampled_from((right, right, right, pb.CopyForm.ValueType(draw(st.integers(0, 4))))))
    tokens = draw(st.sampled_from((1, 2, 17, draw(st.integers(0, 2**32 - 1)))))
    start = draw(st.sampled_from((kept.intake.awaited_tokens,) * 5 + (draw(st.integers(0, 2**32 - 1)),)))
    token_bytes = {pb.KEYS_AND_VALUES: LINE_BYTES, pb.INPUTS: ROW_BYTES}.get(form, 4)
    size = min(tokens, 100) * token_bytes + draw(st.sampled_from((0, 0, 0, -1, 4)))
    fill = draw(st.sampled_from((b"\0", b"\0", b"\x01", b"\xff")))
    content = fill * max(0, size)
    return pb.CopyPart(start=start, tokens=tokens, payload_bytes=len(content), form=form), content


@given(st.sampled_from((0, 1)), st.data())
def test_whatever_parts_come_a_copy_goes_on_without_a_gap_or_ends(hop: int, data: st.DataObject) -> None:
    kept, engine = kept_copy(hop), cast("StageEngine", CountingEngine())
    assert kept.cache is not None
    for now_s in range(data.draw(st.integers(1, 12))):
        part, content = data.draw(parts(hop, kept))
        if kept.fault_of(part, SPEC) is not None:
            continue
        kept.add(part, content, float(now_s))
        assert kept.intake.waiting_bytes == sum(len(one.content) for one in kept.waiting)
        assert kept.intake.waiting_bytes <= WINDOW_BYTES + PORTION_BYTES
        assert kept.due_s() <= now_s + GATHER_S
        if data.draw(st.booleans()):
            kept.restart()
        while kept.waiting and data.draw(st.booleans()):
            piece = kept.next_piece(data.draw(st.integers(1, 40)))
            try:
                kept.write(piece, engine)
            except ValueError:
                return
            kept.record_written(piece)
            assert kept.cache.length == kept.intake.kept_tokens <= PLAN.capacity_tokens
            if piece.form:
                assert kept.inputs.end == kept.intake.kept_tokens
