"""Responses that are kept for a while, so that a later request can go on from one by its id.

Only where the gateway's operator said for how long (`--keep-responses`): what is kept is what people wrote. Each key
has its own; keys of one rotation are one owner.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import delete, select

from molink.client.errors import InvalidRequest
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.errors import UnknownResponse
from molink.client.gateway.accounts.gatekeeper import Caller
from molink.client.gateway.accounts.schema import KEPT_RESPONSES
from molink.client.gateway.apis.response_answers import Keep, assistant_message
from molink.client.gateway.apis.responses import ResponseRequest

MOST_OF_ONE: Final = 1000
"""Responses that are kept of one owner; the oldest go before newer ones."""
MAX_KEPT_BYTES: Final = 2**22
"""Of one of them: the conversation so far, and the answer."""


class ResponseTooLong(InvalidRequest):
    """The conversation is longer than what is kept."""

    def __init__(self) -> None:
        super().__init__(
            f"a conversation of more than {MAX_KEPT_BYTES} bytes is not kept: send store=false", "store"
        )


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """Response that was kept."""

    document: dict[str, Any]
    """As it was answered."""
    messages: tuple[dict[str, Any], ...]
    """The conversation up to its end, as chat templates take it, without instructions."""


class KeptResponses:
    """Responses in the gateway's database, for all gateways on it."""

    def __init__(self, database: Database, hours: float) -> None:
        self._database = database
        self._keeps_s = 3600 * hours

    async def keep(
        self, caller: Caller, document: dict[str, Any], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Keeps a response, and drops what has had its time.

        Raises:
            ResponseTooLong: it is.
            AccountsUnavailable: the database does not answer.
        """
        kept = json.dumps({"document": document, "messages": list(messages)}, ensure_ascii=False)
        if len(kept.encode(errors="replace")) > MAX_KEPT_BYTES:
            raise ResponseTooLong
        table, owner, now_s = KEPT_RESPONSES, _owner(caller), self._database.now_s()
        values = {"id": document["id"], "owner": owner, "kept": kept}
        older = (
            select(table.c.id)
            .where(table.c.owner == owner)
            .order_by(table.c.expires_at_s.desc(), table.c.id)
            .offset(MOST_OF_ONE)
            .limit(MOST_OF_ONE)
        )
        async with self._database.transaction() as connection:
            await connection.execute(delete(table).where(table.c.expires_at_s <= now_s))
            await connection.execute(table.insert().values(expires_at_s=now_s + self._keeps_s, **values))
            if old := (await connection.execute(older)).scalars().all():
                await connection.execute(delete(table).where(table.c.id.in_(old)))

    async def get(self, caller: Caller, response_id: str) -> KeptResponse:
        """Returns a response of the caller's.

        Raises:
            UnknownResponse: there is none of that id.
            AccountsUnavailable: the database does not answer.
        """
        table = KEPT_RESPONSES
        wanted = select(table.c.kept).where(
            table.c.id == response_id,
            table.c.owner == _owner(caller),
            table.c.expires_at_s > self._database.now_s(),
        )
        async with self._database.transaction() as connection:
            kept = (await connection.execute(wanted)).scalar_one_or_none()
        if kept is None:
            raise UnknownResponse(response_id)
        read = json.loads(kept)
        return KeptResponse(read["document"], tuple(read["messages"]))

    async def drop(self, caller: Caller, response_id: str) -> None:
        """Keeps a response no longer. Raises as `get`."""
        table = KEPT_RESPONSES
        one = delete(table).where(table.c.id == response_id, table.c.owner == _owner(caller))
        async with self._database.transaction() as connection:
            dropped = await connection.execute(one)
        if not dropped.rowcount:
            raise UnknownResponse(response_id)


async def continued(
    kept: KeptResponses | None, asked: ResponseRequest, caller: Caller
) -> tuple[Sequence[dict[str, Any]], Keep | None]:
    """Returns the conversation that a request goes on from, and what keeps its answer, as far as anything is kept.

    Raises:
        InvalidRequest: something would have to be kept, or have been, and nothing is.
        UnknownResponse, AccountsUnavailable: as `get`.
    """
    if kept is None:
        asked.require_nothing_kept()
        return (), None
    before: Sequence[dict[str, Any]] = ()
    if asked.previous_response_id is not None:
        before = (await kept.get(caller, asked.previous_response_id)).messages
    if asked.store is False:
        return before, None

    async def keep(response: dict[str, Any]) -> None:
        await kept.keep(caller, response, [*asked.conversation(before), assistant_message(response)])

    return before, keep


def _owner(caller: Caller) -> str:
    return "" if caller.key is None else caller.key.quota_id
