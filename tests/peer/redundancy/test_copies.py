"""Copies go token after token and within their windows, whatever comes in between; what is no copy is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.redundancy.copy_intake import LONGER, MOST_PIECE_TOKENS, PIECE_S, ComputingPace, CopyIntake
from molink.peer.redundancy.copy_sending import (
    GATHER_S,
    MOST_OPENINGS,
    PORTION_BYTES,
    WINDOW_BYTES,
    CopyPortion,
    CopySending,
)
from molink.peer.redundancy.input_log import InputLogs
from molink.routing.routes.copy_forms import GATHERED_TOKENS, CopyForm


def lines(token_bytes: int) -> dict[CopyForm, int]:
    """Keys and values of so many bytes a token, and no other form."""
    return {CopyForm.KEYS_AND_VALUES: token_bytes}


def portion_of(sending: CopySending[str], held: dict[str, int], now_s: float = 1.0) -> CopyPortion[str]:
    portion = sending.next_portion(held, now_s)
    assert isinstance(portion, CopyPortion), portion
    return portion


def ranges_of(portion: CopyPortion[str]) -> dict[str, tuple[int, int]]:
    return {one.key: (one.start, one.stop) for one in portion.ranges}


def test_the_new_tokens_of_all_sessions_go_together_and_fill_up_with_a_prompt() -> None:
    sending: CopySending[str] = CopySending()
    for key in ("a", "b", "prompt"):
        sending.open(key, "partner", 100, lines(PORTION_BYTES // 32))
    portion = portion_of(sending, {"a": 102, "b": 101, "prompt": 500})
    assert ranges_of(portion) == {"b": (100, 101), "a": (100, 102), "prompt": (100, 129)}


def test_beside_tokens_that_a_session_waits_for_those_of_others_go_on() -> None:
    sending: CopySending[str] = CopySending()
    for key in ("awaited", "other"):
        sending.open(key, "partner", 100, lines(PORTION_BYTES // 32))
    sending.hasten("awaited")
    held = {"awaited": 101, "other": 200}
    first, second = portion_of(sending, held), portion_of(sending, held)
    assert (ranges_of(first), first.is_awaited) == ({"awaited": (100, 101)}, True)
    assert (ranges_of(second), second.is_awaited) == ({"other": (100, 132)}, False)
    assert [one.size_bytes for one in (first, second)] == [PORTION_BYTES // 32, PORTION_BYTES]


def test_a_copy_on_demand_goes_once_somebody_waits_for_it() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(10), on_demand=True)
    assert sending.next_portion({"a": 500}, 1.0) == math.inf
    sending.hasten("a")
    assert ranges_of(portion_of(sending, {"a": 500})) == {"a": (0, 500)}


def test_few_tokens_wait_a_moment_for_others_and_as_many_as_are_computed_in_one_step_do_not() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(10))
    assert sending.next_portion({"a": 3}, 5.0) == 5.0 + GATHER_S
    assert sending.next_portion({"a": 4}, 5.0 + GATHER_S / 2) == 5.0 + GATHER_S
    assert ranges_of(portion_of(sending, {"a": 5}, 5.0 + GATHER_S)) == {"a": (0, 5)}
    assert sending.next_portion({"a": 5}, 9.0) == math.inf
    assert ranges_of(portion_of(sending, {"a": 5 + GATHERED_TOKENS}, 9.0)) == {"a": (5, 5 + GATHERED_TOKENS)}


def test_few_tokens_that_fill_a_portion_wait_for_no_others() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(PORTION_BYTES // 2))
    assert sending.next_portion({"a": 1}, 5.0) == 5.0 + GATHER_S
    assert ranges_of(portion_of(sending, {"a": 2}, 5.0)) == {"a": (0, 2)}


def test_a_partner_that_keeps_nothing_gets_no_more_than_a_window() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(1000))
    sent = 0
    while isinstance(portion := sending.next_portion({"a": 10**6}, 1.0), CopyPortion):
        sent += sum(one.stop - one.start for one in portion.ranges) * 1000
    assert WINDOW_BYTES - PORTION_BYTES < sent <= WINDOW_BYTES
    assert sending.record_kept("a", 100)
    assert ranges_of(portion_of(sending, {"a": 10**6}))["a"][0] == sent // 1000


def test_what_a_full_link_refuses_goes_when_there_is_room() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(10))
    refused = portion_of(sending, {"a": 80})
    sending.record_refused(refused)
    assert sending.next_portion({"a": 90}, 2.0) == math.inf
    sending.record_room("partner")
    assert ranges_of(portion_of(sending, {"a": 90})) == {"a": (0, 90)}


def test_inputs_go_where_the_hop_has_them_and_keys_and_values_where_it_has_not() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, {CopyForm.KEYS_AND_VALUES: 1000, CopyForm.INPUTS: 10})
    parts = []
    while isinstance(portion := sending.next_portion({"a": 600}, 1.0, {"a": 300}), CopyPortion):
        (one,) = portion.ranges
        assert (one.stop - one.start) * (
            1000 if one.form is CopyForm.KEYS_AND_VALUES else 10
        ) <= PORTION_BYTES
        parts.append(one)
    assert [(one.start, one.stop, one.form) for one in parts] == [
        (0, 262, CopyForm.KEYS_AND_VALUES),
        (262, 300, CopyForm.KEYS_AND_VALUES),
        (300, 600, CopyForm.INPUTS),
    ]


def test_layers_whose_keys_and_values_are_not_copied_wait_for_inputs() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("states", "partner", 0, {CopyForm.INPUTS: 10})
    assert sending.next_portion({"states": 600}, 1.0, {"states": 300}) == math.inf
    assert sending.next_portion({"states": 600}, 1.0) == math.inf
    portion = sending.next_portion({"states": 600}, 1.0, {"states": 0})
    assert isinstance(portion, CopyPortion)
    assert ranges_of(portion) == {"states": (0, 600)}


def test_a_partner_that_claims_what_cannot_be_or_begins_again_and_again_is_not_followed() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "partner", 0, lines(10))
    portion_of(sending, {"a": 80})
    assert not sending.record_kept("a", 81)
    assert sending.record_kept("a", 80)
    assert not sending.record_kept("a", 79)
    for _ in range(MOST_OPENINGS - 1):
        assert sending.open("a", "partner", 0, lines(10))
    assert not sending.open("a", "partner", 0, lines(10))
    assert sending.next_portion({"a": 80}, 2.0) == math.inf


def test_a_partner_that_is_gone_takes_its_copies_with_it_and_no_others() -> None:
    sending: CopySending[str] = CopySending()
    sending.open("a", "one", 0, lines(10))
    sending.open("b", "other", 0, lines(10))
    assert sending.end_partner("one") == ("a",)
    assert portion_of(sending, {"a": 80, "b": 80}).partner == "other"


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 40), st.sampled_from(("send", "keep", "refuse", "room"))
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 2 * WINDOW_BYTES), st.integers(1, 100_000), st.integers(0, 500))
def test_whatever_happens_a_copy_is_sent_in_order_and_taken_without_a_gap(
    steps: list[tuple[str, int, str]], token_bytes: int, input_bytes: int, inputs_from: int
) -> None:
    sizes = {CopyForm.KEYS_AND_VALUES: token_bytes, CopyForm.INPUTS: input_bytes}
    sending: CopySending[str] = CopySending()
    held = dict.fromkeys("abc", 0)
    intakes = {key: CopyIntake(10**6) for key in held}
    for key in held:
        sending.open(key, "partner", 0, sizes)
    waiting: list[tuple[str, int, int]] = []
    for now_s, (key, tokens, what) in enumerate(steps):
        held[key] += tokens
        if what == "room":
            sending.record_room("partner")
        elif what == "keep" and waiting:
            copied, count, size = waiting.pop(0)
            intakes[copied].record_written(count, size)
            assert sending.record_kept(copied, intakes[copied].kept_tokens)
        else:
            portion = sending.next_portion(held, float(now_s), dict.fromkeys(held, inputs_from))
            if not isinstance(portion, CopyPortion):
                continue
            if what == "refuse":
                sending.record_refused(portion)
                continue
            for one in portion.ranges:
                count = one.stop - one.start
                assert one.stop <= held[one.key]
                assert (one.form is CopyForm.INPUTS) == (one.start >= inputs_from)
                assert one.form is CopyForm.INPUTS or one.stop <= inputs_from
                fault = intakes[one.key].fault_of(one.start, count, count * sizes[one.form])
                assert fault is None
                waiting.append((one.key, count, count * sizes[one.form]))
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


@given(
    st.integers(0, 2 * WINDOW_BYTES), st.integers(1, 3), st.integers(1, 2 * WINDOW_BYTES), st.integers(1, 3)
)
def test_no_more_of_a_copy_waits_than_a_window_and_a_portion_but_for_a_single_token(
    first_bytes: int, first_tokens: int, second_bytes: int, second_tokens: int
) -> None:
    intake = CopyIntake(10)
    sizes = [(first_tokens, max(1, first_bytes)), (second_tokens, second_bytes)]
    taken = [one for one in sizes if intake.fault_of(intake.awaited_tokens, *one) is None]
    assert intake.waiting_bytes == sum(size for _, size in taken)
    assert intake.waiting_bytes <= WINDOW_BYTES + PORTION_BYTES or [tokens for tokens, _ in taken] == [1]
    if sum(size for _, size in sizes) <= WINDOW_BYTES + PORTION_BYTES:
        assert taken == sizes
    if first_tokens == 1:
        assert taken[0] == sizes[0], "where a token takes more than a window, one is sent"


RECORDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-8, 4), st.integers(1, 9), st.integers(0, 9)), max_size=60
)


@given(RECORDS, st.integers(0, 200))
def test_a_log_has_the_latest_rows_of_what_it_says_and_all_logs_stay_within_their_memory(
    records: list[tuple[str, int, int, int]], limit_bytes: int
) -> None:
    logs = InputLogs(limit_bytes)
    opened = {key: logs.open("float32", 2) for key in "abc"}
    truth: dict[str, dict[int, bytes]] = {key: {} for key in "abc"}
    for number, (key, behind_end, tokens, kept) in enumerate(records):
        log, position = opened[key], max(0, opened[key].end + behind_end)
        rows = [bytes((number, at)) for at in range(tokens)]
        log.kept_tokens = kept if kept else None
        log.record(position, b"".join(rows))
        truth[key] |= {position + at: row for at, row in enumerate(rows)}
        assert log.end == position + tokens
        assert logs.used_bytes == sum(2 * (one.end - one.start) for one in opened.values()) <= limit_bytes
        for name, one in opened.items():
            expected = [truth[name][at] for at in range(one.start, one.end)]
            assert one.read(one.start, one.end) == b"".join(expected)
            for start, stop in ((one.start - 1, one.end), (one.start, one.end + 1)):
                with pytest.raises(ValueError, match="are here"):
                    one.read(start, stop)
    for one in opened.values():
        one.close()
        one.record(one.end, b"late")
    assert logs.used_bytes == 0


def test_logs_of_sessions_without_a_copy_go_first_and_rows_that_standbys_have_then() -> None:
    logs = InputLogs(100)
    copied, alone = logs.open("float32", 1), logs.open("float32", 1)
    copied.kept_tokens = 30
    copied.record(0, bytes(50))
    alone.record(0, bytes(50))
    newest = logs.open("float32", 1)
    newest.record(0, bytes(50))
    assert [(one.start, one.end) for one in (copied, alone, newest)] == [(0, 50), (50, 50), (0, 50)]
    newest.kept_tokens = 0
    newest.record(50, bytes(30))
    assert [(one.start, one.end) for one in (copied, alone, newest)] == [(30, 50), (50, 50), (0, 80)]
    newest.record(80, bytes(21))
    assert (newest.start, newest.end) == (101, 101), "there is no room, and it begins anew"


@given(st.lists(st.floats(1e-5, 1.0), max_size=40))
def test_pieces_grow_while_they_are_short_and_are_never_more_than_would_have_fitted(
    token_s: list[float],
) -> None:
    pace, shortest_s = ComputingPace(), math.inf
    for one_s in token_s:
        tokens = pace.tokens
        pace.record(tokens, tokens * one_s)
        shortest_s = min(shortest_s, tokens * one_s)
        limit_s = max(PIECE_S, LONGER * shortest_s)
        assert 1 <= pace.tokens <= MOST_PIECE_TOKENS
        if tokens * one_s > limit_s:
            assert pace.tokens == 1 or pace.tokens * one_s <= limit_s * (1 + 1e-9)
        else:
            assert tokens <= pace.tokens <= 2 * tokens


def test_tokens_that_take_as_long_together_as_one_alone_are_computed_together() -> None:
    pace = ComputingPace()
    for _ in range(20):
        pace.record(pace.tokens, 0.1 + 0.003 * pace.tokens)
    assert 16 <= pace.tokens <= 40
