"""Whatever goes wrong with one neighbour is counted against it, and everything else goes on."""

import logging

import pytest
import trio
import trio.testing

from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.refusals import RefusalLog

FAILURES = (
    ValueError("an address"),
    KeyError("a name"),
    ConnectionError("a stream"),
    AssertionError(),
    ExceptionGroup(
        "inside", [RuntimeError("libp2p"), ExceptionGroup("deeper", [trio.BrokenResourceError()])]
    ),
)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_task_that_fails_ends_alone_and_is_counted(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise failure

    async def go_on(name: str) -> None:
        await trio.testing.wait_all_tasks_blocked()
        done.append(name)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger("test")))
            tasks.start_soon("mallory", fail)
            tasks.start_soon("ada", go_on, "ada")
            with tasks.at_the_risk_of("mallory"):
                raise failure

    trio.run(scenario)
    assert done == ["ada"]
    assert "mallory" in caplog.text


def test_a_task_that_is_cancelled_is_cancelled_and_nobody_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger("test")))
            tasks.start_soon("ada", trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
        with trio.move_on_after(0) as scope, tasks.at_the_risk_of("ada"):
            await trio.sleep_forever()
        assert scope.cancelled_caught

    trio.run(scenario)
    assert caplog.text == ""


def test_what_ends_the_process_is_nobodys_fault() -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger("test")))
            with tasks.at_the_risk_of("ada"):
                raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as raised:
        trio.run(scenario)
    assert raised.value.split(KeyboardInterrupt)[1] is None
