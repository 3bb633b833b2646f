"""A generation as its client owns it: every token once and in order, whatever becomes of circuits."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.circuits.generating import HIGH, LOW, PROMPT, Generating, rest
from support.links.data_plane import DEADLINE_S, SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit import circuit_core
from molink.client.circuit import session as session_module
from molink.client.circuit.route_selector import RouteSelector
from molink.client.circuit.session_request import SessionRequest, describe_session
from molink.client.epochs import kept_leases, patience
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.errors import InvalidRequest, NoCircuit, PeerLost, SwarmUnavailable
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import encode
from molink.shards.spec import SamplingParams


@asynchronous
async def test_tokens_come_in_order_until_the_last_and_then_all_is_given_back() -> None:
    run = Generating()
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    assert list(run.low.starts[0].token_ids) == PROMPT
    assert run.high.starts == []
    for position, token_id in ((3, 30), (4, 40)):
        run.token(position, token_id)
    run.token(5, 1, finish=pb.STOP)
    assert await soon(got) == [30, 40, 1]
    assert len(run.low.released) == len(run.high.released) == 1
    assert run.connection.sinks == {}
    assert run.session.log.epochs == 1
    assert run.session.log.prefill_s > 0


@asynchronous
async def test_a_token_is_timed_when_it_comes_in_however_late_it_is_taken() -> None:
    run = Generating()
    clock = asyncio.get_running_loop().time
    tokens = run.session.tokens(DEADLINE_S)
    first = asyncio.ensure_future(anext(tokens))
    await run.started()
    run.token(3, 30)
    await soon(first)
    run.token(4, 40)
    run.token(5, 1, finish=pb.STOP)
    came_s = clock()
    await until(lambda: clock() > came_s)  # nobody takes them meanwhile
    assert await soon(asyncio.ensure_future(rest(tokens))) == [40, 1]
    arrived_s = run.session.log.arrived_s
    assert len(arrived_s) == 3
    assert arrived_s == sorted(arrived_s)
    assert arrived_s[-1] <= came_s


@asynchronous
async def test_repeats_gaps_and_tokens_of_other_epochs_are_ignored() -> None:
    run = Generating()
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 99, epoch=run.epoch + 1)
    run.token(3, 99, epoch=0)
    run.token(4, 99)
    run.token(2, 99)
    run.token(3, 30)
    run.token(3, 99)
    run.token(5, 99, finish=pb.STOP)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]


@asynchronous
async def test_only_the_head_gives_tokens() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 99, sender=run.spare)  # no hop of the circuit, linked though it is
    run.token(3, 99, sender=run.high)  # a hop, but not its head
    run.token(3, 30)
    run.token(4, 1, finish=pb.STOP, sender=run.spare)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]


@asynchronous
async def test_only_hops_report_losses_and_only_of_hops() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.lose(run.low, sender=run.spare)
    run.token(3, 30)
    run.lose(run.spare, sender=run.high)
    await run.started(2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert [loss.peer_id for loss in run.session.log.losses] == [run.high.peer_id]


@asynchronous
async def test_a_loss_goes_on_elsewhere_with_the_whole_history() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    first = run.epoch
    run.token(3, 30)
    run.lose(run.high)
    run.token(4, 99)  # of the circuit that is left: too late
    await run.started(2)
    assert run.epoch > first
    assert list(run.low.starts[1].token_ids) == [*PROMPT, 30]
    assert run.spare.reserved[0].epoch == run.epoch
    assert (run.low.starts[0].session, first) in run.high.released
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert run.session.log.epochs == 2
    assert [loss.peer_id for loss in run.session.log.losses] == [run.high.peer_id]
    assert run.session.log.route is not None
    assert run.session.log.route.peer_ids == (run.low.peer_id, run.spare.peer_id)


@asynchronous
async def test_hops_that_stay_keep_their_leases_and_those_that_do_not_give_them_back() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.lose(run.high)
    await run.started(2)
    assert run.low.released == []
    assert [epoch for _, epoch in run.high.released] == [1]
    run.token(4, 1, finish=pb.STOP)
    await soon(got)
    assert [epoch for _, epoch in run.low.released] == [2]
    assert [epoch for _, epoch in run.spare.released] == [2]


HELD: dict[str, tuple[tuple[int, int], tuple[int, int], int]] = {
    "both hold all": ((6, 0), (5, 0), 4),
    "one holds less": ((6, 0), (2, 0), 2),
    "one is new": ((6, 0), (0, 0), 0),
    "one cannot go back so far": ((6, 6), (5, 0), 0),
    "one goes back no further": ((6, 4), (5, 0), 4),
}


@pytest.mark.parametrize("case", HELD)
@asynchronous
async def test_a_circuit_goes_on_where_all_of_its_hops_can(case: str) -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    assert run.low.starts[0].position == 0
    run.token(3, 30)
    run.token(4, 40)
    await until(lambda: len(run.session.log.arrived_s) == 2)
    (low, high, position) = HELD[case]
    run.low.held_tokens, run.low.least_held_tokens = low
    run.spare.held_tokens, run.spare.least_held_tokens = high
    run.lose(run.high)
    await run.started(2)
    assert list(run.low.starts[1].token_ids) == [*PROMPT, 30, 40]
    assert run.low.starts[1].position == position
    run.token(5, 1, finish=pb.STOP)
    assert await soon(got) == [30, 40, 1]


@asynchronous
async def test_a_circuit_is_tried_once_more_where_others_would_have_to_compute_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_leases, "RETRY_S", 0.0)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: len(run.session.log.arrived_s) == 1)
    run.lose(run.high)
    await run.started(2)
    assert [one.epoch for one in run.high.reserved] == [1, 2]
    assert run.spare.reserved == []
    run.session.on_link_closed(run.high.peer_id, "reset by peer")  # again, and nothing came of it
    await run.started(3)
    assert len(run.high.reserved) == 2
    assert len(run.spare.reserved) == 1
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert [epoch for _, epoch in run.high.released] == [2]


@asynchronous
async def test_a_circuit_that_cannot_be_had_again_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_leases, "RETRY_S", 0.0)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    await until(lambda: len(run.session.log.arrived_s) == 1)
    run.high.reachable = False
    run.lose(run.high)
    await run.started(2)
    assert [one.epoch for one in run.low.reserved] == [1, 2, 3]
    assert [one.epoch for one in run.spare.reserved] == [3]
    assert run.low.released == []
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]


@asynchronous
async def test_a_loss_in_an_epoch_that_is_over_changes_nothing() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.lose(run.high, epoch=0)
    run.lose(run.high, epoch=run.epoch + 1)
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]
    assert run.session.log.losses == []
    assert len(run.low.starts) == 1


@asynchronous
async def test_two_reports_of_one_loss_are_one_loss() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.lose(run.high)
    run.session.on_link_closed(run.high.peer_id, "reset")
    await run.started(2)
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]
    assert len(run.session.log.losses) == 1


@asynchronous
async def test_a_closed_link_counts_only_on_the_circuit() -> None:
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.session.on_link_closed(run.spare.peer_id, "idle")
    run.token(3, 30)
    run.session.on_link_closed(run.high.peer_id, "reset by peer")
    await run.started(2)
    run.token(4, 1, finish=pb.STOP)
    assert await soon(got) == [30, 1]
    assert [(loss.peer_id, loss.detail) for loss in run.session.log.losses] == [
        (run.high.peer_id, "reset by peer")
    ]


@asynchronous
async def test_a_loss_that_nobody_can_make_good_is_peer_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_core, "RECOVERY_S", 0.5)
    run = Generating()
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.token(3, 30)
    run.high.reachable = False
    run.lose(run.high)
    with pytest.raises(PeerLost) as caught:
        await soon(got)
    assert caught.value.peer_id == run.high.peer_id
    assert caught.value.span == HIGH
    assert "it is gone" in caught.value.reason
    assert isinstance(caught.value.__cause__, (NoCircuit, SwarmUnavailable))
    assert run.connection.sinks == {}
    assert len(run.low.released) >= 1


@asynchronous
async def test_without_a_first_circuit_the_reason_is_raised_as_it_is() -> None:
    run = Generating()
    run.connection.peers.remove(run.high)
    with pytest.raises(NoCircuit):
        await rest(run.session.tokens(0.1))
    assert run.connection.sinks == {}


@asynchronous
async def test_a_hop_that_went_while_the_circuit_formed_is_a_loss() -> None:
    run = Generating(spare=True)
    run.high.closed_because = "reset by peer"
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    assert run.low.starts[0].epoch == 2
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]


@asynchronous
async def test_a_head_that_takes_no_start_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_core, "RECOVERY_S", 0.5)
    run = Generating()
    run.low.takes = False
    with pytest.raises(PeerLost) as caught:
        await rest(run.session.tokens(DEADLINE_S))
    assert caught.value.peer_id == run.low.peer_id


@asynchronous
async def test_a_caller_that_leaves_early_leaves_nothing_behind() -> None:
    run = Generating()
    async with aclosing(run.session.tokens(DEADLINE_S)) as tokens:
        first = asyncio.ensure_future(anext(tokens))
        await run.started()
        run.token(3, 30)
        assert (await soon(first)).token_id == 30
    assert len(run.low.released) == len(run.high.released) == 1
    assert run.connection.sinks == {}


@asynchronous
async def test_who_goes_while_the_others_of_its_prompt_are_waited_for_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[str, int]] = []
    for name in ("begin_session", "end_session"):
        monkeypatch.setattr(
            RouteSelector, name, lambda _, descriptor, name=name: counted.append((name, descriptor.epoch))
        )
    stood = asyncio.Event()

    async def wait_for_others(_: PlannedRoute) -> None:
        stood.set()
        await asyncio.Event().wait()

    run = Generating(stands=wait_for_others)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await soon(asyncio.ensure_future(stood.wait()))
    got.cancel()
    await asyncio.wait({got})
    assert [epoch for _, epoch in run.low.released] == [epoch for _, epoch in run.high.released] == [1]
    assert counted[0] == ("begin_session", 1)
    assert ("end_session", 1) in counted, "its hops seem busier by one for as long as the client is there"
    assert run.connection.sinks == {}


@asynchronous
async def test_a_caller_that_breaks_out_without_closing_leaves_nothing_behind_either() -> None:
    """The loop closes a generator that nobody refers to any more."""
    run = Generating()

    async def look() -> int | None:
        async for token in run.session.tokens(DEADLINE_S):
            return token.token_id
        return None

    looking = asyncio.create_task(look())
    await run.started()
    run.token(3, 30)
    assert await soon(looking) == 30
    await until(lambda: len(run.low.released) == len(run.high.released) == 1)
    assert run.connection.sinks == {}


@asynchronous
async def test_who_takes_no_tokens_and_closes_nothing_holds_no_lease_once_the_last_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.01)
    run = Generating()
    async with aclosing(run.session.tokens(DEADLINE_S)) as tokens:
        first = asyncio.ensure_future(anext(tokens))
        await run.started()
        run.token(3, 30)
        await soon(first)
        run.token(4, 1, finish=pb.STOP)
        await until(lambda: all(task.get_name() != "renew leases" for task in asyncio.all_tasks()))
        assert [token.token_id for token in [await anext(tokens)]] == [1]


@asynchronous
async def test_leases_are_renewed_however_slowly_tokens_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.01)
    run = Generating()
    async with aclosing(run.session.tokens(DEADLINE_S)) as tokens:
        first = asyncio.ensure_future(anext(tokens))
        await run.started()
        run.token(3, 30)
        await soon(first)
        before = run.high.renewed
        await until(lambda: run.high.renewed >= before + 3)  # the caller is busy with its first token
        assert run.low.renewed >= 3


@asynchronous
async def test_leases_are_renewed_however_fast_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.05)
    run = Generating(max_new_tokens=900)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    position = 3
    while run.high.renewed < 2:
        assert position < 890
        run.token(position, 30)
        position += 1
        await asyncio.sleep(0.002)
    run.token(position, 1, finish=pb.STOP)
    assert len(await soon(got)) == position - 2


@asynchronous
async def test_a_circuit_that_yields_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_FIRST_S", 0.05)
    run = Generating()
    run.connection.newcomer = FakePeer(LOW, layer_ms=9.0)
    other = run.connection.newcomer

    def once(_: str) -> None:
        if run.session.log.losses:
            monkeypatch.setattr(patience, "LEAST_FIRST_S", 60.0)

    run.report = once
    run.connection.refresh_now()
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    await until(lambda: bool(run.session.log.losses))
    loss = run.session.log.losses[0]
    assert (loss.peer_id, loss.code) == (run.low.peer_id, "stalled")
    await until(lambda: bool(other.starts))
    run.token(3, 1, finish=pb.STOP, epoch=other.starts[-1].epoch, sender=other)
    assert await soon(got) == [1]


@asynchronous
async def test_of_a_circuit_that_yields_nothing_the_hop_that_does_not_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "LEAST_FIRST_S", 0.05)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    run.high.silent.add("await_ready")
    monkeypatch.setattr(patience, "LEAST_FIRST_S", 60.0)
    await run.started(2)
    assert [(loss.peer_id, loss.code) for loss in run.session.log.losses] == [(run.high.peer_id, "stalled")]
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]


def test_a_history_that_would_not_fit_a_message_is_an_invalid_request() -> None:
    """With a context of a million tokens of three bytes each, a message of 1 MiB is the lower limit."""
    spec = replace(SPEC, context_length=10**6, vocabulary_size=150_000)

    def described(prompt_tokens: int, max_new_tokens: int) -> pb.SessionDescriptor:
        params = SamplingParams(max_new_tokens=max_new_tokens)
        return describe_session(spec, SessionRequest([149_999] * prompt_tokens, params), bytes(32))

    whole = described(300_000, 40_000)
    start = pb.Start(session=bytes(16), epoch=2**32 - 1, token_ids=[149_999] * 340_000)
    assert len(encode(start)) > 1_000_000
    assert whole.capacity_tokens == 340_000
    for prompt_tokens, max_new_tokens in ((360_000, 1), (300_000, 60_000), (10, 400_000)):
        with pytest.raises(InvalidRequest, match=f"{prompt_tokens} tokens .* shorten the prompt") as caught:
            described(prompt_tokens, max_new_tokens)
        assert caught.value.parameter == "prompt"


def test_what_is_asked_of_the_hops_is_what_the_caller_asked() -> None:
    def described(**params: object) -> pb.SessionDescriptor:
        asked = SessionRequest(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
        return describe_session(SPEC, asked, bytes(32))

    asked = described(
        max_new_tokens=2000,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        seed=9,
        stop_token_ids=(8,),
        logprobs=2,
        logit_bias=((5, -1.5),),
    )
    assert asked.capacity_tokens == SPEC.context_length
    assert asked.prompt_tokens == 3
    assert asked.sampling == pb.Sampling(
        max_new_tokens=2000,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        seed=9,
        stop_token_ids=[1, 8],
        logprobs=2,
        logit_bias={5: -1.5},
    )
    assert len(asked.session) == 16
    assert list(described(ignore_eos=True).sampling.stop_token_ids) == []
    seeds = {described().sampling.seed for _ in range(3)}
    assert len(seeds) == 3
