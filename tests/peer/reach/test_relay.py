"""A relay on loopback: joins who proved themselves, refuses the rest, and stays within its limits."""

import asyncio
import secrets
import select
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.links.data_plane import End, asynchronous, soon, until

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import RelayAt
from molink.peer.reach.relay import Relay
from molink.peer.reach.relay_limits import RelayLimits
from molink.peer.reach.stays import Stays
from molink.peer.wire.link.certificate import certificate_hash, new_certificate
from molink.peer.wire.reach import splice
from molink.peer.wire.reach.packets import (
    Challenge,
    Invite,
    Joined,
    JoinRequest,
    Packet,
    ReachRequest,
    RelayError,
    RelayRefusal,
    Stay,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_client import RelaySession, RelayUser, open_session
from molink.peer.wire.reach.relay_proof import prove_user
from molink.peer.wire.reach.splice import Splices
from molink.peer.wire.reach.ways import LocalTarget, Opened, Relayed, Reversed


def user() -> RelayUser:
    return RelayUser(Identity.generate(), None)


class Lab:
    """A relay, an echo port, and a peer that stays at the relay and serves the echo port over it."""

    def __init__(self, limits: RelayLimits | None = None, swarm_key: SwarmKey | None = None) -> None:
        self.identity = Identity.generate()
        self.relay = Relay("127.0.0.1", 0, self.identity, swarm_key, limits)
        self.home = RelayUser(Identity.generate(), swarm_key)
        self.relays: dict[str, RelayAt] = {}
        self._stack = AsyncExitStack()

    @property
    def at(self) -> RelayAt:
        return RelayAt(self.identity.peer_id, f"127.0.0.1:{self.relay.port}")

    async def __aenter__(self) -> "Lab":
        await self._stack.enter_async_context(self.relay)
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        self._stack.callback(echo.close)
        port = echo.sockets[0].getsockname()[1]
        self.stays = Stays(self.home, ("127.0.0.1", port), self.relays.get)
        await self._stack.enter_async_context(self.stays)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def invited_by(self, asker: "Lab") -> Opened:
        """What opens between the peer that stays here and one that is a relay itself, which has it invited."""
        await self.stay()
        self.relays[asker.identity.peer_id] = asker.at
        me = RelayUser(asker.identity, None)
        return await soon(Reversed(self.home.identity.peer_id, self.at, me, asker.relay.expect).open())

    async def stay(self) -> None:
        self.stays.keep((self.at,))
        await until(lambda: self.home.identity.peer_id in self.relay.stays)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RelaySession]:
    """The sessions that stays open."""
    sessions: list[RelaySession] = []

    async def kept(relay: RelayAt, own: RelayUser) -> RelaySession:
        sessions.append(await open_session(relay, own))
        return sessions[-1]

    monkeypatch.setattr("molink.peer.reach.stays.open_session", kept)
    return sessions


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def echoed(connection: socket.socket, data: bytes) -> bytes:
    """What comes back of `data`, to the end of the stream."""
    reader, writer = await asyncio.open_connection(sock=connection)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.ensure_future(send())
    back = await reader.read(-1)
    await sending
    writer.close()
    return back


@asynchronous
async def test_bytes_go_through_a_relay_and_back_and_ends_go_with_them() -> None:
    async with Lab(RelayLimits(mbps=1000)) as lab:
        await lab.stay()
        sent = secrets.token_bytes(3_000_000)
        opened = await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        assert opened.host == "127.0.0.1"
        assert await soon(echoed(opened.connection, sent)) == sent
        await until(lambda: lab.relay.pairs == 0)


@asynchronous
async def test_an_invited_peer_dials_the_askers_own_relay_directly() -> None:
    async with Lab() as lab, Lab() as asker:
        opened = await lab.invited_by(asker)
        assert await soon(echoed(opened.connection, b"as it is")) == b"as it is"
        assert lab.relay.pairs == 0


@asynchronous
async def test_where_an_asker_is_seen_its_own_relay_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lying(connection: socket.socket, packet: Packet) -> None:
        await write_relay(connection, Joined("8.8.8.8") if isinstance(packet, Joined) else packet)

    monkeypatch.setattr("molink.peer.reach.relay.write_relay", lying)
    async with Lab() as lab, Lab() as asker:
        opened = await lab.invited_by(asker)
        assert await soon(echoed(opened.connection, b"served")) == b"served"
        assert lab.stays.guests.host_of(asker.identity.peer_id) is None


@asynchronous
async def test_nobody_is_dialled_for_an_asker_whose_relay_is_not_known() -> None:
    async with Lab() as lab, Lab() as asker:
        await lab.stay()
        waiting = asker.relay.expect(lab.home.identity.peer_id, b"t" * 16, 0.05)
        question = ReachRequest(lab.home.identity.public_key, b"t" * 16, direct=True)
        session = await open_session(lab.at, RelayUser(asker.identity, None), question)
        await session.invited()
        session.close()
        with pytest.raises(RelayError, match="did not come"):
            await waiting


@asynchronous
async def test_a_peer_that_does_not_stay_is_not_reached_and_a_join_that_nobody_waits_for_is_refused() -> None:
    async with Lab() as lab:
        with pytest.raises(RelayError, match="does not stay here"):
            await Relayed(lab.home.identity.peer_id, lab.at, user()).open()
        session = await open_session(lab.at, user(), JoinRequest(b"t" * 16))
        with pytest.raises(RelayError, match="nobody waits"):
            await session.joined()
        session.close()


@asynchronous
async def test_another_identity_than_the_invited_cannot_join_with_the_token() -> None:
    async with Lab() as lab:
        waiting = asyncio.ensure_future(lab.relay.expect(lab.home.identity.peer_id, b"t" * 16, 5.0))
        await asyncio.sleep(0)
        guest = await open_session(lab.at, user(), JoinRequest(b"t" * 16))
        with pytest.raises(RelayError, match="nobody waits"):
            await guest.joined()
        invited = await open_session(lab.at, lab.home, JoinRequest(b"t" * 16))
        await invited.joined()
        connection, host = await waiting
        assert host == "127.0.0.1"
        for one in (guest, invited):
            one.close()
        connection.close()


@asynchronous
async def test_the_relay_says_where_it_sees_a_port_that_several_sockets_share() -> None:
    async with Lab() as one, Lab() as two:
        me = user()
        first = await open_session(one.at, me)
        port = int(first.observed.rpartition(":")[2])
        assert first.connection.getsockname()[1] == port
        first.close()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = int(probe.getsockname()[1])
        seen = [await open_session(lab.at, me, local_port=free) for lab in (one, two)]
        assert {session.observed for session in seen} == {f"127.0.0.1:{free}"}
        for session in seen:
            session.close()


@asynchronous
async def test_a_dial_back_finds_the_pinned_certificate_and_no_other() -> None:
    async with Lab() as lab, End() as end:
        port = int(end.facts.grpc_addresses[0].rpartition(":")[2])
        for hashed, found in (
            (certificate_hash(end.certificate.der), True),
            (certificate_hash(new_certificate(end.peer_id).der), False),
        ):
            session = await open_session(lab.at, user())
            assert await soon(session.dialled_back(port, hashed)) is found
            session.close()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = int(closed.getsockname()[1])
        session = await open_session(lab.at, user())
        assert not await soon(session.dialled_back(nobody, bytes(32)))
        session.close()


@asynchronous
async def test_nothing_is_answered_before_proof_and_a_proof_made_elsewhere_is_refused() -> None:
    async with Lab() as lab:
        loop, impostor = asyncio.get_running_loop(), Identity.generate()
        for answer in (
            lambda _: JoinRequest(b"t" * 16),
            lambda challenge: prove_user(challenge, impostor.peer_id, impostor, None),
            lambda _: prove_user(Challenge(bytes(32)), lab.identity.peer_id, impostor, None),
        ):
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", lab.relay.port))
            challenge = await read_relay(connection)
            assert isinstance(challenge, Challenge)
            await write_relay(connection, answer(challenge))
            assert isinstance(await soon(read_relay(connection)), RelayRefusal)
            with pytest.raises(RelayError, match="hung up"):
                await soon(read_relay(connection))
            connection.close()


@asynchronous
async def test_bytes_that_are_no_packet_end_their_own_conversation() -> None:
    async with Lab() as lab:
        await lab.stay()
        loop = asyncio.get_running_loop()
        for hostile in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x01\x02\xff\xff" + bytes(512),
            b"\x01\x63\x00\x00",
            b"\x01",
        ):
            for proven in (False, True):
                if proven:
                    connection = (await open_session(lab.at, user())).connection
                else:
                    connection = socket.socket()
                    connection.setblocking(False)
                    await loop.sock_connect(connection, ("127.0.0.1", lab.relay.port))
                    await read_relay(connection)
                await loop.sock_sendall(connection, hostile)
                connection.shutdown(socket.SHUT_WR)
                with suppress(RelayError, OSError):
                    while True:
                        await soon(read_relay(connection))
                connection.close()
        opened = await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        assert await soon(echoed(opened.connection, b"still here")) == b"still here"


@asynchronous
async def test_a_private_swarms_relay_sends_away_who_lacks_the_key_and_is_not_believed_without_it() -> None:
    key = SwarmKey.generate()
    async with Lab(swarm_key=key) as private, Lab() as public:
        with pytest.raises(RelayError, match="private"):
            await open_session(private.at, user(), JoinRequest(b"t" * 16))
        with pytest.raises(RelayError, match="another swarm key"):
            await open_session(public.at, RelayUser(Identity.generate(), key))
        session = await open_session(private.at, RelayUser(Identity.generate(), key))
        session.close()


@asynchronous
async def test_who_answers_in_a_relays_place_is_not_believed() -> None:
    async with Lab() as lab:
        with pytest.raises(RelayError):
            await open_session(replace(lab.at, peer_id=Identity.generate().peer_id), user())


@asynchronous
async def test_hundreds_of_silent_connections_and_identities_do_not_keep_a_user_out() -> None:
    limits = RelayLimits(unproven=16, proven=32)
    async with Lab(limits) as lab:
        await lab.stay()
        loop = asyncio.get_running_loop()
        silent = []
        for _ in range(200):
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", lab.relay.port))
            silent.append(connection)
        held = [await soon(open_session(lab.at, user())) for _ in range(100)]
        opened = await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        assert await soon(echoed(opened.connection, b"still here")) == b"still here"
        for connection in (*silent, *(session.connection for session in held)):
            connection.close()


@asynchronous
async def test_connections_that_came_together_as_a_relay_ends_are_all_closed() -> None:
    """Most of their conversations have not begun then."""
    loop = asyncio.get_running_loop()
    async with Lab(RelayLimits(unproven=8, proven=32)) as lab:
        came = [socket.create_connection(("127.0.0.1", lab.relay.port)) for _ in range(40)]
        await asyncio.sleep(0)
    for connection in came:
        with connection:
            connection.setblocking(False)
            with suppress(ConnectionResetError):
                while await soon(loop.sock_recv(connection, 4096)):
                    pass


@asynchronous
async def test_an_identity_has_so_many_pairs_and_no_more() -> None:
    async with Lab(RelayLimits(pairs_of_identity=2)) as lab:
        await lab.stay()
        opened = [await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open()) for _ in range(2)]
        with pytest.raises(RelayError, match="as many pairs"):
            await Relayed(lab.home.identity.peer_id, lab.at, user()).open()
        opened[0].connection.close()
        await until(lambda: lab.relay.pairs == 1)
        opened.append(await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open()))
        for one in opened:
            one.connection.close()


@asynchronous
async def test_a_second_stay_takes_the_place_of_the_first_and_a_lost_one_is_renewed() -> None:
    async with Lab() as lab:
        await lab.stay()
        other = Stays(lab.home, ("127.0.0.1", 1), lab.relays.get)
        async with other:
            other.keep((lab.at,))
            await until(lambda: other.relays == (lab.at,))
            assert lab.relay.stays == {lab.home.identity.peer_id}
        await until(lambda: lab.stays.relays == (lab.at,) and bool(lab.relay.stays))


@pytest.mark.parametrize("turns", range(8))
@asynchronous
async def test_a_stay_leaves_no_connection_open_whatever_else_ends_at_the_moment_when_it_is_let_go(
    turns: int, opened: list[RelaySession]
) -> None:
    async with Lab() as lab:
        await lab.stay()
        opened[-1].connection.shutdown(socket.SHUT_RDWR)  # the stay ends by itself, while it is let go of,
        for _ in range(turns):
            await asyncio.sleep(0)
        lab.stays.keep(())
        for _ in range(turns % 3):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("stay"):  # and so is every task, as when a program is interrupted
                task.cancel()
    assert [session.connection.fileno() for session in opened] == [-1] * len(opened)


@asynchronous
async def test_an_invitation_over_a_stay_that_is_gone_without_a_word_comes_over_the_next_one() -> None:
    async with Lab() as lab:
        silent = await open_session(lab.at, lab.home)
        await write_relay(silent.connection, Stay())
        await until(lambda: bool(lab.relay.stays))
        opening = asyncio.create_task(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        assert isinstance(await soon(read_relay(silent.connection)), Invite)
        await lab.stay()
        opened = await soon(opening)
        assert await soon(echoed(opened.connection, b"there")) == b"there"
        silent.close()


@asynchronous
async def test_stays_that_are_doubted_are_made_anew_at_a_rate_and_meanwhile_the_old_ones_count(
    opened: list[RelaySession],
) -> None:
    async with Lab() as lab:
        await lab.stay()
        for _ in range(3):
            lab.stays.doubt()
            await until(lambda: len(opened) == 2)
            assert lab.relay.stays == {lab.home.identity.peer_id}
            assert lab.stays.relays == (lab.at,)
        way = await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        assert await soon(echoed(way.connection, b"there")) == b"there"
        assert len(opened) == 2
        assert opened[0].connection.fileno() == -1


@pytest.mark.parametrize("how", ["finished", "one end is gone"])
@asynchronous
async def test_an_end_that_reads_nothing_keeps_its_connection_for_a_while_only(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splice, "LINGER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        far = socket.create_connection(server.getsockname())
        stranger, _ = server.accept()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the system would take all of it
    near, inner = socket.socketpair()
    near.setblocking(False)
    with near, stranger:
        async with Splices() as splices:
            joined = await splices.splice(inner, far)
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(near, bytes(1 << 26)))
            await until(lambda: not select.select([], [near], [], 0)[1])
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if how == "finished":
                joined.finish()
            else:
                near.close()
            await until(lambda: len(splices) == 0)
            assert far.fileno() == -1


@asynchronous
async def test_a_local_target_is_good_for_one_connection_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with Lab() as lab, Splices() as splices:
        await lab.stay()
        opened = await soon(Relayed(lab.home.identity.peer_id, lab.at, user()).open())
        target = LocalTarget(splices, tmp_path)
        at = await target.open(opened.connection)
        near = socket.socket(socket.AF_UNIX)
        near.setblocking(False)
        await asyncio.get_running_loop().sock_connect(near, at.removeprefix("unix:"))
        assert await soon(echoed(near, b"through")) == b"through"
        await until(lambda: len(splices) == 0)
        assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240
        target.close()
