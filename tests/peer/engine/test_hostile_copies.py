"""Whatever parts a hop sends, a copy grows by what was computed or written of it, within its capacity, or ends."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.counted_copies import LINE_BYTES, PLAN, ROW_BYTES, CountingEngine, kept_copy
from support.links.data_plane import SPEC

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.kept_copy import KeptCopy
from molink.peer.redundancy.copy_sending import PORTION_BYTES, WINDOW_BYTES
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import GATHER_S

pytestmark = pytest.mark.fuzz


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
