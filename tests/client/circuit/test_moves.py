"""A hop that leaves says so, and its session goes over to another one between two tokens; nobody is blamed for it."""

import asyncio
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support.circuits.generating import LOW, PROMPT, Generating, rest
from support.links.data_plane import DEADLINE_S, SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit import circuit_core as core
from molink.client.circuit import reserving
from molink.client.circuit import session as session_module
from molink.client.circuit import standbys as standbys_module
from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.quarantine import LEAVES_WITHIN_S
from molink.client.circuit.route_selector import RouteSelector, StandbyChoice
from molink.dht.records.records import AnnouncedDraft, LayerLatency, PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standbys are sought at once, and whoever holds the same layers is one."""

    async def partners(
        self: StandbyChoice,
        route: Route,
        descriptor: pb.SessionDescriptor,
        hops: Sequence[int],
        taken: frozenset[str],
        without_time: frozenset[str],
    ) -> Mapping[int, tuple[PeerView, CopyForm]]:
        views = self._connection.snapshot()
        return {
            at: (view, CopyForm.KEYS_AND_VALUES)
            for at in hops
            for view in views
            if route.hops[at].span in view.state.spans and view.peer_id not in (*taken, *route.peer_ids)
        }

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(StandbyChoice, "partners", partners)


def leaving(run: Generating, peer: FakePeer, within_ms: int = 20_000) -> None:
    """That peer says that it leaves."""
    told = pb.Leaving(epoch=run.session.log.epochs, within_ms=within_ms, reason="it leaves the swarm")
    run.session.on_leaving(peer.peer_id, told)


def better_there(run: Generating, peer: FakePeer, within_ms: int = 3_000) -> None:
    """That peer says that its standby has more time for the session."""
    told = pb.Leaving(epoch=run.session.log.epochs, within_ms=within_ms, to_standby=True)
    run.session.on_leaving(peer.peer_id, told)


async def moving(run: Generating) -> pb.Move:
    """The word to the head that the session goes over."""
    await until(lambda: bool(run.low.moves))
    return run.low.moves[-1]


@asynchronous
async def test_the_hop_that_leaves_is_replaced_and_no_token_is_lost_or_doubled() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.high)
    move = await moving(run)
    assert run.high.handed_over == 1
    assert (move.epoch, move.next_epoch, move.peer_id) == (1, 2, run.low.peer_id)
    prepared = run.low.reserved[-1]
    assert [hop.peer_id for hop in prepared.hops] == [run.low.peer_id, run.spare.peer_id]
    assert prepared.prefix_blocks == b""
    run.token(4, 40, epoch=1)
    run.token(5, 50, epoch=2)
    run.token(5, 99, epoch=1)
    await until(lambda: [epoch for _, epoch in run.high.released] == [1])
    run.token(6, 1, finish=pb.STOP, epoch=2)
    assert await soon(got) == [30, 40, 50, 1]
    log = run.session.log
    assert (log.epochs, log.moves, log.losses, log.recoveries) == (1, 1, [], [])
    assert log.route is not None
    assert log.route.peer_ids == (run.low.peer_id, run.spare.peer_id)
    assert len(run.low.starts) == 1
    assert [epoch for _, epoch in run.spare.released] == [2]


@asynchronous
async def test_no_hop_is_told_of_the_next_epoch_before_the_leaving_one_has_said_that_it_hands_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standbys_module, "HANDS_OVER_WITHIN_S", 0.05)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: run.session.standbys.substitute(run.high.peer_id) == run.spare.peer_id)
    run.high.silent, run.high.hang = {"reserve"}, asyncio.Event()
    before = len(run.low.reserved)
    leaving(run, run.high)
    await soon(run.high.hang.wait())
    assert run.high.handed_over == 1
    assert len(run.low.reserved) == before
    move = await moving(run)
    assert move.next_epoch == 2, "one that does not answer is left all the same"
    run.token(4, 40, epoch=1)
    run.token(5, 1, finish=pb.STOP, epoch=2)
    assert await soon(got) == [30, 40, 1]


@pytest.mark.parametrize("drafts", [(), (AnnouncedDraft("lookup"),)])
@asynchronous
async def test_a_head_that_takes_a_session_over_is_told_what_to_guess_from_if_it_guesses(
    drafts: tuple[AnnouncedDraft, ...],
) -> None:
    run = Generating(spare=LOW)
    run.spare.view = replace(run.spare.view, facts=replace(run.spare.view.facts, drafts=drafts))
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.low)
    move = await moving(run)
    assert move.peer_id == run.spare.peer_id
    run.token(4, 40, epoch=1)
    assert run.spare.histories == []
    run.token(5, 50, epoch=2, sender=run.spare)
    run.token(6, 1, finish=pb.STOP, epoch=2, sender=run.spare)
    assert await soon(got) == [30, 40, 50, 1]
    told = [(one.epoch, one.position, list(one.token_ids)) for one in run.spare.histories]
    assert told == ([(2, 0, [*PROMPT, 30, 40, 50])] if drafts else [])
    assert run.high.histories == run.low.histories == []


@asynchronous
async def test_tokens_of_the_next_epoch_wait_for_the_last_one_of_the_epoch_before() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    leaving(run, run.high)
    await moving(run)
    run.token(4, 40, epoch=2)
    run.token(5, 50, epoch=2)
    run.token(3, 30, epoch=1)
    run.token(6, 1, finish=pb.STOP, epoch=2)
    assert await soon(got) == [30, 40, 50, 1]
    assert run.session.log.moves == 1


@asynchronous
async def test_a_move_that_a_hop_cannot_make_has_the_same_circuit_asked_for_again_and_blames_nobody() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.high)
    await moving(run)
    run.lose(run.spare, epoch=2, code="move", sender=run.spare)
    await run.started(2)
    assert run.epoch == 3
    assert [hop.peer_id for hop in run.low.reserved[-1].hops] == [run.low.peer_id, run.spare.peer_id]
    assert list(run.low.starts[-1].token_ids)[-1] == 30
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert run.session.log.losses == []


@pytest.mark.parametrize("left_before_s", [math.inf, 0.0, LEAVES_WITHIN_S + 1])
@asynchronous
async def test_a_hop_that_leaves_and_is_not_left_in_time_is_left_out_and_counts_as_a_loss_the_second_time(
    monkeypatch: pytest.MonkeyPatch, left_before_s: float
) -> None:
    """Whoever was to blame that the move could not be made: else one that never hands over could hold up each move."""
    noted: list[str] = []
    monkeypatch.setattr(RouteSelector, "record_loss", lambda _, peer_id: noted.append(peer_id))
    run, clock = Generating(spare=True), asyncio.get_running_loop().time
    quarantine = run.session._circuit_builder.quarantine  # noqa: SLF001 - what later sessions go by
    if left_before_s < math.inf:
        assert quarantine.excuse_leaving(run.high.view.facts, clock() - left_before_s, 0.0)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.high)
    await moving(run)
    run.lose(run.spare, epoch=2, code="move", sender=run.spare)
    await run.started(2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    avoided, shunned = quarantine.excluded_peers(run.connection.snapshot(SPEC.model_hash), clock())
    again = LEAVES_WITHIN_S < left_before_s < math.inf
    assert avoided == {run.high.peer_id}
    assert (run.high.peer_id in shunned) == again
    assert noted == ([run.high.peer_id] if again else [])


def gone(run: Generating, peer: FakePeer) -> None:
    """The link to that peer has closed, and nobody answers there."""
    peer.reachable, peer.closed_because = False, "it was reset"
    run.session.on_link_closed(peer.peer_id, "it was reset")


@asynchronous
async def test_a_standby_that_is_gone_before_all_hops_are_ready_is_not_gone_over_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserving, "READY_POLL_S", 0.02)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.low.says_ready = False
    leaving(run, run.high)
    await until(lambda: run.spare.asked.count("reserve") > 1)
    gone(run, run.spare)
    run.low.says_ready = True
    await until(lambda: 2 in [epoch for _, epoch in run.low.released])
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert run.low.moves == []
    assert run.session.log.losses == []


@asynchronous
async def test_a_standby_that_has_less_than_its_client_is_not_gone_over_to_however_ready_it_thinks_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserving, "READY_POLL_S", 0.02)
    monkeypatch.setattr(reserving, "ON_THEIR_WAY_TOKENS", 1)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    for position, token_id in ((3, 30), (4, 40), (5, 50)):
        run.token(position, token_id)
    await until(lambda: bool(run.session.standbys.substitute(run.high.peer_id)))
    run.spare.held_tokens = 4
    better_there(run, run.high, within_ms=20_000)
    asked = len(run.spare.asked)
    await until(lambda: run.spare.asked[asked:].count("reserve") > 2)
    assert run.low.moves == []
    run.spare.held_tokens = 5
    move = await moving(run)
    run.token(6, 60, epoch=move.epoch)
    run.token(7, 1, finish=pb.STOP, epoch=move.next_epoch)
    assert await soon(got) == [30, 40, 50, 60, 1]
    assert run.session.log.losses == []


@asynchronous
async def test_a_standby_whose_copy_was_not_whole_in_time_keeps_it_and_is_gone_over_to_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserving, "READY_POLL_S", 0.02)
    run, said = Generating(spare=True), list[str]()
    run.report = said.append
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: bool(run.session.standbys.substitute(run.high.peer_id)))
    run.spare.says_ready = False
    better_there(run, run.high, within_ms=700)
    await until(lambda: any("a move is not made" in line for line in said))
    assert run.session.standbys.substitute(run.high.peer_id) == run.spare.peer_id
    run.spare.says_ready = True
    better_there(run, run.high)
    move = await moving(run)
    run.token(4, 40, epoch=move.epoch)
    run.token(5, 1, finish=pb.STOP, epoch=move.next_epoch)
    assert await soon(got) == [30, 40, 1]
    assert (run.session.log.moves, run.session.log.losses) == (1, [])


@pytest.mark.parametrize("is_alive", [False, True], ids=["gone", "without_its_copy"])
@asynchronous
async def test_a_session_goes_back_to_the_hop_that_it_was_leaving_for_a_standby_that_cannot_begin(
    is_alive: bool,
) -> None:
    run = Generating(spare=True)
    run.low.held_tokens = run.high.held_tokens = 4
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.high)
    await moving(run)
    run.token(4, 40, epoch=1)
    if is_alive:
        run.lose(run.spare, epoch=1, code="copy", sender=run.spare)
    else:
        gone(run, run.spare)
    await run.started(2)
    assert run.epoch == 3
    assert [hop.peer_id for hop in run.low.reserved[-1].hops] == [run.low.peer_id, run.high.peer_id]
    assert (run.low.starts[-1].token_ids[-2:], run.low.starts[-1].position) == ([30, 40], 4)
    run.token(5, 1, finish=pb.STOP)
    assert await soon(got) == [30, 40, 1]
    assert [loss.peer_id for loss in run.session.log.losses] == ([] if is_alive else [run.spare.peer_id])


@pytest.mark.parametrize("code", ["move", "copy"])
@asynchronous
async def test_a_hop_that_fails_and_speaks_of_a_move_while_there_is_none_is_left_out_as_any_other(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    async def nobody(*_: object) -> Mapping[int, tuple[PeerView, CopyForm]]:
        return {}

    monkeypatch.setattr(StandbyChoice, "partners", nobody)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.lose(run.high, code=code, sender=run.high)
    await run.started(2)
    assert [hop.peer_id for hop in run.low.reserved[-1].hops] == [run.low.peer_id, run.spare.peer_id]
    assert len(run.high.reserved) == 1
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert [(loss.peer_id, loss.code) for loss in run.session.log.losses] == [(run.high.peer_id, code)]


@asynchronous
async def test_a_move_that_is_refused_in_the_moment_in_which_its_circuit_is_lost_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparing = asyncio.Event()

    async def prepare(*_: object) -> None:
        preparing.set()
        try:
            await asyncio.Event().wait()
        except (
            asyncio.CancelledError
        ):  # a task group of which a part has failed says that, and not that it ends
            raise reserving.HopRefused(run.spare.peer_id, "lost", "it was reset") from None

    monkeypatch.setattr(CircuitBuilder, "prepare", prepare)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure["message"]))
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    leaving(run, run.high)
    await soon(asyncio.ensure_future(preparing.wait()))
    run.lose(run.high)
    await run.started(2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    gc.collect()
    await asyncio.sleep(0)
    assert failures == []


@asynchronous
async def test_a_hop_that_does_not_answer_its_client_costs_no_standby_its_place() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: run.session.standbys.substitute(run.high.peer_id) == run.spare.peer_id)
    run.high.silent.add("reserve")
    circuit = run.session._run.circuit  # type: ignore[union-attr]  # noqa: SLF001 - as after a failover
    run.session.standbys.begin(circuit)
    asked = len(run.high.asked)
    await until(lambda: len(run.high.asked) > asked)
    assert run.session.standbys.substitute(run.high.peer_id) == run.spare.peer_id
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]


@asynchronous
async def test_a_session_goes_over_to_a_circuit_that_is_really_better_and_not_for_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.05)
    run = Generating(spare=True, max_new_tokens=200)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: run.high.renewed > 2)
    assert run.low.moves == []
    latencies = (LayerLatency(1, 50.0),)
    run.high.view = replace(run.high.view, facts=replace(run.high.view.facts, layer_latencies=latencies))
    move = await moving(run)
    assert move.next_epoch == 2
    run.token(4, 40, epoch=1)
    run.token(5, 1, finish=pb.STOP, epoch=2)
    assert await soon(got) == [30, 40, 1]
    assert run.session.log.moves == 1
    assert run.session.log.route is not None
    assert run.session.log.route.peer_ids == (run.low.peer_id, run.spare.peer_id)


@asynchronous
async def test_leases_are_renewed_whatever_becomes_of_looking_for_a_better_circuit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("an announcement that nobody had thought of")

    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(StandbyChoice, "better", fail)
    run = Generating(max_new_tokens=200)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: run.low.renewed > 2 and run.high.renewed > 2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert "an announcement that nobody had thought of" in caplog.text
    assert run.session.log.losses == []


@asynchronous
async def test_between_two_holders_that_share_work_a_client_does_not_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.05)
    run = Generating(spare=True, max_new_tokens=200)
    latencies = (LayerLatency(1, 50.0),)
    for peer in (run.high, run.spare):
        peer.view = replace(peer.view, facts=replace(peer.view.facts, pairs=True))
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.high.view = replace(run.high.view, facts=replace(run.high.view.facts, layer_latencies=latencies))
    renewed = run.high.renewed
    await until(lambda: run.high.renewed > renewed + 2)
    assert run.low.moves == []
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]


def running() -> core.CircuitCore:
    circuit = core.CircuitCore()
    circuit.handle(core.Begin(100.0), 0.0)
    circuit.handle(core.Planned(("head", "tail")), 0.0)
    circuit.handle(core.Ready(), 0.0)
    return circuit


def test_a_number_that_was_prepared_and_given_up_is_never_used_again() -> None:
    circuit = running()
    assert circuit.handle(core.MoveWanted(("head", "spare")), 1.0) == (core.Prepare(2),)
    assert circuit.epoch == 1
    assert circuit.handle(core.NotPrepared(), 1.0) == (core.Release(2),)
    assert circuit.handle(core.MoveWanted(("head", "spare")), 1.0) == (core.Prepare(3),)
    (seize,) = circuit.handle(core.Lost(peer_id="tail", standby="spare"), 2.0)
    assert isinstance(seize, core.Seize)
    assert seize.epoch == 4
    with pytest.raises(ValueError, match="Prepared"):
        circuit.handle(core.Prepared(), 2.0)


def test_the_circuit_that_was_gone_over_to_is_asked_for_again_where_none_of_its_hops_is_lost() -> None:
    circuit = running()
    circuit.handle(core.MoveWanted(("head", "spare")), 1.0)
    assert circuit.handle(core.Prepared(), 1.0) == (core.GoOver(2),)
    assert (circuit.epoch, circuit.peer_ids) == (2, ("head", "spare"))
    (seize,) = circuit.handle(core.Lost(peer_id="tail", stays=True), 2.0)
    assert isinstance(seize, core.Seize)
    assert (seize.epoch, seize.standby, circuit.peer_ids) == (3, "", ("head", "spare"))
