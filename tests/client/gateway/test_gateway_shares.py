"""Who gets how much of the gateway, whose turn it is, and which hosts it answers to."""

import asyncio
from collections.abc import Sequence

import pytest

from molink.client.gateway.server import most_connections
from molink.client.gateway.shares import LOCAL, UNKNOWN, FairShares, host_is_allowed, plain_host, user_of
from molink.client.gateway.slots import GatewayBusy, GatewayStopping, Slots

DEADLINE_S = 120.0


@pytest.mark.parametrize(
    ("address", "user"),
    [
        ("127.0.0.1", LOCAL),
        ("::1", LOCAL),
        ("::ffff:127.0.0.1", LOCAL),
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("nonsense", UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_a_user_is_an_address_or_a_network(address: str | None, user: str) -> None:
    assert user_of(address) == user


def test_who_holds_a_quarter_leaves_the_last_tenth_to_others() -> None:
    shares = FairShares(40)
    taken = 0
    while shares.may_take("greedy"):
        shares.take("greedy")
        taken += 1
    assert taken == 36
    assert shares.may_take("modest", 4)
    shares.take("modest", 4)
    assert not shares.may_take("late")
    shares.give("greedy", 6)
    assert shares.total == 34
    assert not shares.may_take("greedy", 3)
    assert shares.may_take(LOCAL, 6)
    assert not shares.may_take(LOCAL, 7)


def test_what_is_given_back_is_forgotten() -> None:
    shares = FairShares(4)
    shares.take("a", 2)
    shares.take("a", 0)
    shares.give("a", 2)
    assert (shares.total, shares.held("a")) == (0, 0)
    assert shares.may_take(LOCAL, 4)


@pytest.mark.parametrize(
    "header",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "203.0.113.7", "[::1]", "[2001:db8::1]:80",
     "gpu-box.lan", "GPU-Box.lan:8000", "::1"],
)  # fmt: skip
def test_names_that_are_allowed_and_addresses_are_answered(header: str) -> None:
    assert host_is_allowed(header, {plain_host("GPU-box.LAN.")})


@pytest.mark.parametrize(
    "header",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "", "[evil.example]:1",
     "gpu-box.lan.evil.example", "127.0.0.1:80:evil"],
)  # fmt: skip
def test_other_names_are_not_answered(header: str) -> None:
    assert not host_is_allowed(header, {"gpu-box.lan"})


@pytest.mark.parametrize(
    ("descriptors", "most"), [(None, 1024), (4096, 1024), (1024, 896), (256, 128), (100, 16)]
)
def test_connections_leave_descriptors_for_the_rest(descriptors: int | None, most: int) -> None:
    assert most_connections(descriptors) == most


async def finished(slots: Slots, users: Sequence[str]) -> list[str]:
    """In which order they have their turn, while "before" holds the only slot."""
    order: list[str] = []

    async def run(user: str) -> None:
        taken = await slots.take(user, 1)
        order.append(user)
        await asyncio.sleep(0)
        slots.give(user, taken)

    tasks = [asyncio.create_task(run(user)) for user in users]
    await asyncio.sleep(0)
    slots.give("before", 1)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks)
    return order


@pytest.mark.anyio
async def test_it_is_the_turn_of_whose_user_has_the_fewest() -> None:
    slots = Slots(8, waiting_s=DEADLINE_S)
    for _ in range(6):
        await slots.take("greedy", 1)
    await slots.take("modest", 1)
    await slots.take("before", 1)
    assert await finished(slots, ("greedy", "modest", "new")) == ["new", "modest", "greedy"]


@pytest.mark.anyio
async def test_a_request_of_many_generations_waits_until_they_all_have_room() -> None:
    slots = Slots(4, waiting_s=DEADLINE_S)
    assert await slots.take(LOCAL, 3) == 3
    many = asyncio.create_task(slots.take(LOCAL, 16))
    await asyncio.sleep(0)
    assert not many.done()
    slots.give(LOCAL, 3)
    async with asyncio.timeout(DEADLINE_S):
        assert await many == 4


@pytest.mark.anyio
async def test_one_for_several_generations_is_not_overtaken_for_ever_by_those_for_one() -> None:
    slots = Slots(16, waiting_s=DEADLINE_S)
    for number in range(16):
        await slots.take(f"before {number}", 1)
    order: list[str] = []

    async def run(user: str, generations: int) -> None:
        await slots.take(user, generations)
        order.append(user)

    wanted = (("all of it", 16), ("several", 4), ("one", 1), ("another", 1))
    tasks = [asyncio.create_task(run(*one)) for one in wanted]
    await asyncio.sleep(0)
    for number in range(6):
        slots.give(f"before {number}", 1)
        for _ in range(10):  # turns of the loop in which whoever has its slots goes on
            await asyncio.sleep(0)
        assert order == ([] if number < 3 else ["several", "one", "another"][: number - 2])
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.anyio
async def test_who_waited_behind_one_that_gives_up_has_its_turn() -> None:
    slots = Slots(16, waiting_s=DEADLINE_S)
    await slots.take(LOCAL, 15)
    gives_up = asyncio.create_task(slots.take("several", 4))
    await asyncio.sleep(0)
    behind = asyncio.create_task(slots.take("one", 1))
    await asyncio.sleep(0)
    assert not behind.done()
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        assert await behind == 1


@pytest.mark.anyio
async def test_who_waits_too_long_or_beyond_a_users_part_is_asked_to_come_back() -> None:
    asked = []
    slots = Slots(4, waiting_s=0.01, make_room=lambda: asked.append(True))
    await slots.take(LOCAL, 4)
    waiting = asyncio.create_task(slots.take("stranger", 1))
    await asyncio.sleep(0)
    with pytest.raises(GatewayBusy, match="4 generations are under way"):
        await slots.take("stranger", 1)
    with pytest.raises(GatewayBusy):
        await waiting
    assert asked
    slots.give(LOCAL, 4)
    assert await slots.take(LOCAL, 4) == 4


@pytest.mark.anyio
async def test_who_leaves_while_waiting_takes_nothing() -> None:
    slots = Slots(1, waiting_s=DEADLINE_S)
    await slots.take("a", 1)
    leaves = asyncio.create_task(slots.take("b", 1))
    await asyncio.sleep(0)
    slots.give("a", 1)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        assert await slots.take("c", 1) == 1


@pytest.mark.anyio
async def test_nothing_begins_once_it_stops() -> None:
    slots = Slots(1, waiting_s=DEADLINE_S)
    await slots.take("a", 1)
    waiting = asyncio.create_task(slots.take("b", 1))
    await asyncio.sleep(0)
    slots.stop()
    with pytest.raises(GatewayStopping):
        await waiting
    with pytest.raises(GatewayStopping):
        await slots.take("c", 1)
    slots.give("a", 1)
