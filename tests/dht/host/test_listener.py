"""Turns at handshakes: as many as a peer can afford, and a flood from one network waits behind itself."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from molink.dht.host import listener
from molink.dht.host.listener import HandshakeQueue


def in_trio(scenario: object) -> None:
    """As time passes when nothing else happens."""
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_TURNS_AT_ONCE", 5)
    monkeypatch.setattr(listener, "_TURNS_PER_S", 10.0)


async def taken(turns: HandshakeQueue, guest: int, network: str, log: list[tuple[int, float]]) -> None:
    await turns.wait_turn(guest, network)
    log.append((guest, trio.current_time()))


def test_a_few_begin_at_once_and_the_others_one_after_another() -> None:
    async def scenario() -> None:
        turns, log = HandshakeQueue(), list[tuple[int, float]]()
        async with trio.open_nursery() as nursery:
            start = trio.current_time()
            async with trio.open_nursery() as guests:
                nursery.start_soon(turns.run)
                for guest in range(15):
                    await wait_all_tasks_blocked()
                    guests.start_soon(taken, turns, guest, "crowd", log)
            assert [guest for guest, _ in log] == list(range(15))
            assert [round(10 * (at - start)) for _, at in log] == [0] * 5 + list(range(1, 11))
            await trio.sleep(60.0)
            await turns.wait_turn(16, "crowd")
            nursery.cancel_scope.cancel()

    in_trio(scenario)


def test_a_newcomer_does_not_wait_behind_a_crowd_elsewhere() -> None:
    async def scenario() -> None:
        turns, log = HandshakeQueue(), list[tuple[int, float]]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.run)
            for guest in range(1000):
                nursery.start_soon(taken, turns, guest, "crowd", log)
            await trio.sleep(1.0)
            with trio.fail_after(0.5):
                await turns.wait_turn(2000, "newcomer's")
            nursery.cancel_scope.cancel()

    in_trio(scenario)


def test_who_is_gone_waits_no_more_and_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        turns, log = HandshakeQueue(), list[tuple[int, float]]()
        async with trio.open_nursery() as nursery:
            for guest in range(100):
                nursery.start_soon(taken, turns, guest, "crowd", log)
                await wait_all_tasks_blocked()
            assert len(log) == 5
            for guest in range(99):
                turns.release(guest, "crowd")
            await wait_all_tasks_blocked()
            assert len(log) == 99
            nursery.start_soon(turns.run)
            await trio.sleep(0.2)
            assert len(log) == 100
            nursery.cancel_scope.cancel()

    in_trio(scenario)
