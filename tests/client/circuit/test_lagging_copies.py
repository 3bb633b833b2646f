"""A copy that its standby does not keep up with comes in another form, or stays behind and is said to be."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.generating import Generating, rest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until

from molink.client.circuit import session as session_module
from molink.client.circuit import standbys as standbys_module
from molink.client.circuit.route_selector import StandbyChoice
from molink.client.epochs.copy_lag import BEHIND_TOKENS, CopyLag
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1))
def test_a_copy_does_not_catch_up_if_it_lacks_many_tokens_and_no_fewer_than_before(
    looks: list[tuple[int, int]],
) -> None:
    lag, before = CopyLag(), None
    for history, kept in looks:
        lacking = max(0, history - kept)
        is_late = lag.record(history, kept)
        assert is_late == (before is not None and lacking > BEHIND_TOKENS and lacking >= before)
        assert lag.lacking_tokens == lacking
        before = lacking


@pytest.mark.parametrize("is_carried", [True, False], ids=["the line carries it", "it does not"])
@asynchronous
async def test_a_standby_without_time_gets_keys_and_values_if_the_line_carries_them(
    monkeypatch: pytest.MonkeyPatch, is_carried: bool
) -> None:
    async def partners(
        self: StandbyChoice,
        route: Route,
        descriptor: pb.SessionDescriptor,
        hops: Sequence[int],
        taken: frozenset[str],
        without_time: frozenset[str],
    ) -> Mapping[int, tuple[PeerView, CopyForm]]:
        spare = run.spare.view
        if 1 not in hops or spare.peer_id in taken:
            return {}
        if spare.peer_id not in without_time:
            return {1: (spare, CopyForm.INPUTS)}
        asked.append(hops)
        return {1: (spare, CopyForm.KEYS_AND_VALUES)} if is_carried else {}

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(StandbyChoice, "partners", partners)
    asked: list[Sequence[int]] = []
    run = Generating(spare=True, max_new_tokens=400)
    run.spare.held_tokens = 1
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    await until(lambda: bool(run.spare.reserved))
    assert run.spare.reserved[-1].hops[1].standby_form == pb.INPUTS
    first, last = 3, 3 + 2 * BEHIND_TOKENS
    for position in range(first, last):
        run.token(position, 30)
    await until(lambda: bool(asked))
    if is_carried:
        await until(lambda: run.spare.reserved[-1].hops[1].standby_form == pb.KEYS_AND_VALUES)
        assert run.high.reserved[-1].hops[1].standby_form == pb.KEYS_AND_VALUES
    run.token(last, 1, finish=pb.STOP)
    await soon(got)
    (copy,) = run.session.log.standbys.values()
    assert copy.peer_id == run.spare.peer_id
    assert copy.form == ("keys_and_values" if is_carried else "inputs")
    if not is_carried:
        assert copy.behind_tokens is not None
        assert copy.behind_tokens > BEHIND_TOKENS
