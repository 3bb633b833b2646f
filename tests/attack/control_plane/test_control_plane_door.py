"""At the control plane's door: nothing is believed before it is checked, and crowds keep no newcomer out."""

import contextlib
import errno
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1_key_pair
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.exceptions import RawConnError
from support.attackers.control_plane_attack import (
    DATA,
    ED25519,
    PATIENCE_S,
    PATIENT,
    PATIENT_TABLE,
    SYN,
    WINDOW,
    Claim,
    delimited,
    dialled,
    memory_within,
    newcomer_finds,
    pour,
    proven,
    table_of,
    varint,
    victim,
)

from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.host import libp2p_limits, listener
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, open_host
from molink.dht.identity.addresses import PeerAddress
from molink.dht.identity.identity import Identity
from molink.dht.membership.door import ConnectionLimits
from molink.dht.node.network import Network

ADA = Identity.generate()
MIB = 2**20
EIGHT_GIB = 2**33


def under_attack(
    attack: Callable[[Network], Awaitable[None]],
    connections: ConnectionLimits = PATIENT,
    table_callers: ConnectionLimits = PATIENT_TABLE,
) -> None:
    """The attack on a peer; afterwards the peer serves a newcomer as before."""

    async def scenario() -> None:
        with trio.fail_after(2 * PATIENCE_S):
            async with victim(ADA, connections, table_callers) as network:
                await attack(network)
                await newcomer_finds(network.host.addresses[0])

    trio.run(scenario)


def test_no_length_is_believed_before_anybody_is_proven() -> None:
    async def attack(network: Network) -> None:
        async def lie() -> None:
            async with await dialled(network.host.addresses[0]) as stream:
                await stream.send_all(delimited("/multistream/1.0.0") + varint(EIGHT_GIB))
                assert await pour(stream, 150 * MIB) < 16 * MIB

        with memory_within(64 * MIB):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(lie)

    under_attack(attack)


def test_no_length_is_believed_of_who_is_dialled() -> None:
    async def scenario() -> None:
        async def lie(stream: trio.SocketStream) -> None:
            async with stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(delimited("/multistream/1.0.0") + varint(EIGHT_GIB))
                    await pour(stream, 150 * MIB)

        async with trio.open_nursery() as nursery:
            [liar] = await nursery.start(functools.partial(trio.serve_tcp, lie, 0, host="127.0.0.1"))
            port = liar.socket.getsockname()[1]
            async with open_host(Identity.generate(), None, None) as client:
                with memory_within(64 * MIB):
                    for _ in range(8):
                        with pytest.raises(DialError, match="does not answer as a peer"):
                            await client.dial(
                                f"/ip4/127.0.0.1/tcp/{port}/p2p/{ADA.peer_id}", timeout_s=PATIENCE_S
                            )
            nursery.cancel_scope.cancel()

    trio.run(scenario)


IDENTITY_POINT = (1).to_bytes(32, "little")
NOT_CANONICAL = b"\xee" + b"\xff" * 30 + b"\x7f"
SECP256K1, RSA = create_secp256k1_key_pair(), create_rsa_key_pair(2048)
ORDER_8 = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")
UNSOUND = {
    "the identity point": Claim(ED25519 + IDENTITY_POINT, lambda _: IDENTITY_POINT + bytes(32)),
    "a point of order 8": Claim(ED25519 + ORDER_8, lambda _: IDENTITY_POINT + bytes(32)),
    "a key written in another way": Claim(ED25519 + NOT_CANONICAL, lambda _: IDENTITY_POINT + bytes(32)),
    "a key of secp256k1": Claim(SECP256K1.public_key.serialize(), SECP256K1.private_key.sign),
    "a key of RSA": Claim(RSA.public_key.serialize(), RSA.private_key.sign),
    "nothing": Claim(b"", lambda _: b""),
}


@pytest.mark.parametrize("claim", UNSOUND.values(), ids=UNSOUND)
def test_an_identity_that_nobody_can_hold_is_refused(claim: Claim) -> None:
    async def attack(network: Network) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 whatever hanging up causes
            async with proven(network.host.addresses[0], claim):
                pass
        assert network.host.connections == 0

    under_attack(attack)


def test_no_other_muxer_is_spoken() -> None:
    async def attack(network: Network) -> None:
        with pytest.raises(Exception, match="mplex"):
            async with proven(network.host.addresses[0], Claim.honest(), muxer="/mplex/6.7.0"):
                pass

    under_attack(attack)


def test_who_sends_more_than_its_window_holds_is_hung_up_on() -> None:
    async def attack(network: Network) -> None:
        body = bytes(60_000)
        async with proven(network.host.addresses[0], Claim.honest()) as muxed:
            await muxed.frame(WINDOW, SYN, 1, 0)
            with contextlib.suppress(ConnectionClosedError, RawConnError):
                for _ in range(1000):
                    await muxed.frame(DATA, 0, 1, len(body), body)
                raise AssertionError("60 MB have been taken that nobody reads")

    under_attack(attack)


@pytest.mark.parametrize("length", [65_537, 16 * MIB, 2**32 - 1])
def test_a_frame_longer_than_any_ends_the_connection(length: int) -> None:
    async def attack(network: Network) -> None:
        async with proven(network.host.addresses[0], Claim.honest()) as muxed:
            await muxed.frame(DATA, SYN, 1, length)
            await muxed.until_hung_up()

    under_attack(attack)


def test_too_many_streams_end_the_connection() -> None:
    async def attack(network: Network) -> None:
        async with proven(network.host.addresses[0], Claim.honest()) as muxed:
            for stream in range(libp2p_limits.MAX_STREAMS + 1):
                await muxed.frame(WINDOW, SYN, 2 * stream + 1, 0)
            await muxed.until_hung_up()

    under_attack(attack)


def test_silent_connections_keep_nobody_out() -> None:
    async def attack(network: Network) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3 * listener.LIMITS.unproven):
                await stack.enter_async_context(await dialled(network.host.addresses[0]))
            await newcomer_finds(network.host.addresses[0])

    under_attack(attack)


def test_idle_identities_keep_nobody_out() -> None:
    async def attack(network: Network) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(30):
                await stack.enter_async_context(proven(network.host.addresses[0], Claim.honest()))
            await newcomer_finds(network.host.addresses[0])
            assert network.host.connections <= 20

    under_attack(attack, replace(PATIENT, unproven=8, proven=20, of_network=16))


def test_one_identity_has_four_connections() -> None:
    async def attack(network: Network) -> None:
        claim = Claim.honest()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(12):
                await stack.enter_async_context(proven(network.host.addresses[0], claim))
            with trio.fail_after(PATIENCE_S):
                while network.host.connections > listener.LIMITS.of_identity:  # noqa: ASYNC110 nothing to wait on
                    await trio.sleep(0.05)

    under_attack(attack)


def test_who_says_nothing_is_hung_up_on() -> None:
    async def scenario() -> None:
        with trio.fail_after(PATIENCE_S):
            async with (
                victim(ADA, replace(PATIENT, proof_s=0.5)) as network,
                await dialled(network.host.addresses[0]) as silent,
            ):
                while await silent.receive_some(100):
                    pass

    trio.run(scenario)


def test_who_does_nothing_is_hung_up_on() -> None:
    async def attack(network: Network) -> None:
        async with proven(network.host.addresses[0], Claim.honest()) as muxed:
            await muxed.until_hung_up()

    under_attack(attack, replace(PATIENT, idle_s=2.0))


def test_a_connection_that_cannot_be_accepted_does_not_end_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM, errno.EIO]
    with socket.socket() as unused:
        kind = type(trio.socket.from_stdlib_socket(unused))
    real = kind.accept

    async def failing(listening: trio.socket.SocketType) -> object:
        if failures:
            raise OSError(failures.pop(), "no")
        return await real(listening)

    monkeypatch.setattr(kind, "accept", failing)

    async def attack(network: Network) -> None:
        while failures:
            (await dialled(network.host.addresses[0])).socket.close()
            await trio.sleep(0.05)

    under_attack(attack)


@pytest.mark.attack
def test_a_peer_without_file_descriptors_goes_on() -> None:
    """Under `ulimit -n 64`, where that can be set, 300 silent connections are more than it can hold."""
    peer = [sys.executable, str(Path(__file__).parents[2] / "support" / "swarms" / "lone_peer.py"), "0"]
    limited = peer if os.name == "nt" else ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *peer]

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(trio.open_nursery())
            process = await nursery.start(
                functools.partial(trio.run_process, limited, stdout=subprocess.PIPE)
            )
            stack.callback(nursery.cancel_scope.cancel)
            address = (await process.stdout.receive_some(1000)).decode().strip()
            where = PeerAddress.parse(address)
            for _ in range(300):
                stream = await trio.open_tcp_stream(where.host, where.port)
                stack.callback(stream.socket.close)
            for _ in range(3):
                async with open_host(Identity.generate(), None, None) as newcomer:
                    peer_id = await newcomer.dial(address, timeout_s=PATIENCE_S)
                    assert peer_id in await table_of(newcomer, peer_id)

    trio.run(scenario)


def test_silent_table_streams_keep_nobody_from_the_table() -> None:
    async def attack(network: Network) -> None:
        async with open_host(Identity.generate(), None, None) as silent:
            peer_id = await silent.dial(network.host.addresses[0], timeout_s=PATIENCE_S)
            for _ in range(8):
                await silent.open_stream(peer_id, TABLE, timeout_s=PATIENCE_S)
            await newcomer_finds(network.host.addresses[0])

    under_attack(attack)


def test_a_stream_that_asks_the_table_nothing_is_ended() -> None:
    async def scenario() -> None:
        with trio.fail_after(PATIENCE_S):
            async with (
                victim(ADA, table_callers=replace(PATIENT_TABLE, proof_s=0.5)) as network,
                open_host(Identity.generate(), None, None) as silent,
            ):
                peer_id = await silent.dial(network.host.addresses[0], timeout_s=PATIENCE_S)
                stream = await silent.open_stream(peer_id, TABLE, timeout_s=PATIENCE_S)
                with pytest.raises(StreamEndedError):
                    await stream.receive(10)

    trio.run(scenario)


HOSTILE_ADDRESSES = [
    "",
    "/",
    "/foo",
    "foo",
    "/ip4/127.0.0.1/tcp/99999",
    "/ip4/127.0.0.1/tcp/0",
    "/ip4/127.0.0.1/tcp/04001",
    "/ip4/127.0.0.1/udp/4001",
    "/ip4/127.0.0.1/tcp/4001/ws",
    "/ip4/127.0.0.1/tcp/4001/p2p/12D3",
    "/ip4/256.0.0.1/tcp/4001",
    "/ip4/0127.0.0.1/tcp/4001",
    "/ip4/::1/tcp/4001",
    "/ip4/224.0.0.1/tcp/4001",
    "/ip6/::0001/tcp/4001",
    "/ip6/fe80::1%eth0/tcp/4001",
    "/dns/a b/tcp/4001",
    "/dns/-/tcp/4001",
    "/dns/1.2.3/tcp/4001",
    f"/dns/{'a.' * 127}b/tcp/4001",
    "/dns/ex\u202eample.org/tcp/4001",
    "/dnsaddr/example.org/tcp/4001",
    "/unix/tmp/tcp/4001",
    "/ip4/127.0.0.1/tcp/4001/p2p-circuit",
    "/ip4/127.0.0.1/tcp/" + "9" * 10_000,
]


@pytest.mark.parametrize("address", HOSTILE_ADDRESSES)
def test_no_address_is_worse_than_one_that_nobody_answers(address: str) -> None:
    async def scenario() -> None:
        async with open_host(Identity.generate(), None, None) as host:
            for end in ("", f"/p2p/{ADA.peer_id}", "/p2p/", "/p2p/\x00"):
                with pytest.raises(DialError):
                    await host.dial(address + end, timeout_s=5)
                await host.hang_up(address + end)
                assert not host.is_connected(address + end)
                with pytest.raises(DialError):
                    await host.open_stream(address + end, TABLE, timeout_s=5)

    trio.run(scenario)


@pytest.mark.parametrize("kind", ["dns", "dns4", "dns6"])
def test_a_peer_is_reached_by_its_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *how: int, **more: int) -> list[tuple[object, ...]]:
        if host != "peer.example.org":
            return real(host, port, *how, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def attack(network: Network) -> None:
        port = network.host.addresses[0].split("/")[4]
        async with open_host(Identity.generate(), None, None) as other:
            address = f"/{kind}/peer.example.org/tcp/{port}/p2p/{ADA.peer_id}"
            assert await other.dial(address, timeout_s=PATIENCE_S) == ADA.peer_id

    under_attack(attack)


def test_a_dial_that_fails_says_why_in_words_for_its_user() -> None:
    async def attack(network: Network) -> None:
        host, port = "127.0.0.1", network.host.addresses[0].split("/")[4]
        async with open_host(Identity.generate(), None, None) as other:
            with pytest.raises(DialError, match="another one than the address says"):
                await other.dial(
                    f"/ip4/{host}/tcp/{port}/p2p/{Identity.generate().peer_id}", timeout_s=PATIENCE_S
                )
            with pytest.raises(DialError, match=r"[Rr]efused"):
                await other.dial(f"/ip4/{host}/tcp/1/p2p/{ADA.peer_id}", timeout_s=PATIENCE_S)
            with pytest.raises(DialError, match=r"no host named nowhere\.invalid"):
                await other.dial(f"/dns/nowhere.invalid/tcp/1/p2p/{ADA.peer_id}", timeout_s=PATIENCE_S)

    under_attack(attack)
