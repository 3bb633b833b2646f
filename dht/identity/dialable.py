"""Which of the addresses that a stranger names may be dialled from here.

Public ones may. An address of a private range means another machine in every network, so it is dialled only where the
swarm itself is in such a range: else anyone's announcement would have volunteers knock at the doors of their own
network. The predicates are pure; only `dialled_as` asks the resolver.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from molink.shards.address_ranges import AddressRange, range_of

Ranges = frozenset[AddressRange]

ANYWHERE: Final[Ranges] = frozenset(AddressRange) - {AddressRange.NOBODY}
"""For who chooses the addresses itself."""
RESOLVE_TIMEOUT_S: Final = 5.0
MOST_ASKED: Final = 4
"""Names that this process asks the resolver for at once."""
_asking: Final = threading.BoundedSemaphore(MOST_ASKED)

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""The IP addresses of a host name. Raises OSError, UnicodeError or TimeoutError."""


def own_ranges(hosts: Iterable[str]) -> Ranges:
    """Returns the ranges of the swarm: what is public, and the ranges of these hosts, which are this peer's own
    addresses and those at which its owner told it to join. IP addresses, host:port, or multiaddresses; names say
    nothing."""
    found = {range_of(host_of(host)) for host in hosts}
    return frozenset({AddressRange.PUBLIC, *(one for one in found if one is not None)}) - {
        AddressRange.NOBODY
    }


def may_dial(address: str, own: Ranges) -> bool:
    """Whether an address (host:port, a host, or a multiaddress) is in one of the swarm's own ranges.

    A name is in none: whoever dials it asks what it stands for, and dials that (`dialled_as`).
    """
    return range_of(host_of(address)) in own


def host_of(address: str) -> str:
    """The host of host:port, [host]:port, a bare host or a multiaddress, as it stands there."""
    if address.startswith("/"):
        parts = address.split("/")
        return parts[2] if len(parts) > 2 else ""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") != 1 else address.partition(":")[0]


async def resolve(name: str) -> Collection[str]:
    """The IP addresses of a host name, as this machine's resolver has them. Raises OSError or UnicodeError, and
    TimeoutError after RESOLVE_TIMEOUT_S.

    In a thread of its own that nobody waits for: a name whose servers are silent keeps the resolver for long.
    """
    if not _asking.acquire(blocking=False):
        raise OSError("the resolver has enough to do")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Collection[str]] = loop.create_future()

    def settle(found: Collection[str] | OSError | UnicodeError) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: Collection[str] | OSError | UnicodeError
        try:
            records = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(one[4][0]) for one in records))
        except (OSError, UnicodeError) as error:
            found = error
        finally:
            _asking.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        return await answer


async def dialled_as(address: str, own: Ranges, resolver: Resolve = resolve) -> tuple[str, ...]:
    """The host:port of IP addresses at which host:port may be dialled; () where it may not, or is nobody's name.

    What is dialled must be what was checked, so a name is replaced by the addresses that it has now.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    if range_of(host) is not None:
        return (address,) if may_dial(address, own) else ()
    try:
        found = await resolver(host)
    except (OSError, UnicodeError, TimeoutError):
        return ()
    return tuple(
        f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found if range_of(one) in own
    )


async def swarm_ranges(hosts: Iterable[str]) -> Ranges:
    """`own_ranges` of these hosts, of which names stand for the addresses that they have now."""
    known: list[str] = []
    for host in hosts:
        bare = host_of(host)
        if range_of(bare) is not None:
            known.append(bare)
            continue
        try:
            known += await resolve(bare)
        except (OSError, UnicodeError, TimeoutError):
            continue
    return own_ranges(known)
