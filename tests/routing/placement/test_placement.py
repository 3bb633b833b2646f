"""What a joining machine should hold, and what it is told that this changes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of
from support.properties import examples

from molink.dht.records.records import AnnouncedDraft, LayerLatency, PeerView
from molink.routing import Snapshot
from molink.routing.placement.coverage import layer_rates, layer_table
from molink.routing.placement.placement import (
    NOTICEABLE,
    JoiningMachine,
    JoinPreview,
    describe_preview,
    preview_join,
)
from molink.routing.routes.planner import plan
from molink.shards.spec import GUESSES, Span

LAYER = 1_000_000
ROUNDING = 1e-9


def machine(layers: float, **changes: object) -> JoiningMachine:
    """A machine with memory for so many layers, and for the embedding and the head besides."""
    values: dict[str, object] = {
        "peer_id": "new",
        "free_weight_bytes": int(layers * LAYER) + MODEL.embed_bytes + MODEL.head_bytes,
        "free_kv_bytes": 10**9,
        "layer_latencies": (LayerLatency(1, 2.0),),
    }
    return JoiningMachine(**(values | changes))  # type: ignore[arg-type]


def joined(snapshot: Snapshot, preview: JoinPreview, bring: JoiningMachine) -> Snapshot:
    """The swarm after the machine has taken the span."""
    assert preview.span is not None
    left = bring.free_weight_bytes - preview.fetch_bytes
    links = dict(bring.rtt_ms)
    view = peer(
        bring.peer_id,
        (preview.span.start, preview.span.stop),
        free_weight_bytes=left,
        free_kv_bytes=bring.free_kv_bytes,
        layer_latencies=bring.layer_latencies,
        embed_ms=bring.embed_ms,
        head_ms=bring.head_ms,
        links=links,
    )
    return dataclasses.replace(snapshot, peers=(*snapshot.peers, view))


@st.composite
def swarms(draw: st.DrawFn) -> Snapshot:
    views: list[PeerView] = []
    for index in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, 7))
        stop = draw(st.integers(start + 1, 8))
        views.append(
            peer(
                f"p{index}",
                (start, stop),
                free_weight_bytes=draw(st.integers(0, 3)) * LAYER,
                layer_latencies=(LayerLatency(1, draw(st.floats(0.5, 10.0))),),
                links={f"p{other}": draw(st.floats(1.0, 100.0)) for other in range(index)},
            )
        )
    return snapshot_of(*views)


@st.composite
def machines(draw: st.DrawFn) -> JoiningMachine:
    return machine(
        draw(st.integers(1, 8)),
        layer_latencies=(LayerLatency(1, draw(st.floats(0.5, 10.0))),),
        rtt_ms={f"p{index}": draw(st.floats(1.0, 100.0)) for index in range(4)},
    )


def test_in_an_empty_swarm_it_takes_as_many_layers_as_fit_from_the_first_one() -> None:
    preview = preview_join(snapshot_of(), machine(5))
    assert preview.span == Span(0, 5)
    assert (preview.tpot_before_ms, preview.tpot_after_ms) == (None, None)
    assert preview.fetch_bytes == 5 * LAYER + MODEL.embed_bytes
    assert preview_join(snapshot_of(), machine(8)).tpot_after_ms == pytest.approx(16.0)


def test_it_takes_the_layers_that_are_missing() -> None:
    preview = preview_join(snapshot_of(peer("a", (0, 3)), peer("b", (5, 8))), machine(2))
    assert preview.span == Span(3, 5)
    assert preview.tpot_before_ms is None
    assert preview.tpot_after_ms is not None
    assert "[3, 5)" in preview.reason
    assert preview.tokens_per_s_before == 0 < preview.tokens_per_s_after


def test_where_no_circuit_can_be_made_it_covers_the_most_missing_layers() -> None:
    preview = preview_join(snapshot_of(peer("a", (0, 1)), peer("b", (2, 3))), machine(3))
    assert preview.span == Span(3, 6)
    assert preview.tpot_after_ms is None
    assert "[1, 2), [6, 8) are still missing" in preview.reason


def test_a_fast_machine_takes_the_span_that_lowers_the_tpot_most() -> None:
    slow = peer("slow", (4, 8), layer_latencies=(LayerLatency(1, 9.0),))
    quick = peer("quick", (0, 4), layer_latencies=(LayerLatency(1, 1.0),), links={"slow": 2.0})
    preview = preview_join(snapshot_of(slow, quick), machine(4, rtt_ms={"slow": 2.0, "quick": 2.0}))
    assert preview.span == Span(4, 8)
    assert preview.tpot_before_ms is not None
    assert preview.tpot_after_ms is not None
    assert preview.tpot_after_ms < preview.tpot_before_ms - 20


def test_a_machine_too_far_away_to_be_quicker_adds_capacity_where_it_is_least() -> None:
    views = [peer("a", (0, 8)), peer("b", (0, 5))]
    preview = preview_join(snapshot_of(*views), machine(3, rtt_ms={"a": 500.0, "b": 500.0}))
    assert preview.span == Span(5, 8)
    assert preview.tpot_after_ms == preview.tpot_before_ms
    assert preview.tokens_per_s_after > preview.tokens_per_s_before
    assert "[5, 8)" in preview.reason


def test_what_it_holds_already_is_not_fetched_again() -> None:
    bring = machine(2, held=(Span(0, 2),))
    preview = preview_join(snapshot_of(peer("a", (4, 8))), bring)
    assert preview.span is not None
    assert preview.fetch_bytes == 2 * LAYER
    assert layer_table(8, (preview.span, Span(0, 2)))[:4].all()


def test_a_machine_without_memory_for_a_layer_is_told_so() -> None:
    preview = preview_join(snapshot_of(peer("a", (0, 8))), machine(1, free_kv_bytes=100))
    assert preview.span is None
    assert preview.fetch_bytes == 0
    assert "no layers" in describe_preview(preview)


def test_fetching_and_loading_take_their_time() -> None:
    preview = preview_join(snapshot_of(), machine(8, load_bytes_per_s=2e6, fetch_bytes_per_s=1e6))
    assert preview.ready_s == pytest.approx(preview.fetch_bytes * 1.5e-6)


def test_the_line_for_people_says_span_tpot_and_bytes() -> None:
    preview = preview_join(snapshot_of(peer("a", (0, 4))), machine(4))
    line = describe_preview(preview)
    assert "[4, 8)" in line
    assert "no circuit before" in line
    assert "4.4 MB" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "change",
    [
        {"free_weight_bytes": -1},
        {"layer_latencies": ()},
        {"embed_ms": float("nan")},
        {"load_bytes_per_s": 0.0},
    ],
)
def test_a_machine_that_makes_no_sense_is_refused_by_the_name_of_the_field(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        machine(1, **change)


@settings(max_examples=examples(40), deadline=None)
@given(swarms(), machines())
def test_joining_never_makes_the_swarm_worse_and_does_what_was_promised(
    snapshot: Snapshot, bring: JoiningMachine
) -> None:
    preview = preview_join(snapshot, bring)
    assert preview.span is not None
    assert preview.fetch_bytes <= bring.free_weight_bytes
    assert preview.tokens_per_s_after >= preview.tokens_per_s_before
    after = joined(snapshot, preview, bring)
    assert layer_rates(after.peers, 8).min() == pytest.approx(preview.tokens_per_s_after)
    if preview.tpot_before_ms is not None:
        assert preview.tpot_after_ms is not None
        assert preview.tpot_after_ms <= preview.tpot_before_ms
    if preview.tpot_after_ms is not None:
        assert plan(after, 512).tpot_ms >= preview.tpot_after_ms * (1 - ROUNDING)


def test_what_the_others_do_better_because_the_machines_layers_begin_somewhere_is_known_before() -> None:
    """Where one of two peers stops best the machine begins, which is too far away to be in the circuit itself."""
    fast = LayerLatency(1, 3.0)
    slow = peer("slow", (0, 7), layer_latencies=(LayerLatency(1, 9.0),))
    quick = peer("quick", (5, 8), free_weight_bytes=3 * LAYER, layer_latencies=(fast,), links={"slow": 2.0})
    away = {"slow": 500.0, "quick": 500.0}
    bring = machine(6, rtt_ms=away, span_limit=Span(2, 8), layer_latencies=(fast,))
    preview = preview_join(snapshot_of(slow, quick), bring)
    after = plan(joined(snapshot_of(slow, quick), preview, bring), 512).tpot_ms
    assert preview.tpot_before_ms == preview.tpot_after_ms == pytest.approx(2 * 9.0 + 6 * 3.0 + 4.4)
    assert preview.tpot_after_ms <= after


@settings(max_examples=examples(25), deadline=None)
@given(swarms(), machines())
def test_no_other_span_of_the_same_memory_is_noticeably_better(
    snapshot: Snapshot, bring: JoiningMachine
) -> None:
    preview = preview_join(snapshot, bring)
    if not any(view.state.spans for view in snapshot.peers):
        return
    best = np.inf
    for start in range(8):
        only = dataclasses.replace(bring, span_limit=Span(start, 8))
        other = preview_join(snapshot, only)
        best = min(best, np.inf if other.tpot_after_ms is None else other.tpot_after_ms)
    chosen = np.inf if preview.tpot_after_ms is None else preview.tpot_after_ms
    assert chosen <= best * (1 + NOTICEABLE + ROUNDING) or chosen == best


def test_a_draft_model_at_a_newcomer_lowers_what_tokens_take_where_it_would_be_the_head() -> None:
    lookup, model = AnnouncedDraft("lookup"), AnnouncedDraft("small", bytes(8), 0.25)
    tail = peer("a", (4, 8), sampling_abilities=(GUESSES,), drafts=(lookup,))
    bring = machine(4, rtt_ms={"a": 60.0}, drafts=(lookup, model))
    preview = preview_join(snapshot_of(tail), bring)
    without_ms, with_ms = preview.guessed_without_draft_ms, preview.guessed_with_draft_ms
    assert without_ms is not None
    assert with_ms is not None
    assert preview.tpot_after_ms is not None
    assert with_ms < 0.8 * without_ms < 0.8 * preview.tpot_after_ms
    assert f"With its draft model, where tokens are guessed: {with_ms:.1f} ms" in describe_preview(preview)
    plain = preview_join(snapshot_of(tail), machine(4, rtt_ms={"a": 60.0}, drafts=(lookup,)))
    assert (plain.guessed_with_draft_ms, plain.span) == (None, preview.span)
    assert "draft" not in describe_preview(plain)


def test_a_draft_model_changes_nothing_where_another_is_the_head() -> None:
    head = peer("a", (0, 4), sampling_abilities=(GUESSES,))
    model = AnnouncedDraft("small", bytes(8), 0.25)
    preview = preview_join(snapshot_of(head), machine(4, rtt_ms={"a": 60.0}, drafts=(model,)))
    assert preview.span == Span(4, 8)
    assert preview.guessed_with_draft_ms == preview.guessed_without_draft_ms
    assert "Its draft model changes nothing" in describe_preview(preview)
