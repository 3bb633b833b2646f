"""What guesses are expected to bring: by the kind of a head's drafts, then by what its trips brought, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer

from molink.dht.records.records import AnnouncedDraft, PeerFacts
from molink.routing.cost.cost import CostModel
from molink.routing.cost.guesses import NO_GUESSES, GuessingHead, best_guesses, guessing_head, trip_shares
from molink.routing.cost.reliability import UNSEEN, PeerObservation
from molink.shards.spec import GUESSES, MOST_GUESSED_TOKENS, PENALTIES

COST = CostModel()
LOOKUP, MODEL = AnnouncedDraft("lookup"), AnnouncedDraft("small", bytes(8), 0.5)


def facts(*drafts: AnnouncedDraft, abilities: tuple[str, ...] = (GUESSES,)) -> PeerFacts:
    return peer("a", (0, 8), drafts=drafts, sampling_abilities=abilities).facts


def most_tokens(head: GuessingHead) -> float:
    return 1 / (1 - head.chance)


def test_a_head_is_expected_to_bring_what_its_kind_of_draft_brought_elsewhere() -> None:
    assert guessing_head(facts(), UNSEEN, COST) == NO_GUESSES
    assert most_tokens(guessing_head(facts(LOOKUP), UNSEEN, COST)) == pytest.approx(1.4)
    with_model = guessing_head(facts(LOOKUP, MODEL), UNSEEN, COST)
    assert most_tokens(with_model) == pytest.approx(2.0)
    assert (with_model.guess_ms, with_model.kind, with_model.trips) == (0.5, "small", 0)


def test_an_older_peer_that_takes_no_rows_of_guesses_is_expected_to_make_none_whatever_it_says() -> None:
    seen = PeerObservation(trips=100, trip_tokens=300.0)
    assert guessing_head(facts(MODEL, abilities=(PENALTIES,)), seen, COST) == NO_GUESSES


def test_more_drafts_of_a_kind_are_worth_no_more_than_one() -> None:
    many = guessing_head(facts(MODEL, MODEL, MODEL), UNSEEN, COST)
    assert most_tokens(many) == pytest.approx(COST.draft_tokens_per_trip)


def test_who_lies_about_a_draft_is_soon_expected_to_bring_what_it_brings() -> None:
    tokens = [
        most_tokens(guessing_head(facts(MODEL), PeerObservation(trips=trips, trip_tokens=trips), COST))
        for trips in (0, 16, 64, 256)
    ]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] == pytest.approx(2.0)
    assert tokens[-1] < 1.25 < COST.lookup_tokens_per_trip


def test_who_says_nothing_and_guesses_well_is_found_out_and_no_head_counts_beyond_the_bound() -> None:
    well = guessing_head(facts(), PeerObservation(trips=256, trip_tokens=768.0), COST)
    assert 2 < most_tokens(well) < 3
    assert well.trips == 256
    wild = guessing_head(facts(MODEL), PeerObservation(trips=256, trip_tokens=256 * 16.0), COST)
    assert most_tokens(wild) == pytest.approx(COST.most_tokens_per_trip)


@given(st.floats(0, 0.75), st.floats(0, 50), st.floats(0.1, 500), st.floats(0, 20))
def test_as_many_guesses_are_expected_as_make_a_token_take_least(
    chance: float, guess_ms: float, trip_ms: float, row_ms: float
) -> None:
    head = GuessingHead(chance, guess_ms)
    guesses, token_ms = best_guesses(head, lambda rows: trip_ms + rows * row_ms)
    every = [
        (trip_ms + one * (row_ms + guess_ms)) / head.tokens(one) for one in range(MOST_GUESSED_TOKENS + 1)
    ]
    assert 0 <= guesses <= MOST_GUESSED_TOKENS
    assert token_ms == pytest.approx(min(every))
    assert token_ms == pytest.approx(every[guesses])


def test_a_share_is_a_part_of_the_trip_that_slow_drafts_raise_to_all_of_it() -> None:
    quick, slow, none = GuessingHead(0.5, 0.5), GuessingHead(0.5, 400.0), NO_GUESSES
    quick_share, slow_share, none_share = trip_shares((quick, slow, none), 100.0)
    assert 0.5 < quick_share < 0.55
    assert slow_share == none_share == 1
    assert trip_shares((quick, none), 0.0).tolist() == [0.5, 1.0]
