"""Node administration: machines register, tell their operator how they are, are drained, and exit in three stages.

A gateway asks volunteers, as any client; it commands only peers that say so (`molink-peer join --operator ID`), by
orders over its own link to them. Whatever it began goes on after a restart: each order may be given twice.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from molink.client.errors import InvalidRequest, SwarmError, SwarmUnavailable
from molink.client.gateway.accounts.errors import AccountsUnavailable, KeyFault, KeyRefused
from molink.client.gateway.accounts.gatekeeper import Caller
from molink.client.gateway.error_handlers import report
from molink.client.gateway.nodes.node_store import Node, NodeStore
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.service import (
    LongRunningOperation,
    OperationKind,
    OperationState,
    UnknownService,
)

DRAINS_WITHIN_S: Final = 35.0
"""A peer that is drained gives its sessions 30 s."""
GOES_WITHIN_S: Final = 60.0
SERVES_WITHIN_S: Final = 3600.0
"""A model may have to be fetched first."""
LOOKS_EVERY_S: Final = 0.5
RETRIES_AFTER_S: Final = 3.0
_KINDS: Final = (OperationKind.DRAIN, OperationKind.EXIT, OperationKind.SERVE)


class CommandsPeers(Protocol):
    """A client whose orders some peers take."""

    async def order(self, peer_id: str, action: str, model: str = "") -> Mapping[str, Any]: ...

    def member_addresses(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class AccessTerms:
    """Terms on which machines register: whose orders they take, and the way into the swarm."""

    operator_id: str
    """The identity of this gateway."""
    invites: tuple[str, ...] = ()
    """Addresses of peers that its operator names, before those that it knows itself."""
    swarm_key: str | None = None
    """Of a private swarm: the line of its key file."""
    patience_s: float = 5.0
    """A node that does not answer is gone after so long: who has just joined a swarm does not know all of its peers."""


class NodeAdmin:
    """Administration of nodes. Open between `__aenter__` and `__aexit__`."""

    def __init__(
        self,
        commander: CommandsPeers,
        store: NodeStore,
        operations: OperationStore,
        terms: AccessTerms,
        needed_model: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`needed_model`: what machines without a model of their own should serve; None: whatever they choose."""
        self._needed_model = needed_model
        self._commander = commander
        self._store = store
        self._operations = operations
        self._terms = terms
        self._working: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Goes on with what this gateway began before it was started again."""
        with suppress(AccountsUnavailable):
            for operation in await self._operations.running(*_KINDS):
                node = await self._store.find(operation.subject)
                if node is None or node.operator_id == self._terms.operator_id:
                    self._begin(operation)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)

    @property
    def operator_id(self) -> str:
        """Whose orders nodes take."""
        return self._terms.operator_id

    async def register(self, caller: Caller, peer_id: str, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Registers the machine whose token the caller has shown; returns what it needs to join, and the model that it
        is to serve if its owner does not say: the token's, or else the one that services lack most.

        Raises:
            KeyRefused: there was no token.
            TokenUsed: it is another machine's, or this machine has another one.
        """
        if caller.key is None:
            raise KeyRefused(KeyFault.MISSING)
        terms = self._terms
        await self._store.register(peer_id, caller.key.id, terms.operator_id, descriptor)
        return {
            "object": "node",
            "peer_id": peer_id,
            "operator": terms.operator_id,
            "initial_peers": list(dict.fromkeys((*terms.invites, *self._commander.member_addresses()))),
            "swarm_key": terms.swarm_key,
            "model": next(iter(caller.key.limits.models), None) or self._needed_model(),
        }

    async def all(self) -> list[dict[str, Any]]:
        """Returns what nodes said when they registered, JSON-ready."""
        return [_describe(node) for node in await self._store.all()]

    async def status(self, peer_id: str) -> dict[str, Any]:
        """Returns how a node is, as it says itself, JSON-ready; `status` is null where it does not answer. One that has
        not registered is waited for: it may have joined a moment ago, and not be known here.

        Raises:
            UnknownService: it neither registered nor takes orders from here.
        """
        node = await self._store.find(peer_id)
        ask = self._order if node is None else self._commander.order
        try:
            told, reason = await ask(peer_id, "status"), None
        except SwarmError as error:
            told, reason = None, str(error)
        if node is None and told is None:
            raise _unknown(peer_id, reason or "it says nothing")
        known = {"object": "node", "peer_id": peer_id} if node is None else _describe(node)
        return known | {"reachable": told is not None, "reason": reason, "status": told}

    async def drain(self, peer_id: str) -> LongRunningOperation:
        """Begins to drain a node: it takes nothing new, and its sessions go over to others or end.

        Raises:
            UnknownService: as `status`.
        """
        await self.status(peer_id)
        return await self._begun(OperationKind.DRAIN, peer_id)

    async def exit(self, peer_id: str) -> LongRunningOperation:
        """Begins to have a node exit: (1) it is drained, (2) it frees its leases and weights, and leaves, (3) it is no
        longer registered, and its token is revoked.

        Raises:
            UnknownService: as `status`.
        """
        await self.status(peer_id)
        return await self._begun(OperationKind.EXIT, peer_id)

    async def serve(self, peer_id: str, model: str) -> LongRunningOperation:
        """Has a node serve another model: it is drained, leaves, and joins with that one; or goes back to its own if it
        cannot. That cannot be cancelled.

        Raises:
            UnknownService: as `status`.
            InvalidRequest: the node takes no such order: the model has no name that others may give.
            SwarmUnavailable: it cannot be reached, or is leaving.
        """
        await self.status(peer_id)
        await self._order(peer_id, "serve", model)
        return await self._begun(OperationKind.SERVE, peer_id)

    async def _begun(self, kind: OperationKind, peer_id: str) -> LongRunningOperation:
        """Returns the operation of that kind that is under way, or begins one."""
        for operation in await self._operations.running(kind):
            if operation.subject == peer_id:
                return operation
        operation = await self._operations.begin(kind, peer_id)
        self._begin(operation)
        return operation

    def _begin(self, operation: LongRunningOperation) -> None:
        task = asyncio.create_task(self._work(operation), name=f"{operation.kind} {operation.subject}")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _work(self, operation: LongRunningOperation) -> None:
        while True:
            try:
                await self._carry_out(operation)
                return
            except AccountsUnavailable:
                await asyncio.sleep(RETRIES_AFTER_S)
            except Exception as error:  # noqa: BLE001 - the boundary of an operation: it must not stay under way
                report(error)
                with suppress(AccountsUnavailable):
                    await self._operations.end(
                        operation.id, OperationState.FAILED, "The gateway failed; its log says where."
                    )
                return

    async def _carry_out(self, operation: LongRunningOperation) -> None:
        peer_id, operation_id = operation.subject, operation.id
        is_exit = operation.kind is OperationKind.EXIT
        try:
            if operation.kind is OperationKind.SERVE:
                await self._see_it_serve(operation)
                return
            if not await self._drained(operation, 0.5 if is_exit else 1.0):
                return
            if is_exit:
                await self._operations.tell(operation_id, "(2) It frees leases and weights, and leaves.", 0.6)
                await self._order(peer_id, "leave")
        except InvalidRequest as error:
            await self._operations.end(operation_id, OperationState.FAILED, str(error))
            return
        except SwarmUnavailable as error:
            if not is_exit:
                await self._operations.end(operation_id, OperationState.FAILED, str(error))
                return
        if not is_exit:
            await self._operations.end(
                operation_id, OperationState.SUCCEEDED, "It is drained, and takes nothing new."
            )
        elif await self._is_gone(peer_id):
            await self._store.remove(
                peer_id, operation_id, "(3) It is gone, no longer registered, and its token is revoked."
            )
        else:
            message = f"It has not left within {GOES_WITHIN_S:g} s, and stays registered."
            await self._operations.end(operation_id, OperationState.FAILED, message)

    async def _drained(self, operation: LongRunningOperation, part: float) -> bool:
        """Drains a node, and waits until its sessions have ended or had their time. False: it was cancelled."""
        peer_id, clock = operation.subject, asyncio.get_running_loop().time
        until_s = clock() + DRAINS_WITHIN_S
        told = await self._order(peer_id, "drain")
        first = max(1, int(told.get("sessions", 0)))
        while (sessions := int(told.get("sessions", 0))) and clock() < until_s:
            done = part * (1 - min(1.0, sessions / first))
            await self._operations.tell(operation.id, f"(1) {_handed_over(sessions)}", done)
            if (await self._operations.get(operation.id)).cancels:
                await self._order(peer_id, "resume")
                await self._operations.end(operation.id, OperationState.CANCELLED, "It takes sessions again.")
                return False
            await asyncio.sleep(LOOKS_EVERY_S)
            told = await self._order(peer_id, "status")
        return True

    async def _see_it_serve(self, operation: LongRunningOperation) -> None:
        """Waits until a node that was ordered another model serves it, or says why not."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + SERVES_WITHIN_S
        ended, message = OperationState.RUNNING, operation.message
        while clock() < until_s:
            told: Mapping[str, Any] = {}
            with suppress(SwarmUnavailable):
                told = await self._commander.order(operation.subject, "status")
            if told and not told.get("serves_next"):
                reason = told.get("not_served")
                ended = OperationState.FAILED if reason else OperationState.SUCCEEDED
                message = str(reason or f"It serves {told.get('model')}.")
                break
            sessions = told.get("sessions", 0)
            step = f"(1) {_handed_over(sessions)}" if told else "(2) It loads the model."
            if step != message:
                await self._operations.tell(operation.id, step, 0.1 if told else 0.5)
            message = step
            await asyncio.sleep(LOOKS_EVERY_S)
        if ended is OperationState.RUNNING:
            ended, message = OperationState.FAILED, f"It has not come back within {SERVES_WITHIN_S:g} s."
        await self._operations.end(operation.id, ended, message)

    async def _order(self, peer_id: str, action: str, model: str = "") -> Mapping[str, Any]:
        """As the commander's, tried again while the node does not answer, as long as that may mean nothing."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._terms.patience_s
        while True:
            try:
                return await self._commander.order(peer_id, action, model)
            except SwarmUnavailable:
                if clock() >= until_s:
                    raise
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _is_gone(self, peer_id: str) -> bool:
        """Whether a node that was told to leave has done so, or does so soon."""
        clock = asyncio.get_running_loop().time
        began_s = answered_s = clock()
        while clock() - began_s < GOES_WITHIN_S:
            try:
                await self._commander.order(peer_id, "status")
                answered_s = clock()
            except SwarmUnavailable as error:
                if error.busy:
                    answered_s = clock()
                elif clock() - answered_s >= self._terms.patience_s:
                    return True
            await asyncio.sleep(LOOKS_EVERY_S)
        return False


def _describe(node: Node) -> dict[str, Any]:
    return {
        "object": "node",
        "peer_id": node.peer_id,
        "token_id": node.key_id,
        "operator": node.operator_id,
        "registered_at": round(node.registered_at_s, 3),
        "descriptor": dict(node.descriptor),
    }


def _unknown(peer_id: str, reason: str) -> UnknownService:
    return UnknownService(
        f"No node {peer_id[:100]!r} has registered here, or takes this gateway's orders: {reason}. One that has just "
        "joined is known within some seconds: try again then."
    )


def _handed_over(sessions: int) -> str:
    return f"{sessions} session{' is' if sessions == 1 else 's are'} handed over, or end{'s' if sessions == 1 else ''}."
