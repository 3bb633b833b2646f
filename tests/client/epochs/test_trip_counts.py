"""Trips are counted by the steps that tokens were drawn in, whatever circuit they came over."""

from molink.client.epochs.session_log import TripCounts


def test_each_step_is_a_trip_and_its_further_tokens_were_guesses() -> None:
    counts = TripCounts()
    for epoch, step, guessed in [(1, 0, 0), (1, 1, 4), (1, 1, 0), (1, 1, 0), (1, 2, 3), (2, 0, 0), (2, 1, 2)]:
        counts.record_token(epoch, step, guessed)
    assert (counts.trips, counts.guessed, counts.accepted) == (5, 9, 2)
