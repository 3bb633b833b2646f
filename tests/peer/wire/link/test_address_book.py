"""What a dial found at an address counts for everybody who claims it."""

from molink.peer.wire.link.address_book import MOST_ADDRESSES, REMEMBERED_S, AddressBook, DialFailure

HERE = "203.0.113.7:4002"
OWN, OTHER = b"own certificate", b"another certificate"


def test_where_nobody_answers_the_others_that_claim_it_are_not_dialled_for_a_while() -> None:
    book = AddressBook()
    book.record_failure(HERE, DialFailure(100.0, "first"))
    assert book.why_not(HERE, "second", OWN, 101.0) == "nobody answers at its address"
    assert book.why_not(HERE, "second", OWN, 100.0 + REMEMBERED_S) is None
    assert book.why_not("203.0.113.8:4002", "second", OWN, 101.0) is None


def test_who_was_not_found_may_try_again_at_once() -> None:
    book = AddressBook()
    book.record_failure(HERE, DialFailure(100.0, "first"))
    assert book.why_not(HERE, "first", OWN, 100.0) is None


def test_the_certificate_that_answers_says_whose_claim_is_true() -> None:
    book = AddressBook()
    book.record_failure(HERE, DialFailure(100.0, "liar", certificate=OWN))
    assert book.why_not(HERE, "owner", OWN, 101.0) is None
    assert book.why_not(HERE, "liar", OTHER, 101.0) == "another one answers at its address"
    assert book.why_not(HERE, "second liar", OTHER, 101.0) == "another one answers at its address"


def test_who_has_proven_that_it_is_there_is_dialled_whatever_others_find() -> None:
    book = AddressBook()
    book.record_proof(HERE, "owner")
    book.record_failure(HERE, DialFailure(100.0, "liar"))
    assert book.why_not(HERE, "owner", OWN, 100.0) is None
    assert book.why_not(HERE, "liar 2", OTHER, 100.0) is not None


def test_a_flood_of_addresses_is_bounded() -> None:
    book = AddressBook()
    for number in range(MOST_ADDRESSES + 100):
        book.record_failure(f"h{number}:1", DialFailure(100.0, "liar"))
        book.record_proof(f"h{number}:2", "liar")
    assert len(book.found) == len(book.proven) == MOST_ADDRESSES
