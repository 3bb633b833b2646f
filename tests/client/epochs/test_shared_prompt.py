"""Generations of one prompt: one computes it, the others begin behind it together, and nobody waits for who is gone."""

import asyncio
from contextlib import ExitStack
from typing import cast

from support.links.data_plane import asynchronous

from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.shared_prompt import MOST_WAIT_S, PromptTurn, SharedPrompt
from molink.routing import Route

WITHIN_S = 120.0
A_MOMENT_S = 0.01


def planned() -> PlannedRoute:
    return PlannedRoute(cast("Route", object()), {})


@asynchronous
async def test_others_wait_for_the_firsts_token_and_begin_on_its_circuit() -> None:
    shared = SharedPrompt()
    with PromptTurn(shared) as first, PromptTurn(shared) as second:
        async with asyncio.timeout(WITHIN_S):
            await first.wait()
            assert first.computed_on is None
            waiting = asyncio.create_task(second.wait())
            circuit = planned()
            await first.stand(circuit)
            await asyncio.wait({waiting}, timeout=A_MOMENT_S)
            assert not waiting.done()
            first.note_token()
            await waiting
        assert second.computed_on is circuit
        assert first.computed_on is None


@asynchronous
async def test_others_go_on_by_themselves_if_the_first_ends_without_a_circuit() -> None:
    shared = SharedPrompt()
    with ExitStack() as leaving, ExitStack() as staying:
        leaving.enter_context(PromptTurn(shared))
        second = staying.enter_context(PromptTurn(shared))
        leaving.close()
        async with asyncio.timeout(WITHIN_S):
            await second.wait()
        assert second.computed_on is None


@asynchronous
async def test_those_whose_circuits_stand_begin_when_all_do_or_have_gone() -> None:
    shared = SharedPrompt()
    with PromptTurn(shared) as first, PromptTurn(shared) as second:
        await first.stand(planned())
        first.note_token()
        with ExitStack() as leaving, PromptTurn(shared) as third:
            fourth = leaving.enter_context(PromptTurn(shared))
            standing = [asyncio.create_task(one.stand(planned())) for one in (second, third)]
            await asyncio.wait(standing, timeout=A_MOMENT_S)
            assert not any(one.done() for one in standing)
            assert fourth.computed_on is not None
            leaving.close()
            async with asyncio.timeout(WITHIN_S):
                await asyncio.gather(*standing)


@asynchronous
async def test_one_whose_circuit_does_not_stand_is_not_waited_for_long() -> None:
    shared = SharedPrompt()
    with PromptTurn(shared), PromptTurn(shared) as second, PromptTurn(shared):
        async with asyncio.timeout(MOST_WAIT_S + WITHIN_S):
            await second.stand(planned())


@asynchronous
async def test_a_circuit_after_a_loss_begins_at_once() -> None:
    shared = SharedPrompt()
    with PromptTurn(shared) as first, PromptTurn(shared) as second:
        await second.stand(planned())
        with PromptTurn(shared):
            async with asyncio.timeout(WITHIN_S):
                await first.stand(planned())
                await second.stand(planned())
