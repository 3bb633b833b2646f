"""What can wait waits, so that no minute of a peer's control plane takes more than 32 kbit/s."""

from hypothesis import given
from hypothesis import strategies as st

from molink.dht.membership.send_pace import (
    BURST_BYTES,
    LINE_BITS_PER_S,
    MOST_OWED_BYTES,
    PACED_BITS_PER_S,
    SendPace,
)

LARGEST = 2_000


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, LARGEST)), max_size=300))
def test_who_waits_for_its_turn_sends_no_more_than_the_line_in_any_minute(
    wanted: list[tuple[float, int]],
) -> None:
    pace, now, sent = SendPace(), 0.0, list[tuple[float, int]]()
    for gap_s, size_bytes in wanted:
        now += gap_s
        now += pace.wait_s(now)
        pace = pace.after(now, size_bytes)
        sent.append((now, size_bytes))
    for begin, _ in sent:
        minute = sum(size for at, size in sent if begin <= at < begin + 60.0)
        assert minute * 8 <= 60 * LINE_BITS_PER_S + 8 * LARGEST + 1


@given(st.integers(0, 10**9), st.floats(0.0, 1000.0))
def test_what_did_not_wait_is_owed_up_to_a_bound_and_paid_with_time(sent_bytes: int, later_s: float) -> None:
    owing = SendPace().after(0.0, sent_bytes)
    assert -MOST_OWED_BYTES <= owing.left_bytes <= BURST_BYTES
    wait_s = owing.wait_s(0.0)
    assert wait_s <= MOST_OWED_BYTES * 8 / PACED_BITS_PER_S + 1e-9
    assert owing.after(later_s).left_bytes >= owing.left_bytes
    assert owing.wait_s(wait_s + later_s) < 1e-6
