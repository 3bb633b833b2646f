"""What a log of inputs has for certain: copies take no row that a guess left behind."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.redundancy.input_log import InputLogs, token_rows

MOST_BYTES = 1 << 20


@given(
    prompt=st.integers(1, 20),
    trips=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20),
)
def test_rows_that_are_certain_are_those_of_the_sequence_whatever_was_guessed(
    prompt: int, trips: list[tuple[int, int]]
) -> None:
    """A step has the last token and guesses behind it, of which the first so many are right."""
    log = InputLogs(MOST_BYTES).open("", 4)
    sequence = list(range(prompt))
    log.record(0, token_rows(sequence[:-1]))
    assert log.certain == len(sequence) - 1
    for guessed, right in trips:
        accepted = min(guessed, right)
        position, came = len(sequence) - 1, [len(sequence) + at for at in range(accepted + 1)]
        wrong = [9_999] * (guessed - accepted)
        log.record(position, token_rows([sequence[-1], *came[:accepted], *wrong]), guessed)
        assert log.certain == position + 1
        sequence += came
        assert log.read(0, log.certain) == token_rows(sequence[: log.certain])


def test_behind_a_gap_and_without_room_it_knows_where_it_stands() -> None:
    log = InputLogs(MOST_BYTES).open("", 4)
    log.record(0, token_rows([1, 2, 3]))
    log.record(7, token_rows([8, 9, 10]), 2)
    assert (log.start, log.end, log.certain) == (7, 10, 8)
    small = InputLogs(4).open("", 4)
    small.record(0, token_rows([1, 2, 3]), 1)
    assert (small.start, small.end, small.certain) == (3, 3, 2)
