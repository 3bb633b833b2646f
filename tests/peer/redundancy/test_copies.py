"""Copies go token after token and within their windows, whatever comes in between; what is no copy is refused."""

import math

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.redundancy.copy_intake import CopyIntake
from molink.peer.redundancy.copy_sending import (
    GATHER_S,
    MOST_OPENINGS,
    PORTION_BYTES,
    WINDOW_BYTES,
    CopyPortion,
    CopySending,
)


def portion_of(sending: CopySending[str], held: dict[str, int], now_s: float = 1.0) -> CopyPortion[str]:
    portion = sending.next_portion(held, now_s)
    assert isinstance(portion, CopyPortion), portion
    return portion


def ranges_of(portion: CopyPortion[str]) -> dict[str, tuple[int, int]]:
    return {one.key: (one.start, one.stop) for one in portion.ranges}


def test_the_new_tokens_of_all_sessions_go_together_and_fill_up_with_a_prompt() -> None:
    sending: CopySending[str] = CopySending()
    for key in ("a", "b", "prompt"):
        sending.open(key, "partner", 100, PORTION_BYTES // 32, whole=False)
    portion = portion_of(sending, {"a": 102, "b": 101, "prompt": 500})
    assert ranges_of(portion) == {"b": (100, 101), "a": (100, 102), "prompt": (100, 129)}


def test_few_tokens_wait_a_moment_for_others_and_a_block_does_not() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, 10, whole=False)
    assert sending.next_portion({"a": 3}, 5.0) == 5.0 + GATHER_S
    assert sending.next_portion({"a": 4}, 5.0 + GATHER_S / 2) == 5.0 + GATHER_S
    assert ranges_of(portion_of(sending, {"a": 5}, 5.0 + GATHER_S)) == {"a": (0, 5)}
    assert sending.next_portion({"a": 5}, 9.0) == math.inf
    assert ranges_of(portion_of(sending, {"a": 21}, 9.0)) == {"a": (5, 21)}


def test_a_partner_that_keeps_nothing_gets_no_more_than_a_window() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, 1000, whole=False)
    sent = 0
    while isinstance(portion := sending.next_portion({"a": 10**6}, 1.0), CopyPortion):
        sent += sum(one.stop - one.start for one in portion.ranges) * 1000
    assert WINDOW_BYTES - PORTION_BYTES < sent <= WINDOW_BYTES
    assert sending.record_kept("a", 100)
    assert ranges_of(portion_of(sending, {"a": 10**6}))["a"][0] == sent // 1000


def test_what_a_full_link_refuses_goes_when_there_is_room() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, 10, whole=False)
    refused = portion_of(sending, {"a": 20})
    sending.record_refused(refused)
    assert sending.next_portion({"a": 40}, 2.0) == math.inf
    sending.record_room("partner")
    assert ranges_of(portion_of(sending, {"a": 40})) == {"a": (0, 40)}


def test_states_go_as_a_whole_and_alone() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("states", "partner", 0, PORTION_BYTES, whole=True)
    assert ranges_of(portion_of(sending, {"states": 40})) == {"states": (0, 40)}
    assert sending.next_portion({"states": 60}, 3.0) == math.inf
    assert sending.record_kept("states", 40)
    assert ranges_of(portion_of(sending, {"states": 60})) == {"states": (40, 60)}


def test_a_partner_that_claims_what_cannot_be_or_begins_again_and_again_is_not_followed() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, 10, whole=False)
    portion_of(sending, {"a": 20})
    assert not sending.record_kept("a", 21)
    assert sending.record_kept("a", 20)
    assert not sending.record_kept("a", 19)
    for _ in range(MOST_OPENINGS - 1):
        assert sending.open("a", "partner", 0, 10, whole=False)
    assert not sending.open("a", "partner", 0, 10, whole=False)
    assert sending.next_portion({"a": 20}, 2.0) == math.inf


def test_a_partner_that_is_gone_takes_its_copies_with_it_and_no_others() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "one", 0, 10, whole=False)
    sending.open("b", "other", 0, 10, whole=False)
    assert sending.end_partner("one") == ("a",)
    assert portion_of(sending, {"a": 20, "b": 20}).partner == "other"


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 40), st.sampled_from(("send", "keep", "refuse", "room"))
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 2 * WINDOW_BYTES), st.booleans())
def test_whatever_happens_a_copy_is_sent_in_order_and_taken_without_a_gap(
    steps: list[tuple[str, int, str]], token_bytes: int, whole: bool
) -> None:
    sending: CopySending[str] = CopySending()
    held = dict.fromkeys("abc", 0)
    intakes = {key: CopyIntake(10**6) for key in held}
    for key in held:
        sending.open(key, "partner", 0, token_bytes, whole=whole)
    waiting: list[tuple[str, int]] = []
    for now_s, (key, tokens, what) in enumerate(steps):
        held[key] += tokens
        if what == "room":
            sending.record_room("partner")
        elif what == "keep" and waiting:
            copied, count = waiting.pop(0)
            intakes[copied].record_written(count, count * token_bytes)
            assert sending.record_kept(copied, intakes[copied].kept_tokens)
        else:
            portion = sending.next_portion(held, float(now_s))
            if not isinstance(portion, CopyPortion):
                continue
            if what == "refuse":
                sending.record_refused(portion)
                continue
            for one in portion.ranges:
                count = one.stop - one.start
                assert one.stop <= held[one.key]
                fault = intakes[one.key].fault_of(one.start, count, count * token_bytes)
                assert fault is None
                waiting.append((one.key, count))
    on_the_way = sum(intake.waiting_bytes for intake in intakes.values())
    assert on_the_way <= WINDOW_BYTES or len(waiting) == 1


@given(st.integers(0, 60), st.integers(-2, 60), st.integers(0, WINDOW_BYTES))
def test_only_the_next_tokens_within_the_reservation_are_taken(start: int, tokens: int, size: int) -> None:
    intake = CopyIntake(50, kept_tokens=20, awaited_tokens=20)
    fault = intake.fault_of(start, tokens, size)
    right = start == 20 and tokens >= 1 and start + tokens <= 50 and size >= 1
    assert (fault is None) == right
    assert intake.awaited_tokens == (start + tokens if right else 20)
    if right:
        assert intake.fault_of(start, tokens, size) is not None, "a repeat is no continuation"
        intake.record_lag(10**9)
        assert intake.lacking_tokens == 30
        intake.restart()
        assert (intake.awaited_tokens, intake.waiting_bytes) == (20, 0)
