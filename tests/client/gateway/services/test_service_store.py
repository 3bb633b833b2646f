"""Services in the database, SQLite's and PostgreSQL's: one gateway has each, and every change is whole or not there."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope
from molink.client.gateway.accounts.database import Database, opened_database
from molink.client.gateway.accounts.errors import TokenUsed
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.usage_store import UsageCounts, UsageDay, UsageStore, day_of
from molink.client.gateway.nodes.node_store import NodeStore
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.service import (
    REMEMBERED_S,
    OperationKind,
    OperationState,
    Scaling,
    ServiceExists,
    ServiceSpecification,
    ServiceState,
    UnknownService,
)
from molink.client.gateway.services.service_store import ServiceStore

ASKED = ServiceSpecification(
    model="a/b'; DROP TABLE services; --",
    gpu="RTX 4090",
    regions=("DE", "\u202e"),
    parameters={"temperature": 0.5, "stop": ['"', "\\"]},
)


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Database]:
    async with opened_database(url, folder) as database:
        yield database


async def expire_leases(database: Database) -> None:
    """As if their gateways had not renewed them in time."""
    async with database.transaction() as connection:
        await connection.execute(text("UPDATE services SET owned_until_s = 1"))


@pytest.mark.anyio
async def test_a_service_goes_through_its_states_and_ends_with_its_keys(url: str, tmp_path: Path) -> None:
    async with opened(url, tmp_path) as database:
        services, operations, keys = ServiceStore(database), OperationStore(database), KeyStore(database)
        deploying = await services.deploy("poet", ASKED, "g1")
        [found] = await services.all()
        assert (found.specification, found.state, found.owner_id) == (ASKED, ServiceState.DEPLOYING, "g1")
        with pytest.raises(ServiceExists):
            await services.deploy("poet", ASKED, "g1")
        assert [one.id for one in await operations.all()] == [deploying.id]
        await services.deployed("poet", deploying.id)
        running = await services.get("poet")
        assert (running.state, running.running_since_s is None) == (ServiceState.RUNNING, False)
        assert (await operations.get(deploying.id)).state is OperationState.SUCCEEDED

        first, _ = await services.issue_key("poet", 3600.0)
        second, _ = await services.issue_key("poet", 0.0)
        assert (first.limits.models, second.limits.models) == (("poet",), ("poet",))
        ends = {key.id: key.expires_at_s for key in await keys.all()}
        assert (ends[first.id] or 0) <= time.time()
        assert ends[second.id] is None

        deleting = await services.begin_delete("poet")
        assert (await services.begin_delete("poet")).id == deleting.id
        with pytest.raises(UnknownService):
            await services.issue_key("poet", 0.0)
        await services.remove("poet", deploying.id, OperationState.FAILED, "late")  # is about what is over
        assert (await services.get("poet")).state is ServiceState.DELETING
        await services.remove("poet", deleting.id, OperationState.SUCCEEDED, "gone")
        assert await services.all() == ()
        assert all(key.fault(time.time()) is not None for key in await keys.all())
        assert (await operations.get(deleting.id)).state is OperationState.SUCCEEDED
        with pytest.raises(UnknownService):
            await services.begin_delete("poet")


@pytest.mark.anyio
async def test_one_gateway_has_a_service_until_it_gives_it_up_or_falls_silent(
    url: str, tmp_path: Path
) -> None:
    async with opened(url, tmp_path) as database:
        services = ServiceStore(database)
        await services.deploy("poet", ASKED, "g1")

        async def owner(gateway_id: str) -> str:
            [one] = await services.sync(gateway_id, {"poet": {"held": 1, "of": gateway_id}})
            return one.owner_id

        assert [await owner("g2"), await owner("g1")] == ["g1", "g1"]
        await expire_leases(database)
        owners = await asyncio.gather(*(owner(f"g{number}") for number in range(2, 8)))
        assert len(set(owners)) == 1
        [winner] = set(owners)
        assert (await services.get("poet")).observed == {"held": 1, "of": winner}
        await services.give_up(winner)
        assert await owner("g1") == "g1"


@pytest.mark.anyio
async def test_many_who_deploy_one_name_make_one_service_and_no_operation_beside_it(
    url: str, tmp_path: Path
) -> None:
    async with opened(url, tmp_path) as database:
        services = ServiceStore(database)
        tried = await asyncio.gather(
            *(services.deploy("poet", ASKED, f"g{number}") for number in range(6)), return_exceptions=True
        )
        assert sum(isinstance(one, ServiceExists) for one in tried) == 5
        assert len(await OperationStore(database).all()) == 1


@pytest.mark.anyio
async def test_an_operation_that_has_ended_changes_no_more(url: str, tmp_path: Path) -> None:
    async with opened(url, tmp_path) as database:
        operations = OperationStore(database)
        begun = await operations.begin(OperationKind.DRAIN, "12D3")
        await operations.tell(begun.id, "x" * 1000 + "\x1b[31m", 0.5)
        told = await operations.get(begun.id)
        assert (told.progress, len(told.message), told.state) == (0.5, 500, OperationState.RUNNING)
        assert (await operations.cancel(begun.id)).cancels
        await operations.end(begun.id, OperationState.CANCELLED, "not done")
        await operations.tell(begun.id, "late", 0.9)
        await operations.end(begun.id, OperationState.SUCCEEDED, "late")
        ended = await operations.get(begun.id)
        assert (ended.state, ended.message, ended.progress) == (OperationState.CANCELLED, "not done", 0.5)
        assert await operations.running(OperationKind.DRAIN) == ()


@pytest.mark.anyio
async def test_usage_of_an_earlier_service_of_that_name_does_not_count(url: str, tmp_path: Path) -> None:
    async with opened(url, tmp_path) as database:
        services, usage = ServiceStore(database), UsageStore(database)
        day = UsageDay(day_of(time.time()), "", "poet")
        await usage.add({day: UsageCounts(3, 10, 0, 100)})
        await services.deploy("poet", ASKED, "g1")
        assert await services.usage("poet") == (0, 0)
        await usage.add({day: UsageCounts(1, 10, 0, 7)})
        assert await services.usage("poet") == (1, 7)
        assert await services.usage("nobody") == (0, 0)


@pytest.mark.anyio
async def test_a_token_is_one_machines_and_goes_with_it(url: str, tmp_path: Path) -> None:
    async with opened(url, tmp_path) as database:
        nodes, keys = NodeStore(database), KeyStore(database)
        key, _ = await keys.create("attic", scopes=frozenset({KeyScope.ACCESS}), limits=KeyLimits())
        node = await nodes.register("12D3a", key.id, "g1", {"hostname": "'; --"})
        again = await nodes.register("12D3a", key.id, "g2", {"hostname": "attic"})
        assert again == replace(
            node, operator_id="g2", descriptor={"hostname": "attic"}, registered_at_s=again.registered_at_s
        )
        with pytest.raises(TokenUsed):
            await nodes.register("12D3b", key.id, "g1", {})
        assert await nodes.all() == (again,)
        operation = await OperationStore(database).begin(OperationKind.EXIT, "12D3a")
        await nodes.remove("12D3a", operation.id, "gone")
        assert await nodes.find("12D3a") is None
        assert [one.fault(time.time()) is None for one in await keys.all()] == [False]


@pytest.mark.anyio
async def test_a_machine_that_has_a_token_is_registered_with_no_other_one_until_that_has_ended(
    url: str, tmp_path: Path
) -> None:
    async with opened(url, tmp_path) as database:
        nodes, keys = NodeStore(database), KeyStore(database)
        own, other, later = [
            (await keys.create(name, scopes=frozenset({KeyScope.ACCESS}), limits=KeyLimits()))[0].id
            for name in ("attic", "mallory", "attic again")
        ]
        node = await nodes.register("12D3a", own, "g1", {"hostname": "attic"})
        with pytest.raises(TokenUsed, match="with another token"):
            await nodes.register("12D3a", other, "g1", {"hostname": "mallory"})
        assert await nodes.all() == (node,)
        with pytest.raises(TokenUsed, match="another machine"):  # its token is still its own
            await nodes.register("12D3b", own, "g1", {})
        await keys.revoke(own)
        assert (await nodes.register("12D3a", later, "g1", {})).key_id == later
        await nodes.register("12D3b", other, "g1", {})


@pytest.mark.anyio
async def test_of_two_tokens_that_register_one_machine_at_once_one_is_refused(
    url: str, tmp_path: Path
) -> None:
    async with opened(url, tmp_path) as database:
        nodes, keys = NodeStore(database), KeyStore(database)
        tokens = [
            (await keys.create(name, scopes=frozenset({KeyScope.ACCESS}), limits=KeyLimits()))[0].id
            for name in ("attic", "mallory")
        ]
        outcomes = await asyncio.gather(
            *(nodes.register("12D3a", token, "g1", {}) for token in tokens), return_exceptions=True
        )
        registered = [one for one in outcomes if not isinstance(one, BaseException)]
        assert [type(one) for one in outcomes if isinstance(one, BaseException)] == [TokenUsed]
        assert await nodes.all() == tuple(registered)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 12)), max_size=30),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_a_service_scales_to_the_most_that_was_wanted_of_late(
    steps: list[tuple[float, int]], minimum: int, more: int
) -> None:
    scaling, now_s, demands = Scaling(minimum, minimum + more), 0.0, list[tuple[float, int]]()
    for wait_s, demand in steps:
        now_s += wait_s
        demands.append((now_s, demand))
        most = max(one for at_s, one in demands if now_s - at_s < REMEMBERED_S)
        assert scaling.wanted(now_s, demand) == min(minimum + more, max(minimum, most))
