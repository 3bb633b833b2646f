"""The directory: only what is true, newest and alive is seen, whatever arrives in whatever order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.swarm_examples import MODEL, OTHER_MODEL, facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import REMEMBER_GONE_S, Accepted, Directory
from molink.dht.membership.entries import living_records
from molink.dht.records.announcement import Reason, sign_facts, sign_state
from molink.dht.records.records import PROTOCOL_VERSION
from molink.shards.spec import Span

ADA, BOB, EVE = Identity.generate(), Identity.generate(), Identity.generate()


def facts(identity: Identity = ADA, sequence: int = 1, ttl_s: int = 3600, **altered: object) -> bytes:
    return sign_facts(replace(facts_of(identity, sequence=sequence, ttl_s=ttl_s), **altered), identity)


def state(
    identity: Identity = ADA, sequence: int = 2, facts_sequence: int = 1, ttl_s: int = 57, **altered: object
) -> bytes:
    value = state_of(identity, sequence=sequence, facts_sequence=facts_sequence, ttl_s=ttl_s)
    return sign_state(replace(value, **altered), identity)


def seen(directory: Directory, now: float) -> set[str]:
    return {view.peer_id for view in directory.snapshot(now)}


def test_a_peer_is_seen_once_facts_and_state_are_known() -> None:
    directory = Directory()
    assert directory.accept_state(state(), 0.0) is Reason.UNKNOWN_PEER
    assert directory.accept_facts(facts(), 0.0) == Accepted(ADA.peer_id, newcomer=True)
    assert seen(directory, 0.0) == set()
    assert directory.accept_state(state(), 1.0) == Accepted(ADA.peer_id, returns=True)
    (view,) = directory.snapshot(3.0)
    assert (view.facts, view.state) == (facts_of(ADA), state_of(ADA))
    assert view.age_s == pytest.approx(2.0)
    assert view.facts_record == facts()


def test_the_dead_are_not_seen_after_their_time_and_forgotten_later() -> None:
    directory = Directory()
    directory.accept_facts(facts(), 0.0)
    directory.accept_state(state(ttl_s=57), 10.0)
    assert seen(directory, 66.9) == {ADA.peer_id}
    assert seen(directory, 67.0) == set()
    version = directory.version
    directory.expire(67.0)
    assert directory.version > version
    assert living_records(directory.entries, 67.0) == ()
    directory.expire(10.0 + REMEMBER_GONE_S + 1)
    assert len(directory.entries) == 0


def test_only_higher_sequences_replace() -> None:
    directory = Directory()
    directory.accept_facts(facts(sequence=5), 0.0)
    directory.accept_state(state(sequence=7, facts_sequence=5, sessions=1), 0.0)
    for older in (6, 7):
        assert (
            directory.accept_state(state(sequence=older, facts_sequence=5, sessions=9), 1.0) is Reason.STALE
        )
    assert directory.accept_facts(facts(sequence=5, name="older"), 1.0) is Reason.STALE
    assert directory.snapshot(1.0)[0].state.sessions == 1
    assert isinstance(directory.accept_state(state(sequence=8, facts_sequence=5, sessions=2), 1.0), Accepted)
    assert directory.snapshot(1.0)[0].state.sessions == 2


def test_a_state_that_was_heard_before_keeps_nobody_alive() -> None:
    directory = Directory()
    directory.accept_facts(facts(), 0.0)
    replayed = state()
    directory.accept_state(replayed, 0.0)
    for now in (10.0, 56.0, 58.0, 300.0):
        directory.expire(now)
        assert directory.accept_state(replayed, now) is Reason.STALE
    assert seen(directory, 300.0) == set()


@pytest.mark.parametrize("by_facts", [True, False])
def test_a_leave_counts_at_once_and_older_records_do_not_undo_it(by_facts: bool) -> None:
    directory = Directory()
    directory.accept_facts(facts(), 0.0)
    directory.accept_state(state(sequence=2), 0.0)
    goodbye = facts(sequence=10, ttl_s=0) if by_facts else state(sequence=10, ttl_s=0, spans=())
    accept = directory.accept_facts if by_facts else directory.accept_state
    assert isinstance(accept(goodbye, 1.0, 1e6), Accepted)
    assert seen(directory, 1.0) == set()
    assert directory.accept_facts(facts(sequence=9), 2.0) is Reason.STALE
    assert directory.accept_state(state(sequence=9), 2.0) is Reason.STALE
    assert accept(goodbye, 3.0) is Reason.STALE
    directory.accept_facts(facts(sequence=11), 4.0)
    directory.accept_state(state(sequence=12, facts_sequence=11), 4.0)
    assert seen(directory, 4.0) == {ADA.peer_id}


def test_ages_count_when_records_are_handed_on() -> None:
    directory, newcomer = Directory(), Directory()
    directory.accept_facts(facts(), 0.0, age_s=100.0)
    directory.accept_state(state(ttl_s=57), 0.0, age_s=20.0)
    (record,) = living_records(directory.entries, 30.0)
    assert (record.facts_age_s, record.state_age_s) == (130.0, 50.0)
    newcomer.accept_facts(record.facts, 1000.0, record.facts_age_s)
    newcomer.accept_state(record.state, 1000.0, record.state_age_s)
    assert seen(newcomer, 1006.9) == {ADA.peer_id}
    assert seen(newcomer, 1007.0) == set()
    assert newcomer.accept_state(state(sequence=3), 1000.0, age_s=57.0) is Reason.EXPIRED
    assert newcomer.accept_facts(facts(sequence=3), 1000.0, age_s=-1.0) is Reason.EXPIRED


def test_a_restarted_peer_is_seen_as_before_until_all_of_the_new_is_known() -> None:
    directory = Directory()
    directory.accept_facts(facts(name="before"), 0.0)
    directory.accept_state(state(sequence=2, sessions=1), 0.0)
    accepted = directory.accept_state(state(sequence=11, facts_sequence=10, sessions=2), 1.0)
    assert accepted == Accepted(ADA.peer_id, facts_wanted=True)
    (view,) = directory.snapshot(1.0)
    assert (view.facts.name, view.state.sessions) == ("before", 1)
    directory.accept_facts(facts(sequence=10, name="after"), 2.0)
    (view,) = directory.snapshot(2.0)
    assert (view.facts.name, view.state.sessions) == ("after", 2)


def test_forgotten_facts_can_be_learned_again() -> None:
    directory = Directory()
    directory.accept_facts(facts(ttl_s=100), 0.0)
    directory.accept_state(state(ttl_s=57), 0.0)
    directory.expire(100.0)
    accepted = directory.accept_state(state(sequence=3), 101.0)
    assert accepted == Accepted(ADA.peer_id, facts_wanted=True, returns=True)
    directory.accept_facts(facts(ttl_s=100), 102.0, age_s=10.0)
    assert seen(directory, 102.0) == {ADA.peer_id}


def test_layers_beyond_the_model_are_never_seen() -> None:
    directory = Directory()
    directory.accept_facts(facts(), 0.0)
    directory.accept_state(state(spans=(Span(0, MODEL.layers + 1),)), 0.0)
    assert seen(directory, 0.0) == set()


def test_other_versions_are_seen_only_by_who_asks() -> None:
    directory = Directory()
    directory.accept_facts(facts(protocol_version=PROTOCOL_VERSION + 1), 0.0)
    directory.accept_state(state(), 0.0)
    assert directory.snapshot(0.0) == ()
    (view,) = directory.snapshot(0.0, other_versions=True)
    assert view.facts.protocol_version == PROTOCOL_VERSION + 1


def test_a_snapshot_can_be_of_one_model() -> None:
    directory = Directory()
    for identity, model in ((ADA, MODEL), (BOB, OTHER_MODEL)):
        directory.accept_facts(facts(identity, model=model), 0.0)
        directory.accept_state(state(identity), 0.0)
    assert seen(directory, 0.0) == {ADA.peer_id, BOB.peer_id}
    assert [view.peer_id for view in directory.snapshot(0.0, OTHER_MODEL.model_hash)] == [BOB.peer_id]


def test_a_peer_knows_itself_best_and_notices_what_others_hold() -> None:
    directory = Directory(ADA.peer_id)
    directory.hold_own(facts(sequence=1), state(sequence=2), 0.0)
    assert seen(directory, 0.0) == {ADA.peer_id}
    assert (
        directory.accept_facts(facts(sequence=50, name="from before the clock went back"), 1.0)
        is Reason.STALE
    )
    assert directory.accept_state(state(sequence=60, ttl_s=0, spans=()), 1.0) is Reason.STALE
    assert directory.own.held == 60
    assert seen(directory, 1.0) == {ADA.peer_id}
    assert directory.own_records() == (facts(sequence=1), state(sequence=2))
    directory.forget_own()
    assert seen(directory, 1.0) == set()


def test_the_unheard_go_first_when_it_is_full() -> None:
    directory = Directory(capacity=2)
    for identity in (ADA, BOB):
        directory.accept_facts(facts(identity), 0.0)
        directory.accept_state(state(identity), 0.0)
    directory.accept_state(state(ADA, sequence=3), 1.0)
    directory.accept_facts(facts(EVE), 2.0)
    directory.accept_state(state(EVE), 2.0)
    assert seen(directory, 2.0) == {ADA.peer_id, EVE.peer_id}
    assert directory.accept_state(state(BOB, sequence=5), 3.0) is Reason.UNKNOWN_PEER


def test_refusals_are_counted_by_reason() -> None:
    directory = Directory()
    directory.accept_state(state(), 0.0)
    directory.accept_facts(b"nonsense", 0.0)
    directory.accept_facts(facts()[:-1] + b"\xff", 0.0)
    directory.accept_facts(facts(), 0.0, age_s=1e9)
    directory.accept_facts(bytes(5000), 0.0)
    assert directory.refusals[Reason.UNKNOWN_PEER] == 1
    assert directory.refusals[Reason.EXPIRED] == 1
    assert directory.refusals[Reason.OVERSIZED] == 1
    assert directory.refusals[Reason.MALFORMED] + directory.refusals[Reason.FORGED] == 2
    assert len(directory.entries) == 0


@settings(max_examples=examples(60))
@given(st.data())
def test_in_any_order_the_newest_wins_and_nothing_comes_back(data: st.DataObject) -> None:
    said = [
        (facts(sequence=1), True),
        (state(sequence=2, sessions=2), False),
        (state(sequence=3, sessions=3), False),
        (facts(sequence=4, name="second"), True),
        (state(sequence=5, facts_sequence=4, sessions=5), False),
    ]
    if leaves := data.draw(st.booleans()):
        said.append((state(sequence=6, ttl_s=0, spans=()), False))
    heard = data.draw(st.permutations(said * 2))
    directory = Directory()
    for repeated in range(
        2
    ):  # a state that came before any facts is heard again, as neighbours' tables see to
        for record, is_facts in heard:
            (directory.accept_facts if is_facts else directory.accept_state)(record, float(repeated))
    views = directory.snapshot(2.0)
    if leaves:
        assert views == ()
    else:
        assert [(view.facts.sequence, view.state.sessions) for view in views] == [(4, 5)]
