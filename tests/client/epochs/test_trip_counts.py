"""Trips are counted by the steps that tokens were drawn in, whatever circuit they came over."""

from molink.client.epochs.session_log import TripCounts


def test_each_step_is_a_trip_and_its_further_tokens_were_guesses() -> None:
    counts = TripCounts()
    for epoch, step, guessed in [(1, 0, 0), (1, 1, 4), (1, 1, 0), (1, 1, 0), (1, 2, 3), (2, 0, 0), (2, 1, 2)]:
        counts.record_token(epoch, step, guessed)
    assert (counts.trips, counts.guessed, counts.accepted) == (5, 9, 2)
    assert counts.by_source == {}


def test_guesses_are_counted_by_where_the_head_says_they_came_from() -> None:
    counts = TripCounts()
    for step, guessed, sources in [
        (0, 0, b""),
        (1, 3, bytes([1, 1, 4])),
        (1, 0, b""),
        (1, 0, b""),
        (1, 0, b""),
        (2, 2, bytes([4, 200])),
        (2, 0, b""),
        (3, 2, b""),
        (3, 0, b""),
    ]:
        counts.record_token(1, step, guessed, sources)
    assert counts.by_source == {"lookup": (2, 2), "draft": (2, 2), "other": (1, 0)}
    assert (counts.guessed, counts.accepted) == (7, 5), "what heads say nothing of counts all the same"
