"""A better circuit of other spans computes the session anew beside the running one, which goes on until it is level."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.circuits.generating import PROMPT, Generating, rest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit import session as session_module
from molink.client.circuit.connection import FrameSink
from molink.client.epochs.successor_core import SequenceLengths, is_worth_computing
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.shards.spec import PENALTIES, Span


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.02)


class Succeeding(Generating):
    """A generation over `low` and `high` that is to go over to `whole`, which has all layers and comes later."""

    def __init__(self, **params: object) -> None:
        super().__init__(**{"max_new_tokens": 200, **params})
        self.whole = FakePeer(Span(0, 6))

    @property
    def successor(self) -> FrameSink:
        """Where frames of the session that is begun anew come to."""
        sinks = self.connection.sinks
        return sinks[self.whole.starts[-1].session]  # type: ignore[return-value]

    def succeeding_token(self, position: int, token_id: int, finish: int = pb.NOT_FINISHED) -> None:
        """A token comes over the circuit that is computed anew."""
        token = pb.Token(
            session=self.whole.starts[-1].session,
            epoch=self.whole.starts[-1].epoch,
            position=position,
            token_id=token_id,
            finish=finish,  # type: ignore[arg-type]
        )
        self.successor.on_tokens(self.whole.peer_id, token)


@asynccontextmanager
async def computing(**params: object) -> AsyncIterator[tuple[Succeeding, "asyncio.Task[list[int]]"]]:
    """A generation of which two tokens have come, and whose successor has been started on them."""
    run = Succeeding(**params)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.token(4, 40)
    run.connection.peers.append(run.whole)
    await until(lambda: len(run.whole.starts) == 1)
    yield run, got


@asynchronous
async def test_the_session_goes_over_when_the_successor_draws_the_next_token_and_never_waits() -> None:
    async with computing() as (run, got):
        first = run.whole.starts[0]
        assert (list(first.token_ids), first.position) == ([*PROMPT, 30, 40], 0)
        assert first.session != run.low.starts[0].session
        run.token(5, 50)
        run.token(6, 60)
        run.whole.held_tokens = 5
        run.succeeding_token(5, 50)
        await until(lambda: len(run.whole.starts) == 2)
        second = run.whole.starts[1]
        assert (list(second.token_ids), second.position) == ([*PROMPT, 30, 40, 50, 60], 5)
        assert second.epoch > first.epoch
        run.token(7, 70)
        run.succeeding_token(7, 70)
        run.succeeding_token(8, 80)
        run.token(8, 99)
        await until(lambda: bool(run.low.released and run.high.released))
        assert set(run.connection.sinks) == {second.session}
        run.succeeding_token(9, 1, pb.STOP)
        assert await soon(got) == [30, 40, 50, 60, 70, 80, 1]
    log = run.session.log
    assert log.route is not None
    assert (log.route.peer_ids, log.moves) == ((run.whole.peer_id,), 1)
    assert (log.epochs, log.losses, log.recoveries) == (1, [], [])
    assert run.low.released == run.high.released == [(run.low.starts[0].session, 1)]
    assert (second.session, second.epoch) in run.whole.released


@asynchronous
async def test_a_successor_that_draws_another_token_is_given_up_and_its_leases_are_given_back() -> None:
    async with computing() as (run, got):
        begun = run.whole.starts[0]
        run.token(5, 50)
        run.succeeding_token(5, 51)
        await until(lambda: (begun.session, begun.epoch) in run.whole.released)
        assert begun.session not in run.connection.sinks
        run.connection.peers.remove(run.whole)
        run.token(6, 1, finish=pb.STOP)
        assert await soon(got) == [30, 40, 50, 1]
    assert (run.session.log.moves, run.session.log.losses) == (0, [])


@asynchronous
async def test_a_successor_that_is_refused_its_second_start_gives_back_the_lease_of_its_first() -> None:
    async with computing() as (run, got):
        begun = run.whole.starts[0]
        run.token(5, 50)
        run.token(6, 60)
        run.whole.refuse["reserve"] = pb.Refusal(code="memory", detail="full")
        run.succeeding_token(5, 50)
        await until(lambda: begun.session not in run.connection.sinks)
        second = next(one.epoch for one in reversed(run.whole.reserved) if one.session == begun.session)
        assert second > begun.epoch
        given_back = [epoch for session, epoch in run.whole.released if session == begun.session]
        assert given_back == [begun.epoch, second]
        run.connection.peers.remove(run.whole)
        run.token(7, 1, finish=pb.STOP)
        assert await soon(got) == [30, 40, 50, 60, 1]
    assert (run.session.log.moves, run.session.log.losses) == (0, [])


@pytest.mark.parametrize("way", ["closed", "failed", "leaving"])
@asynchronous
async def test_a_hop_of_the_successor_that_is_lost_costs_the_session_nothing(way: str) -> None:
    async with computing() as (run, got):
        begun = run.whole.starts[0]
        run.connection.peers.remove(run.whole)
        if way == "closed":
            run.successor.on_link_closed(run.whole.peer_id, "it was reset")
        elif way == "failed":
            run.successor.on_failed(run.whole.peer_id, pb.Failed(code="lost", detail="it is gone"))
        else:
            run.successor.on_leaving(run.whole.peer_id, pb.Leaving(reason="it leaves the swarm"))
        await until(lambda: begun.session not in run.connection.sinks)
        run.token(5, 1, finish=pb.STOP)
        assert await soon(got) == [30, 40, 1]
    assert (run.session.log.moves, run.session.log.losses) == (0, [])


@asynchronous
async def test_a_loss_of_the_running_circuit_ends_its_successor_and_is_mended_as_ever() -> None:
    async with computing() as (run, got):
        begun = run.whole.starts[0]
        run.connection.peers.remove(run.high)
        run.high.reachable = False
        run.lose(run.high)
        await until(lambda: len(run.whole.starts) == 2)
        assert begun.session not in run.connection.sinks
        again = run.whole.starts[1]
        assert again.session == run.low.starts[0].session
        assert again.epoch > begun.epoch
        assert list(again.token_ids) == [*PROMPT, 30, 40]
        run.token(5, 1, finish=pb.STOP, epoch=again.epoch, sender=run.whole)
        assert await soon(got) == [30, 40, 1]
    assert [one.peer_id for one in run.session.log.losses] == [run.high.peer_id]


@asynchronous
async def test_a_hop_that_leaves_meanwhile_is_left_at_once() -> None:
    async with computing() as (run, got):
        begun = run.whole.starts[0]
        run.session.on_leaving(run.high.peer_id, pb.Leaving(epoch=1, within_ms=20_000, reason="it leaves"))
        await until(lambda: begun.session not in run.connection.sinks)
        run.token(5, 1, finish=pb.STOP)
        assert await soon(got) == [30, 40, 1]
    assert run.session.log.losses == []


@pytest.mark.parametrize(
    ("history_tokens", "other", "is_worth"),
    [
        (200, (50.0, 1000.0), True),
        (200, (98.0, 1000.0), False),
        (900, (50.0, 1000.0), False),
        (900, (50.0, 250.0), True),
        (200, (1.0, 5100.0), False),
        (200, (150.0, 0.0), False),
    ],
    ids=["gains", "gains_little", "few_left", "few_left_but_soon", "takes_too_long", "is_worse"],
)
def test_a_sequence_is_computed_anew_where_what_comes_gains_twice_that_and_it_is_soon_done(
    history_tokens: int, other: tuple[float, float], is_worth: bool
) -> None:
    standing, found = Route((), 100.0, 0.0, 500.0), Route((), other[0], 0.0, other[1])
    lengths = SequenceLengths(100, history_tokens, 1000)
    assert is_worth_computing(lengths, standing, 0.0, found) == is_worth


@asynchronous
async def test_no_session_is_computed_anew_for_nothing_more_than_twice() -> None:
    async with computing() as (run, got):
        for times in (1, 2):
            await until(lambda times=times: len(run.whole.starts) == times)
            begun = run.whole.starts[-1]
            run.successor.on_link_closed(run.whole.peer_id, "it was reset")
            await until(lambda begun=begun: begun.session not in run.connection.sinks)
        renewed = run.low.renewed
        await until(lambda: run.low.renewed > renewed + 3)
        assert len(run.whole.starts) == times
        run.token(5, 1, finish=pb.STOP)
        assert await soon(got) == [30, 40, 1]
    assert (run.session.log.moves, run.session.log.losses) == (0, [])


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 0.5}, {"max_new_tokens": 60}], ids=["told_tails", "few_tokens_left"]
)
@asynchronous
async def test_who_gains_nothing_or_draws_by_what_came_before_stays(params: dict[str, object]) -> None:
    run = Succeeding(**params)
    for peer in (run.low, run.high, run.whole):
        facts = replace(peer.view.facts, sampling_abilities=(PENALTIES,))
        peer.view = replace(peer.view, facts=facts)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.connection.peers.append(run.whole)
    renewed = run.low.renewed
    await until(lambda: run.low.renewed > renewed + 3)
    assert run.whole.starts == []
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
