"""A hop that says that it leaves is blamed for nothing if it goes as it has said, and for all else as any other."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import pytest
from support.circuits.generating import HIGH, Generating, rest
from support.links.data_plane import DEADLINE_S, SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit.circuit_core import RECOVERY_S
from molink.client.circuit.quarantine import LEAVES_WITHIN_S, MOST_LEFT, Quarantine
from molink.client.circuit.route_selector import RouteSelector, StandbyChoice
from molink.client.epochs import moves_core
from molink.client.epochs.circuit_events import AVOID_S
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import CopyForm

IN_TIME_MS, AT_ONCE_MS = 20_000, 0
"""What the hop says that it serves for, which it does in the one case and not in the other."""


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Losses that the history of peers hears of. There are no standbys, so that no session can go over."""
    noted: list[str] = []

    async def nobody(*_: object) -> Mapping[int, tuple[PeerView, CopyForm]]:
        return {}

    monkeypatch.setattr(StandbyChoice, "partners", nobody)
    monkeypatch.setattr(RouteSelector, "record_loss", lambda _, peer_id: noted.append(peer_id))
    monkeypatch.setattr(moves_core, "LEAST_NOTICE_S", 0.0)
    return noted


def quarantine_of(run: Generating) -> Quarantine:
    return run.session._circuit_builder.quarantine  # noqa: SLF001 - what later sessions go by


async def recovered(
    within_ms: int, code: str, *, left_before_s: float = math.inf
) -> tuple[Generating, FakePeer]:
    """A generation whose last hop says that it leaves, is lost before the session could go over, and is replaced. So
    long before the client was excused by it in the same way."""
    run = Generating(spare=True)
    if left_before_s < math.inf:
        at_s = asyncio.get_running_loop().time() - left_before_s
        assert quarantine_of(run).excuse_leaving(run.high.view.facts, at_s, 0.0)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    told = pb.Leaving(epoch=run.session.log.epochs, within_ms=within_ms, reason="it leaves the swarm")
    run.session.on_leaving(run.high.peer_id, told)
    run.lose(run.high, code=code, sender=run.high)
    await run.started(2)
    assert [hop.peer_id for hop in run.low.reserved[-1].hops] == [run.low.peer_id, run.spare.peer_id]
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    return run, run.high


def is_left_out(run: Generating, peer: FakePeer) -> tuple[bool, bool]:
    """Whether new circuits better do without that peer, and whether they must."""
    now_s = asyncio.get_running_loop().time()
    avoided, shunned = quarantine_of(run).excluded_peers(run.connection.snapshot(SPEC.model_hash), now_s)
    return peer.peer_id in avoided, peer.peer_id in shunned


@pytest.mark.parametrize("code", ["lost", "paused"])
@asynchronous
async def test_a_hop_that_goes_as_it_has_said_is_no_loss_and_left_out_where_others_can_take_its_place(
    code: str, losses: list[str]
) -> None:
    run, high = await recovered(AT_ONCE_MS, code)
    assert run.session.log.losses == []
    assert losses == []
    assert is_left_out(run, high) == (True, False)


@pytest.mark.parametrize(
    ("within_ms", "code"),
    [
        (IN_TIME_MS, "lost"),
        (IN_TIME_MS, "paused"),
        (IN_TIME_MS, "stalled"),
        (AT_ONCE_MS, "stalled"),
        (AT_ONCE_MS, "protocol"),
        (AT_ONCE_MS, "engine"),
    ],
)
@asynchronous
async def test_a_hop_that_fails_counts_as_any_that_does_though_it_has_said_that_it_leaves(
    within_ms: int, code: str, losses: list[str]
) -> None:
    run, high = await recovered(within_ms, code)
    assert [(loss.peer_id, loss.code) for loss in run.session.log.losses] == [(high.peer_id, code)]
    assert losses == [high.peer_id]
    assert is_left_out(run, high) == (True, True)


async def begun() -> tuple[Generating, AsyncGenerator[pb.Token, None]]:
    """A generation whose first token has been read, and no further one is."""
    run = Generating(spare=True)
    tokens = run.session.tokens(DEADLINE_S)
    first = asyncio.create_task(anext(tokens))
    await run.started()
    run.token(3, 30)
    await soon(first)
    return run, tokens


async def ended(run: Generating, tokens: AsyncGenerator[pb.Token, None]) -> None:
    """It is read again, and goes on over its second circuit to its end."""
    got = asyncio.create_task(rest(tokens))
    await run.started(2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [1]


@asynchronous
async def test_a_hop_is_judged_by_when_it_went_however_late_its_going_is_read(
    losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves_core, "GONE_WITHIN_S", 0.2)
    run, tokens = await begun()
    told = pb.Leaving(epoch=run.session.log.epochs, within_ms=AT_ONCE_MS, reason="it leaves the swarm")
    run.session.on_leaving(run.high.peer_id, told)
    run.lose(run.high, sender=run.high)
    read_s = asyncio.get_running_loop().time() + 0.3
    await until(lambda: asyncio.get_running_loop().time() > read_s)
    run.high.unheard_s = RECOVERY_S  # since then
    await ended(run, tokens)
    assert losses == []
    assert run.session.log.losses == []


@asynchronous
async def test_a_hop_that_is_lost_while_nobody_reads_is_replaced_in_the_time_that_there_was(
    losses: list[str],
) -> None:
    run, tokens = await begun()
    run.lose(run.high, sender=run.high)
    run.high.unheard_s = RECOVERY_S + 1.0  # since then
    await ended(run, tokens)
    assert losses == [run.high.peer_id]


@pytest.mark.parametrize("left_before_s", [0.0, LEAVES_WITHIN_S + 1])
@asynchronous
async def test_a_hop_that_leaves_once_more_without_having_been_gone_counts_as_any_that_fails(
    left_before_s: float, losses: list[str]
) -> None:
    """It leaves all sessions of a client at about the same time, which is once."""
    run, high = await recovered(AT_ONCE_MS, "lost", left_before_s=left_before_s)
    assert losses == ([high.peer_id] if left_before_s else [])
    assert len(run.session.log.losses) == len(losses)
    assert is_left_out(run, high) == (True, bool(left_before_s))


def test_a_peer_that_comes_back_with_new_facts_may_leave_again() -> None:
    quarantine, peer = Quarantine(), FakePeer(HIGH)
    assert quarantine.excuse_leaving(peer.view.facts, 0.0, AVOID_S)
    assert not quarantine.excuse_leaving(peer.view.facts, 100.0, AVOID_S)
    peer.announce_anew()
    assert quarantine.excuse_leaving(peer.view.facts, 100.0, AVOID_S)
    assert not quarantine.excuse_leaving(peer.view.facts, 200.0, AVOID_S)


def test_of_so_many_peers_and_no_more_it_is_remembered_that_they_have_left() -> None:
    quarantine, facts = Quarantine(), FakePeer(HIGH).view.facts
    for number in range(MOST_LEFT + 1):
        assert quarantine.excuse_leaving(replace(facts, peer_id=str(number)), 0.0, AVOID_S)
    assert len(quarantine.left) == MOST_LEFT
    assert not quarantine.excuse_leaving(replace(facts, peer_id=str(MOST_LEFT)), 100.0, AVOID_S)
