"""Questions to relays about this machine: where they see it, whether they can dial it, and what kind of NAT it is
behind."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from molink.dht.records.records import RelayAt
from molink.peer.reach.reachability import RelayAnswer
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.punching import observe_port
from molink.peer.wire.reach.relay_client import RelayUser, open_session

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Doorstep:
    """What relays look for when they dial back: a port of this host, and the certificate behind it."""

    port: int
    certificate_hash: bytes


async def ask_relay(relay: RelayAt, user: RelayUser, sought: Doorstep | None) -> RelayAnswer | None:
    """What a relay says; None: nothing. Without `sought` it is only asked where it sees this machine."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    try:
        session = await open_session(relay, user)
    except (RelayError, OSError) as error:
        _log.debug("the relay %s says nothing: %s", relay.peer_id, error)
        return None
    took_s, found = clock() - began_s, None
    try:
        if sought is not None:
            found = await session.dialled_back(sought.port, sought.certificate_hash)
    except RelayError as error:
        _log.debug("the relay %s does not dial back: %s", relay.peer_id, error)
    finally:
        session.close()
    return RelayAnswer(relay, took_s, session.observed, found)


async def is_hard_nat(relays: Sequence[RelayAt], user: RelayUser) -> bool | None:
    """Whether this machine's NAT gives each destination another port; None: fewer than two relays can say."""
    if len(relays) < 2:
        return None
    with suppress(RelayError, OSError):
        observed = await observe_port(relays, user)
        observed.close()
        return observed.hard
    return None
