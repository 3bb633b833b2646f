"""Nobody is gone on one other's word, nor while it can speak; who is, is forgotten soon."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of, known_keys, state_of

from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import REFUTE_S, Accepted, Directory
from molink.dht.membership.entries import living_records
from molink.dht.membership.failure_detector import (
    DEFER_S,
    LEAST_LOSSES,
    MAX_AHEAD_MS,
    MAX_DEFERRED,
    MAX_FALSE,
    MAX_LOSSES_OF_ONE,
    MAX_WITNESSES,
    NETWORK_SHARE,
    WINDOW_S,
    DeferredSuspicions,
    FailureDetector,
)
from molink.dht.membership.held import Origin
from molink.dht.membership.membership import Membership
from molink.dht.records.announcement import (
    MAX_LOSS_BYTES,
    AnnouncementError,
    Reason,
    sign_facts,
    sign_loss,
    sign_state,
    verify_loss,
)
from molink.dht.records.bounds import MAX_SEQUENCE
from molink.dht.records.records import PeerLoss
from molink.dht.records.state_codec import peer_tag

ADA, BOB, EVE, MALLORY = (Identity.generate() for _ in range(4))
TTL_S = 10_000


def tag(identity: Identity) -> int:
    return peer_tag(identity.public_key)


def loss(witness: Identity, lost: Identity = ADA, sequence: int = 2) -> bytes:
    return sign_loss(PeerLoss(tag(witness), tag(lost), sequence), witness)


def said(directory: Directory, identity: Identity, sequence: int, now: float) -> Accepted | Reason:
    state = state_of(identity, sequence=sequence, ttl_s=TTL_S)
    return directory.accept_state(sign_state(state, identity), now)


def of_four(own: Identity | None = None) -> Directory:
    directory = Directory(own.peer_id if own else None)
    for identity in (ADA, BOB, EVE, MALLORY):
        facts = sign_facts(facts_of(identity, ttl_s=TTL_S), identity)
        if identity is own:
            state = sign_state(state_of(identity, ttl_s=TTL_S), identity)
            directory.hold_own(facts, state, 0.0)
        else:
            directory.accept_facts(facts, 0.0)
            said(directory, identity, 2, 0.0)
    return directory


def sees_ada(directory: Directory, now: float) -> bool:
    directory.expire(now)
    return ADA.peer_id in {view.peer_id for view in directory.snapshot(now)}


def test_whom_two_call_gone_is_forgotten_after_a_minute_and_not_before() -> None:
    directory = of_four()
    assert directory.accept_loss(loss(BOB), 10.0) == Accepted(ADA.peer_id, gone=True)
    assert directory.accept_loss(loss(EVE), 20.0) == Accepted(ADA.peer_id, gone=True)
    assert sees_ada(directory, 20.0 + REFUTE_S - 0.1)
    assert not sees_ada(directory, 20.0 + REFUTE_S)


@pytest.mark.parametrize("times", [1, 50])
def test_one_peers_word_is_not_enough_however_often_it_is_said(times: int) -> None:
    directory = of_four()
    for at in range(times):
        directory.accept_loss(loss(MALLORY, sequence=2 + at), float(at))
    assert sees_ada(directory, TTL_S - 1.0)


def test_who_says_something_newer_is_not_gone() -> None:
    directory = of_four()
    for witness in (BOB, EVE):
        directory.accept_loss(loss(witness), 10.0)
    assert isinstance(said(directory, ADA, 3, 30.0), Accepted)
    assert directory.accept_loss(loss(MALLORY), 31.0) is Reason.STALE
    assert sees_ada(directory, TTL_S - 1.0)


def test_a_lost_peers_old_words_do_not_bring_it_back_and_new_ones_do() -> None:
    directory = of_four()
    for witness in (BOB, EVE):
        directory.accept_loss(loss(witness), 0.0)
    directory.expire(REFUTE_S)
    facts = sign_facts(facts_of(ADA, ttl_s=TTL_S), ADA)
    for now in (REFUTE_S + 1, 5000.0):
        directory.expire(now)
        directory.accept_facts(facts, now)
        assert said(directory, ADA, 2, now) is Reason.STALE
        assert not sees_ada(directory, now)
    assert isinstance(said(directory, ADA, 3, 5001.0), Accepted)
    assert sees_ada(directory, 5001.0)


def test_strangers_the_silent_and_the_lost_peer_itself_are_no_witnesses() -> None:
    directory = of_four()
    stranger = Identity.generate()
    assert directory.accept_loss(loss(stranger), 1.0) is Reason.UNKNOWN_PEER
    goodbye = sign_state(replace(state_of(BOB, sequence=9, ttl_s=0), spans=()), BOB)
    directory.accept_state(goodbye, 1.0)
    assert isinstance(directory.accept_loss(loss(BOB), REFUTE_S), Accepted)  # it said so before it left
    assert directory.accept_loss(loss(BOB, sequence=3), 1.0 + REFUTE_S) is Reason.UNKNOWN_PEER
    assert directory.accept_loss(loss(ADA), 3.0) is Reason.MALFORMED
    assert directory.accept_loss(loss(EVE, lost=stranger), 4.0) is Reason.UNKNOWN_PEER
    assert sees_ada(directory, TTL_S - 1.0)


def test_an_accusation_that_comes_before_its_witness_is_known_counts_from_then_on() -> None:
    directory, newcomer = of_four(), Identity.generate()
    directory.accept_loss(loss(BOB), 10.0)
    early = loss(newcomer)
    assert directory.accept_loss(early, 10.0) is Reason.UNKNOWN_PEER
    assert directory.retry_losses(11.0) == ()
    directory.accept_facts(sign_facts(facts_of(newcomer, ttl_s=TTL_S), newcomer), 12.0)
    said(directory, newcomer, 2, 12.0)
    assert directory.retry_losses(13.0) == ((early, Accepted(ADA.peer_id, gone=True)),)
    assert directory.retry_losses(14.0) == ()
    assert directory.failure_detector.count_witnesses(tag(ADA)) == 2


def test_an_accusation_that_is_ahead_of_what_is_known_counts_when_time_has_caught_up() -> None:
    directory = of_four()
    ahead = loss(BOB, sequence=2 + MAX_AHEAD_MS + 5_000)
    assert directory.accept_loss(ahead, 1.0) is Reason.UNKNOWN_PEER
    assert directory.retry_losses(2.0) == ()
    assert directory.retry_losses(6.0) == ((ahead, Accepted(ADA.peer_id, gone=True)),)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.binary(min_size=1, max_size=2)), max_size=200))
def test_of_what_cannot_be_judged_a_bounded_number_is_kept_for_a_minute(
    heard: list[tuple[float, bytes]],
) -> None:
    deferred, now = DeferredSuspicions(), 0.0
    for gap_s, record in heard:
        now += gap_s
        deferred.defer(record, now)
    kept = deferred.take(now)
    assert len(kept) <= MAX_DEFERRED
    assert all(now < until <= now + DEFER_S for _, until in kept)
    assert deferred.take(now) == ()


def test_whom_two_call_gone_is_not_handed_on_until_it_speaks() -> None:
    directory = of_four()
    directory.accept_loss(loss(BOB), 10.0)
    assert not directory.failure_detector.is_suspected(tag(ADA))
    directory.accept_loss(loss(EVE), 10.0)
    assert directory.failure_detector.is_suspected(tag(ADA))
    said(directory, ADA, 3, 20.0)
    assert not directory.failure_detector.is_suspected(tag(ADA))


def test_a_suspicion_is_undecided_until_a_second_confirms_it_or_the_peer_has_spoken() -> None:
    directory = of_four()
    detector = directory.failure_detector
    directory.accept_loss(loss(BOB), 10.0)
    assert detector.undecided(9.0) == ()
    assert detector.undecided(10.0) == (tag(ADA),)
    directory.accept_loss(loss(EVE), 11.0)
    assert detector.undecided(20.0) == ()
    assert said(directory, ADA, 3, 20.0) == Accepted(ADA.peer_id, returns=True)
    directory.accept_loss(loss(BOB, sequence=3), 30.0)
    assert detector.undecided(30.0) == (tag(ADA),)
    said(directory, ADA, 4, 40.0)
    assert detector.undecided(40.0) == ()


def test_a_peer_hears_that_it_is_called_gone_and_does_not_believe_it() -> None:
    directory = of_four(own=ADA)
    for witness in (BOB, EVE):
        directory.accept_loss(loss(witness), 0.0)
    assert directory.own.accused == 2
    assert sees_ada(directory, 10 * REFUTE_S)


@given(st.lists(st.tuples(st.sampled_from([BOB, EVE, MALLORY]), st.integers(2, MAX_SEQUENCE)), max_size=12))
def test_whatever_liars_claim_to_have_heard_the_peer_can_go_beyond(lies: list[tuple[Identity, int]]) -> None:
    elsewhere, own = of_four(), of_four(own=ADA)
    for witness, sequence in lies:
        believed = elsewhere.accept_loss(loss(witness, sequence=sequence), 1.0)
        assert own.accept_loss(loss(witness, sequence=sequence), 1.0) == believed
    beyond = max(own.own.accused, 2) + 1
    assert beyond <= 3 + 1000 + MAX_AHEAD_MS
    assert isinstance(said(elsewhere, ADA, beyond, 2.0), Accepted)
    assert sees_ada(elsewhere, TTL_S - 1.0)


def test_a_witness_may_tell_of_as_many_as_it_could_have_known() -> None:
    losses = FailureDetector(REFUTE_S)
    heard = [
        losses.record_suspicion(PeerLoss(1, peer, 5), 0.0) for peer in range(2, 2 + 2 * MAX_LOSSES_OF_ONE)
    ]
    assert sum(heard) == MAX_LOSSES_OF_ONE
    assert losses.record_suspicion(PeerLoss(1, 10_000, 5), WINDOW_S)


def test_whoever_told_too_much_that_was_false_is_not_listened_to_for_a_time() -> None:
    losses = FailureDetector(REFUTE_S)
    for peer in range(2, 2 + MAX_FALSE):
        assert losses.record_suspicion(PeerLoss(1, peer, 5), 0.0)
        losses.refute(peer, 6)
    assert not losses.record_suspicion(PeerLoss(1, 100, 5), 1.0)
    assert losses.record_suspicion(PeerLoss(2, 100, 5), 1.0)
    assert losses.record_suspicion(PeerLoss(1, 100, 5), WINDOW_S)


@pytest.mark.parametrize("peers", [10, 1_000])
def test_a_network_of_accusers_leaves_others_their_voice_and_all_together_are_bounded(peers: int) -> None:
    losses, most = FailureDetector(REFUTE_S), max(LEAST_LOSSES, 2 * peers)

    def accepted(network: str, first: int) -> int:
        told = (PeerLoss(first + at // 20, 1_000_000 * first + at, 5) for at in range(3 * most))
        return sum(losses.record_suspicion(loss, 0.0, network, peers) for loss in told)

    assert accepted("crowd", 1) == most // NETWORK_SHARE
    assert accepted("elsewhere", 5_000) == most - most // NETWORK_SHARE
    assert accepted("third", 7_000) == 0


def test_forty_liars_and_1404_false_losses_hide_nobody_who_speaks() -> None:
    directory = of_four()
    sybils = [Identity.generate() for _ in range(40)]
    for sybil in sybils:
        directory.accept_facts(sign_facts(facts_of(sybil, ttl_s=TTL_S), sybil), 0.0)
        said(directory, sybil, 2, 0.0)
    now, sequence = 0.0, 2
    for told in range(1404):
        now += 0.2
        directory.accept_loss(loss(sybils[told % 40], sequence=sequence), now)
        if told % 85 == 84:  # it speaks every 17 s
            sequence += 1
            assert isinstance(said(directory, ADA, sequence, now), Accepted)
        assert sees_ada(directory, now)


def test_the_last_words_of_the_gone_are_kept_for_them() -> None:
    membership = Membership(None, lambda: None, clock=lambda: 100.0)
    membership.receive(sign_facts(facts_of(ADA), ADA))
    membership.receive(sign_state(state_of(ADA), ADA))
    goodbye = sign_state(replace(state_of(ADA, sequence=9, ttl_s=0), spans=()), ADA)
    membership.receive(goodbye)
    assert membership.table() == ()
    assert [record.state for record in membership.table((tag(ADA), tag(BOB)))] == [goodbye]
    own = Membership(ADA.peer_id, lambda: None)
    own.receive(goodbye, 0.0, source=BOB.peer_id)
    assert (own.own.held_sequence, own.own.sequence_told_last) == (9, 9)


def test_a_peer_notices_that_others_hold_just_what_it_said() -> None:
    directory = of_four(own=ADA)
    assert directory.own.told_last is None
    (_, newest) = directory.own_records()
    assert directory.accept_state(newest, 1.0, 0.0, Origin(BOB.peer_id)) is Reason.STALE
    assert directory.own.told_last == 2
    assert directory.own.held == -1


def test_who_does_not_answer_is_shown_to_people_only_until_it_speaks() -> None:
    directory = of_four()
    directory.entries.mark(ADA.peer_id, answers=False)
    assert not sees_ada(directory, 1.0)
    assert tag(ADA) not in {record.peer_tag for record in living_records(directory.entries, 1.0)}
    (shown,) = (view for view in directory.snapshot(1.0, silent=True) if view.peer_id == ADA.peer_id)
    assert not shown.answers
    said(directory, ADA, 3, 2.0)
    assert sees_ada(directory, 2.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=30), st.integers(0, 6))
def test_only_two_who_knew_the_newest_words_count(told: list[tuple[int, int]], newest: int) -> None:
    losses = FailureDetector(REFUTE_S)
    for witness, sequence in told:
        losses.record_suspicion(PeerLoss(witness, 100, sequence), 0.0)
        assert losses.count_witnesses(100) <= MAX_WITNESSES
    losses.refute(100, newest)
    believed = losses.take_confirmed(REFUTE_S) == (100,)
    assert not believed or len({witness for witness, sequence in told if sequence >= newest}) >= 2


@given(st.integers(0, 2**64 - 1), st.integers(0, MAX_SEQUENCE))
def test_a_loss_comes_out_as_it_went_in(lost: int, sequence: int) -> None:
    told = PeerLoss(tag(BOB), lost, sequence)
    record = sign_loss(told, BOB)
    assert len(record) <= MAX_LOSS_BYTES
    assert verify_loss(record, known_keys([BOB.public_key])) == told


def test_a_loss_cannot_be_altered_or_signed_for_another() -> None:
    record, keys = loss(BOB), known_keys([BOB.public_key, EVE.public_key])
    for position in range(len(record)):
        altered = bytearray(record)
        altered[position] ^= 0x01
        with pytest.raises(AnnouncementError):
            verify_loss(bytes(altered), keys)
    with pytest.raises(AnnouncementError, match="another witnessed"):
        sign_loss(PeerLoss(tag(EVE), tag(ADA), 1), BOB)


@given(st.binary(max_size=MAX_LOSS_BYTES + 8))
def test_whatever_bytes_come_are_no_loss_or_refused(body: bytes) -> None:
    with pytest.raises(AnnouncementError):
        verify_loss(b"\x60" + body, known_keys([BOB.public_key]))
