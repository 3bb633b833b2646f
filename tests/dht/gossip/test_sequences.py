"""Every number is higher than all before it, whatever clocks, crashes, liars and disks do; few are written."""

import errno
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.gossip.sequences import SET_ASIDE, SET_ASIDE_AHEAD, Sequences
from molink.dht.node.hearing import ClockMonitor, Visibility, VisibilityMonitor, visibility_of


@dataclass(slots=True)
class Disk:
    """A state directory's file."""

    number: int = -1
    writes: int = 0
    full: bool = False
    swarm: tuple[str, ...] = ()

    def set_aside(self) -> int:
        return self.number

    def remember_set_aside(self, sequence: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.number, self.writes = sequence, self.writes + 1

    def remember_swarm(self, entrances: tuple[str, ...], addresses: tuple[str, ...]) -> None:
        self.swarm = (*entrances, *addresses)


lives = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 10**10), st.integers(-1, 10**10)), min_size=1, max_size=20),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(lives)
def test_numbers_grow_over_restarts_whatever_the_clock_says_and_whatever_others_pretend(
    lived: list[tuple[list[tuple[int, int]], bool]],
) -> None:
    disk, last = Disk(), -1
    for spoken, leaves in lived:
        clock, others = [0], [0]
        sequences = Sequences(disk, partial(clock.__getitem__, 0), partial(others.__getitem__, 0))
        for clock[0], others[0] in spoken:
            number = sequences.take()
            assert number > max(last, others[0])
            assert number >= clock[0]
            last = number
        if leaves:
            sequences.give_back()


def test_few_are_written_and_a_start_begins_just_beyond_the_last_that_was_used() -> None:
    disk, clock_ms = Disk(), 10**12
    sequences = Sequences(disk, lambda: clock_ms, lambda: -1)
    for _ in range(60):
        clock_ms += 17_000
        last = sequences.take()
    assert disk.writes <= 1 + 60 * 17_000 // SET_ASIDE + 1
    sequences.give_back()
    assert Sequences(disk, lambda: 0, lambda: -1).take() == last + 1


def test_who_crashes_again_and_again_does_not_run_away_from_the_clock() -> None:
    disk = Disk()
    for _ in range(50):
        number = Sequences(disk, lambda: 10**12, lambda: -1).take()
    assert number <= 10**12 + SET_ASIDE + 50 * (SET_ASIDE_AHEAD + 1)


def test_a_full_disk_is_said_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    sequences = Sequences(Disk(full=True), lambda: 10**12, lambda: -1)
    numbers = [sequences.take() for _ in range(3)]
    assert numbers == sorted(set(numbers))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


@pytest.mark.parametrize(
    ("held", "outcome"),
    [
        (None, Visibility.OLD),
        (9, Visibility.OLD),
        (10, Visibility.HEARD),
        (20, Visibility.HEARD),
        (21, Visibility.AHEAD),
    ],
)
def test_others_hold_something_of_this_life_or_of_another(held: int | None, outcome: Visibility) -> None:
    assert visibility_of(10, 20, held) is outcome


def test_the_owner_is_told_once_that_nobody_shows_the_peer_why_and_when_that_is_over() -> None:
    hearing = VisibilityMonitor()
    said = [
        hearing.record_answer(outcome, "12D3", 0.0, 0.0)
        for outcome in [Visibility.OLD] * 4 + [Visibility.HEARD] * 2
    ]
    assert [line is not None for line in said] == [False, True, False, False, True, False]
    assert "no peer shows this one" in str(said[1])
    assert said[4] == "other peers show this one now"


@pytest.mark.parametrize(
    ("outcome", "clock_ahead_s", "word"),
    [
        (Visibility.OLD, 600.0, "clock is 600 s behind"),
        (Visibility.SILENT, 0.0, "line"),
        (Visibility.AHEAD, 0.0, "clock wrong"),
    ],
)
def test_the_line_names_what_the_owner_can_change(
    outcome: Visibility, clock_ahead_s: float, word: str
) -> None:
    hearing = VisibilityMonitor()
    lines = [hearing.record_answer(outcome, "12D3", clock_ahead_s, 600.0) for _ in range(2)]
    assert word in str(lines)


def test_a_wrong_clock_is_told_once_when_seen_twice_and_again_when_set() -> None:
    monitor = ClockMonitor()
    said = [monitor.record_difference(behind_s) for behind_s in (0.0, 7200.0, 7200.0, 7200.0, 1.0, 0.0)]
    assert [line is not None for line in said] == [False, False, True, False, True, False]
    assert "7200 s behind" in (said[2] or "")
    assert "agrees" in (said[4] or "")


def test_a_clock_seems_wrong_for_a_moment_after_a_sleep_without_a_word() -> None:
    monitor = ClockMonitor()
    assert [monitor.record_difference(behind_s) for behind_s in (-28_800.0, 0.0, -28_800.0, 0.0)] == [
        None
    ] * 4
    assert [monitor.record_difference(-7200.0) for _ in range(2)][1] is not None
