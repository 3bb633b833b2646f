"""Second way of a silent link: another connection is dialled beside the present one, and used if that stays silent.

A NAT that has forgotten a connection, or a relay that hangs, says nothing: packets vanish. So the end that dialled does
not wait until the link is given up, but knocks again meanwhile, over whichever way answers first.
"""

import asyncio
from collections.abc import Awaitable, Callable

from molink.peer.wire.link.dialled_connection import Knock
from molink.peer.wire.link.link import Link, LinkError, Resumed
from molink.peer.wire.protocol import molink_pb2 as pb

KNOCK_AGAIN_S = 1.0
"""After one that failed, or that the first connection has overtaken."""


async def keep_second_way(link: Link, knock: Callable[[], Awaitable[Knock]]) -> None:
    """Minds a link that this end has dialled, until cancelled. `knock` raises LinkError."""
    while True:
        if (wait_s := link.seems_dead_in_s()) > 0.0:
            await asyncio.sleep(wait_s)
            continue
        try:
            found = await knock()
        except LinkError:
            await asyncio.sleep(KNOCK_AGAIN_S)
            continue
        if link.seems_dead_in_s() > 0.0 or not link.move(resume_over(found)):
            await found.connection.close()
        await asyncio.sleep(KNOCK_AGAIN_S)


def resume_over(knock: Knock) -> Callable[[Link], Awaitable[Resumed]]:
    """The last step, a round trip: taken once the present connection is let go of."""

    async def resume(moved: Link) -> Resumed:
        return await knock.finish(pb.Proof(link_id=moved.link_id, resumes=True, received=moved.received))

    return resume
