"""What partners say of their work is known as long as they are partners."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from support.links.data_plane import SPEC, asynchronous

from molink.peer.redundancy.pair_roles import Roles
from molink.peer.serving.holder_roles import MOST_SESSIONS, HolderRoles
from molink.peer.wire.protocol import molink_pb2 as pb


class Sessions:
    """As a table of sessions, each of which has the standby of that name."""

    def __init__(self, *standbys: str) -> None:
        self.present = [
            SimpleNamespace(
                key=number,
                standby_peer_id=name,
                ended=False,
                cache=None,
                plan=SimpleNamespace(prompt_tokens=5),
            )
            for number, name in enumerate(standbys)
        ]

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self.present)


def partners_after_a_look(roles: HolderRoles) -> set[str]:
    roles._look(0.0)  # noqa: SLF001 - as `run` does now and then
    return set(roles._partners)  # noqa: SLF001 - nobody else asks for them


@asynchronous
async def test_a_peer_that_is_no_session_s_standby_any_more_is_forgotten() -> None:
    """A client may name whomever it likes, one after the other."""
    sessions, sender = Sessions("stays", "goes", "is replaced"), SimpleNamespace()
    copying: Any = SimpleNamespace(sender=sender, keeper=SimpleNamespace(), spec=SPEC)
    table: Any = sessions
    links: Any = None
    roles = HolderRoles(Roles.PAIRS, table, copying, links, None)
    said = pb.CopiesKept(decoding_tokens=range(MOST_SESSIONS))
    for name in ("stays", "goes", "is replaced", "a stranger"):
        sender.told_kept(name, said)
    assert partners_after_a_look(roles) == {"stays", "goes", "is replaced"}
    del sessions.present[1]
    sessions.present[1].standby_peer_id = ""
    assert partners_after_a_look(roles) == {"stays"}
