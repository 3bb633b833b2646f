"""What a peer guesses tokens with is announced as it is, takes few bytes, and is bounded."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import AnnouncementError, Reason, sign_facts, verify_facts
from molink.dht.records.description import describe_peer
from molink.dht.records.facts_codec import MAX_DRAFTS, MAX_GUESS_MS
from molink.dht.records.records import AnnouncedDraft, PeerState, PeerView

IDENTITY = Identity.generate()
LOOKUP, TABLES = AnnouncedDraft("lookup"), AnnouncedDraft("tables")
MODEL = AnnouncedDraft("tiny-shakespeare-draft", bytes(range(8)), 0.375)


def record_of(*drafts: AnnouncedDraft) -> bytes:
    return sign_facts(replace(facts_of(IDENTITY), drafts=drafts), IDENTITY)


def resigned(record: bytes, change: Callable[[pb.Facts], object]) -> bytes:
    """The same peer's record with facts that it would not sign itself."""
    message = pb.Facts.FromString(record[65:])
    change(message)
    body = message.SerializeToString()
    return b"\xf1" + IDENTITY.sign(b"molink-announcement-1\0\xf1" + body) + body


@pytest.mark.parametrize("drafts", [(), (LOOKUP,), (LOOKUP, TABLES, MODEL)])
def test_drafts_come_out_as_they_went_in_and_none_take_no_bytes(drafts: tuple[AnnouncedDraft, ...]) -> None:
    record = record_of(*drafts)
    assert verify_facts(record).drafts == drafts
    assert len(record) - len(record_of()) <= sum(12 + len(one.name) + len(one.tokenizer) for one in drafts)


def test_who_says_nothing_of_drafts_has_none() -> None:
    assert verify_facts(resigned(record_of(LOOKUP), lambda said: said.ClearField("drafts"))).drafts == ()


@given(
    st.lists(
        st.builds(
            AnnouncedDraft,
            st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12),
            st.just(b"") | st.binary(min_size=8, max_size=8),
            st.integers(2048, 4095).flatmap(
                lambda bits: st.integers(-20, 1).map(lambda two: bits * 2.0**two)
            ),
        ),
        max_size=MAX_DRAFTS,
    )
)
def test_any_drafts_within_bounds_are_announced(drafts: list[AnnouncedDraft]) -> None:
    assert verify_facts(record_of(*drafts)).drafts == tuple(drafts)


@pytest.mark.parametrize(
    "draft",
    [
        pb.Draft(name=""),
        pb.Draft(name="x" * 25),
        pb.Draft(name="a\nb"),
        pb.Draft(name="a", tokenizer=bytes(7)),
        pb.Draft(name="a", tokenizer=bytes(32)),
        pb.Draft(name="a", guess_ms=-1.0),
        pb.Draft(name="a", guess_ms=float("nan")),
        pb.Draft(name="a", guess_ms=float("inf")),
        pb.Draft(name="a", guess_ms=2 * MAX_GUESS_MS),
    ],
)
def test_a_draft_out_of_bounds_is_refused(draft: pb.Draft) -> None:
    with pytest.raises(AnnouncementError) as refusal:
        verify_facts(resigned(record_of(), lambda said: said.drafts.append(draft)))
    assert refusal.value.reason is Reason.MALFORMED
    with pytest.raises(AnnouncementError):
        record_of(AnnouncedDraft(draft.name, draft.tokenizer, draft.guess_ms))


def test_more_drafts_than_there_could_be_are_refused() -> None:
    many = [pb.Draft(name="lookup")] * (MAX_DRAFTS + 1)
    with pytest.raises(AnnouncementError):
        verify_facts(resigned(record_of(), lambda said: said.drafts.extend(many)))


def test_drafts_are_described_for_people() -> None:
    facts = verify_facts(record_of(LOOKUP, MODEL))
    state = PeerState(facts.peer_id, 2, 60, 1, (), 0, 0, 0, 0)
    described = describe_peer(PeerView(facts, state, age_s=0.0))["drafts"]
    assert described == [
        {"name": "lookup", "tokenizer": None, "guess_ms": 0.0},
        {"name": MODEL.name, "tokenizer": MODEL.tokenizer.hex(), "guess_ms": 0.375},
    ]
