"""What a log of inputs has for certain: copies take no row that a guess left behind."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.redundancy.input_log import SEGMENT_BYTES, InputLog, InputLogs, token_rows

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


@given(data=st.data(), others=st.booleans())
def test_rows_are_those_that_came_however_many_come_at_a_time(data: st.DataObject, others: bool) -> None:
    """Beside a list of rows: steps that begin anywhere, standbys that keep some, and budgets that run out."""
    row_bytes = SEGMENT_BYTES // 3
    owner = InputLogs(30 * row_bytes)
    log, other = owner.open("", row_bytes), owner.open("", row_bytes)
    start, rows = 0, list[bytes]()
    for step in range(data.draw(st.integers(1, 12))):
        log.kept_tokens = data.draw(st.none() | st.integers(0, start + len(rows)))
        if data.draw(st.booleans()):
            log.drop()
            gone = len(rows) if log.kept_tokens is None else max(0, min(len(rows), log.kept_tokens - start))
            start, rows = start + gone, rows[gone:]
        if others:
            other.record(other.end, bytes(row_bytes))
        position = max(0, start + len(rows) + data.draw(st.integers(-6, 1)))
        came = [bytes([step, at]) + bytes(row_bytes - 2) for at in range(data.draw(st.integers(0, 8)))]
        log.record(position, memoryview(b"".join(came)))
        if not start <= position <= start + len(rows):
            start, rows = position, []
        start, rows = _after(log, start, [*rows[: position - start], *came])
        assert (log.start, log.end) == (start, start + len(rows))
        assert log.read(start, log.end) == b"".join(rows)
        first = data.draw(st.integers(0, len(rows)))
        last = data.draw(st.integers(first, len(rows)))
        assert log.read(start + first, start + last) == b"".join(rows[first:last])
        assert owner.used_bytes == sum((one.end - one.start) * row_bytes for one in (log, other))
        assert owner.used_bytes <= owner.limit_bytes
    log.close()
    other.close()
    assert owner.used_bytes == 0


def _after(log: InputLog, start: int, rows: list[bytes]) -> tuple[int, list[bytes]]:
    """What is left where the budget took the first ones, which it may take at any time."""
    gone = min(len(rows), max(0, log.start - start))
    return start + gone, rows[gone:]
