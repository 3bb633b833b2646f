"""Whom a client leaves out where one hop's word stands against another's."""

from support.swarms.swarm_examples import facts_of

from molink.client.circuit.blame import (
    MOST_REMEMBERED,
    REMEMBERED_S,
    BlameLedger,
    BlameVerdict,
    second_choices,
)
from molink.client.circuit.quarantine import Quarantine
from molink.dht.identity.identity import Identity


def test_the_first_accusation_is_believed_and_the_second_of_the_same_hop_is_not() -> None:
    ledger = BlameLedger()
    assert ledger.accuse("liar", "honest", 0.0) == BlameVerdict("honest")
    assert ledger.accuse("liar", "other", 1.0) == BlameVerdict("liar", frozenset({"honest", "other"}))


def test_who_accuses_the_same_hop_again_goes_too() -> None:
    ledger = BlameLedger()
    ledger.accuse("liar", "honest", 0.0)
    assert ledger.accuse("liar", "honest", 1.0) == BlameVerdict("liar", frozenset({"honest"}))


def test_whom_two_accuse_goes_whatever_it_says_of_them() -> None:
    ledger = BlameLedger()
    assert ledger.accuse("first", "liar", 0.0).leave == "liar"
    assert ledger.accuse("second", "liar", 1.0).leave == "liar"
    assert ledger.accuse("liar", "first", 2.0).leave == "liar"


def test_who_accused_one_that_the_client_has_lost_itself_was_right() -> None:
    ledger = BlameLedger()
    lost = {"first"}
    assert ledger.accuse("honest", "first", 0.0, lost.__contains__).leave == "first"
    lost.add("second")
    assert ledger.accuse("honest", "second", 1.0, lost.__contains__).leave == "second"
    assert ledger.accuse("honest", "third", 2.0, lost.__contains__).leave == "third"
    assert ledger.accuse("honest", "fourth", 3.0, lost.__contains__).leave == "honest"


def test_of_a_circuit_that_stood_still_the_head_goes_first_and_then_what_the_next_one_shares_with_it() -> (
    None
):
    ledger = BlameLedger()
    assert ledger.stand_still(("head", "tail"), 0.0).leave == "head"
    assert ledger.stand_still(("other head", "tail"), 1.0).leave == "tail"


def test_who_is_there_for_want_of_others_goes_last() -> None:
    ledger = BlameLedger()
    ledger.stand_still(("head", "tail"), 0.0)
    ledger.stand_still(("other head", "tail"), 1.0)
    assert ledger.stand_still(("other head", "tail"), 2.0, {"tail"}).leave == "other head"


def test_what_was_long_ago_is_forgotten_and_a_flood_is_bounded() -> None:
    ledger = BlameLedger()
    ledger.accuse("hop", "first", 0.0)
    assert ledger.accuse("hop", "second", REMEMBERED_S + 1.0).leave == "second"
    for number in range(2 * MOST_REMEMBERED):
        ledger.accuse("liar", f"honest {number}", REMEMBERED_S + 2.0)
        ledger.stand_still(("a", "b"), REMEMBERED_S + 2.0)
    assert len(ledger.accusations) <= MOST_REMEMBERED + 1
    assert len(ledger.standstills) <= MOST_REMEMBERED + 1


def test_without_a_circuit_the_accusers_go_in_the_place_of_the_accused_then_each_comes_back_alone_then_all() -> (
    None
):
    ledger, quarantine = BlameLedger(), Quarantine()
    slow, accused, gone = (facts_of(Identity.generate()) for _ in range(3))
    for facts in (slow, accused, gone):
        quarantine.quarantine_peer(facts, 10.0, 60.0)
    ledger.accuse("accuser", accused.peer_id, 10.0)
    avoided, shunned = frozenset(quarantine.entries), frozenset({gone.peer_id})
    assert second_choices(avoided, shunned, ledger, quarantine) == (
        frozenset({slow.peer_id, gone.peer_id, "accuser"}),
        frozenset({accused.peer_id, gone.peer_id}),
        frozenset({slow.peer_id, gone.peer_id}),
        shunned,
    )


def test_where_nobody_is_left_out_there_is_no_second_choice() -> None:
    assert second_choices(frozenset(), frozenset(), BlameLedger(), Quarantine()) == ()
